"""The callback writes the last and the best model when a run ends."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import ExportModel
from lit_rlsched.cli.main import main

IDS = torch.arange(4, 64).view(3, 20)


def logprobs(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits.float().log_softmax(-1)


def test_the_last_and_the_best_model_of_a_run(fit, sums, tmp_path):
    folder = tmp_path / "export"

    def run(epochs, ckpt_path=None):
        best = ModelCheckpoint(
            tmp_path / "c", monitor="val/mean@2", mode="min", save_last=True, filename="best"
        )
        _, module, _ = fit(
            callbacks=[best, ExportModel()],
            trainer={"enable_checkpointing": True, "max_epochs": epochs},
            ckpt_path=ckpt_path,
            val_data=sums[80:84],
            val_num_generations=2,
            val_greedy=False,
        )
        last = AutoModelForCausalLM.from_pretrained(folder / "last")
        assert GenerationConfig.from_pretrained(folder / "last").top_k == 0  # not transformers' 50
        torch.testing.assert_close(logprobs(last), logprobs(module.model), atol=1e-5, rtol=0)
        chosen = GRPOModule.load_from_checkpoint(best.best_model_path)
        assert torch.equal(
            logprobs(AutoModelForCausalLM.from_pretrained(folder / "best")), logprobs(chosen.model)
        )
        return (folder / "last" / "README.md").read_text()

    assert "| optimizer steps | 1 |" in run(1)
    assert "| optimizer steps | 2 |" in run(2, tmp_path / "c" / "last.ckpt")
    assert {p.name for p in folder.iterdir()} == {"last", "best"}


def test_an_export_that_fails_does_not_fail_the_run(fit, monkeypatch, tmp_path):
    monkeypatch.setattr(ModelCard, "save", lambda *_: Path("/proc/no").write_text(""))
    with pytest.warns(match="export/last` is incomplete or not uploaded"):
        fit(callbacks=[ExportModel()], trainer={"max_epochs": 1})
    assert not (tmp_path / "export" / "last").exists()


@pytest.mark.slow
def test_the_callback_in_yaml(capsys):
    root = Path(__file__).parents[2]
    given = f"--config={root}/configs/quickstart.yaml"
    with pytest.raises(SystemExit):
        main(["fit", given, "--trainer.callbacks+=ExportModel", "--print_config=skip_default"])
    assert "lit_rlsched.callbacks.ExportModel" in capsys.readouterr().out
