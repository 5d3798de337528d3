"""What a user gets wrong, and what they are told."""

import os
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoTokenizer

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import (
    MicroGroupSampling,
)
from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.engines._vllm_guest import check_head_size
from lit_rlsched.settings import UsageError


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "\u00e9"}', encoding="utf-8-sig")
    assert list(load_rows(tmp_path / "prompts.jsonl")) == [{"prompt": "\u00e9"}]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_token_that_the_model_has_no_embedding_for(fit, sums, tiny_model, tmp_path, stage):
    """Before the engine starts."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["QQQ"])
    tokenizer.save_pretrained(tmp_path / "other")
    rows = [{"prompt": f"row {i}", "answer": "1"} for i in range(6)]
    rows[4]["prompt"] = "row QQQ"
    began = []
    engine = TransformersEngine()
    engine.start = began.append
    data = {"train_data": sums[:9], "tokenizer": str(tmp_path / "other"), "prompts_per_round": 2}
    token = (
        r"has the token 66 \('QQQ'\) of the tokenizer `.*other`.*for 0 to 65\. Use the model's own"
    )
    with pytest.raises(
        ValueError, match=rf"`{stage}_data`: The prompt of row 4 \(uid .*\) {token}"
    ):
        fit(**data | {f"{stage}_data": rows, "engine": engine})
    assert not began
    for first in (rows[:4], rows[5:]):  # the tokenizer may know more than the prompts need
        assert make_prompts(first, tokenizer, max_prompt_length=99, embeddings=66)
    assert make_prompts(rows, tokenizer, max_prompt_length=99, embeddings=128)


def test_heads_that_vllm_has_not_on_cpu():
    with pytest.raises(UsageError, match=r"heads have a size of 48, .*32, 64.*TransformersEngine"):
        check_head_size(SimpleNamespace(head_dim=None, hidden_size=96, num_attention_heads=2))
    check_head_size(SimpleNamespace(head_dim=64))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_more_slots_than_vllm_has_room_for(fit):
    engine = VLLMEngine(kv_cache_gib=5 * 32 * 512 / 2**30)  # 4 blocks and one that vLLM keeps
    with pytest.raises(UsageError, match=r"slots=8.*Use `slots=4`"):
        fit(callbacks=[MicroGroupSampling(slots=8)], engine=engine)


def test_a_callback_without_rollouts(tiny_policy):
    from lightning import LightningModule, Trainer

    class Plain(LightningModule):
        def training_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            pass

    trainer = Trainer(logger=False, callbacks=[MicroGroupSampling(2)], accelerator="cpu")
    with pytest.raises(UsageError, match="Fit with `datamodule=RolloutDataModule"):
        trainer.fit(Plain(), train_dataloaders=[1, 2])


def test_a_checkpoint_of_another_run(fit, tmp_path, sums, tiny_model):
    fit(
        callbacks=[ModelCheckpoint(tmp_path / "c", save_last=True)],
        trainer={"enable_checkpointing": True, "max_epochs": 1},
    )
    for changed, message in (
        ({"num_generations": 8}, "`num_generations=4`, this run has `num_generations=8`"),
        ({"seed": 4}, "`seed=3`, this run has `seed=4`"),
        ({"train_data": sums[:40]}, "data set|prompts"),
        ({"module": GRPOModule(tiny_model, lora_rank=2)}, "of another configuration"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(ckpt_path=tmp_path / "c" / "last.ckpt", **changed)


def spoiled(kind):
    """A reward that goes wrong for completions of odd length, about half of them."""

    def spoiled(prompts, completions, completion_ids, **kwargs):
        if len(completion_ids[0]) % 2:
            if kind == "raises":
                raise RuntimeError("broken")
            if kind == "crashes":
                os._exit(1)
            if kind == "hangs":
                time.sleep(60)
        return [float(len(completion_ids[0]))]

    return spoiled


@pytest.mark.parametrize(
    ("kind", "counter"),
    [("raises", "raised"), ("crashes", "crashes"), ("hangs", "timeouts")],
)
def test_a_reward_that_fails_costs_its_completion_and_not_the_run(fit, kind, counter):
    slow = {"reward_timeout": 0.3} if kind == "hangs" else {}
    trainer, module, _ = fit(reward_funcs=[spoiled(kind)], trainer={"max_epochs": 1}, **slow)
    assert trainer.global_step == 1
    figures = trainer.callback_metrics
    assert figures[f"rewards/spoiled/{counter}"] == figures["rewards/unscorable"] > 0
    assert torch.isfinite(figures["reward"])
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_nothing_is_built_where_the_engine_would_not_start(sums, digits):
    data = RolloutDataModule(sums, [digits], engine=TransformersEngine())
    data.run.close()
    data.run.close()
