#!/usr/bin/env bash
# Installs a wheel without extras into an empty virtual environment of each Python named, and runs
# it there: imports, the command line, one round of training. Torch comes as its CPU build; a Python
# for which there is none fails.
#     scripts/smoke_wheel.sh dist/lit_rlsched-0.1.0-py3-none-any.whl python3.11 python3.12
set -euo pipefail
wheel=$(realpath "$1"); shift
root=$(cd "$(dirname "$0")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONPATH  # what runs must come from the wheel

smoke() {
  local python=$1 folder=$2
  "$python" -m venv "$folder/venv" || return
  local bin=$folder/venv/bin
  "$bin/pip" install -q --retries 1 "torch==2.13.0+cpu" \
    --extra-index-url https://download.pytorch.org/whl/cpu || return
  "$bin/pip" install -q "$wheel" || return
  if "$bin/pip" list 2>/dev/null | grep -i '^nvidia-'; then
    echo "CUDA packages were installed" >&2
    return 1
  fi
  cd "$folder" || return  # away from the sources
  "$bin/python" -c 'import lit_rlsched, lit_rlsched.callbacks, lit_rlsched.engines as e
assert "site-packages" in lit_rlsched.__file__, lit_rlsched.__file__
[getattr(p, n) for p in (lit_rlsched, lit_rlsched.callbacks, e) for n in p.__all__]
print("imported", lit_rlsched.__version__)' || return
  "$bin/lit-rlsched" --help >/dev/null || return
  "$bin/lit-rlsched" fit --help >/dev/null || return
  printf '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n' >train.jsonl
  cat >rewards.py <<'PYTHON'
def digits(prompts, completions, completion_ids, answer, **kwargs):
    return [float(sum(map(str.isdigit, text))) for text in completions]
PYTHON
  "$bin/lit-rlsched" fit --model=GRPOModule --model.model="$root/examples/countdown/model" \
    --data.train_data=train.jsonl --data.reward_funcs='[rewards.digits]' \
    --data.engine=TransformersEngine --data.prompts_per_round=2 --data.num_generations=4 \
    --data.max_completion_length=8 --data.micro_batch_tokens=1024 \
    --trainer.accelerator=cpu --trainer.max_epochs=1 --trainer.logger=false || return
}

failed=0
for python in "$@"; do
  folder=$(mktemp -d)
  if (smoke "$python" "$folder") >"$folder/log" 2>&1; then
    echo "$("$python" --version): $(grep imported "$folder/log"), command line and one round"
  else
    echo "$("$python" --version) failed:"; tail -5 "$folder/log"; failed=1
  fi
  rm -rf "$folder"
done
exit $failed
