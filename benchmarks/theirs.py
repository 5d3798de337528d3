"""TRL's side of the comparison: `GRPOTrainer`, configured as well as possible on a CPU."""

import json
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from benchmarks import common
from lit_rlsched.types import Prompt

MAX_GAP = 1e-4
"""Mean difference of log-probs above which engine and trainer do not have the same weights."""


def make_reward(
    setting: common.Setting, eos_token_id: int, meter: common.Meter
) -> Callable[..., list[float]]:
    """Our reward function, which finds out that a completion was cut: TRL does not pass this on."""
    generations = setting.generations

    def reward(completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        reasons = ["stop" if ids[-1] == eos_token_id else "length" for ids in completion_ids]
        scores = common.TASKS[setting.task].reward(completions, finish_reasons=reasons, **kwargs)
        meter.rewards.append(sum(scores) / len(scores))
        groups = [scores[i : i + generations] for i in range(0, len(scores), generations)]
        meter.equal.append(sum(len({*group}) == 1 for group in groups) / len(groups))
        return scores

    return reward


class Clock(TrainerCallback):  # type: ignore[misc]
    """Start the meter, and read it and save the weights after every optimizer step."""

    def __init__(self, meter: common.Meter, setting: common.Setting, folder: Path) -> None:
        self.meter, self.setting, self.folder = meter, setting, folder

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock in the first round."""
        self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the update."""
        self.meter.lap("update")
        common.save(kwargs["model"], self.folder, self.setting, state.global_step)


def make_trainer_class(
    setting: common.Setting, rounds: Sequence[Sequence[Prompt]], meter: common.Meter
) -> Any:
    """`GRPOTrainer` with counters. It checks that the prompts are the same as ours."""
    from trl import GRPOTrainer

    counts = meter.counts

    class Counted(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            meter.lap("rollout")
            return output

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = [
                list(p.token_ids)
                for p in rounds[len(meter.lengths)]
                for _ in range(setting.generations)
            ]
            assert [list(ids) for ids in prompt_ids] == wanted, "the sides have different prompts"
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[no-untyped-call]
            lengths = [len(ids) for ids in output[0]]
            counts.completions += len(lengths)
            counts.tokens += sum(lengths)
            if not self.use_vllm:  # `generate` runs until the longest completion ends
                counts.decode_steps += max(lengths)
                counts.decode_rows += max(lengths) * len(lengths)
            meter.lengths.append(sum(lengths) / len(lengths))
            return output

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
            tokens = int(completion.sum())
            counts.updates += 1
            counts.completion_positions += completion.numel()
            counts.completion_padding += completion.numel() - tokens
            positions = prompt.numel() + completion.numel()
            counts.positions += positions
            counts.padding += positions - tokens - int(prompt.sum())
            return super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]

    return Counted


def adapt_vllm(counts: common.Counts) -> None:
    """Make TRL 1.16 work with vLLM on a CPU; without this it fails or draws with stale weights.

    TRL sends parameters one by one, which fails after vLLM has packed its linear weights, and never
    sends a tied LM head, of which vLLM keeps a packed copy. It cannot set the engine's precision.
    """
    vllm_generation: Any = import_module("trl.generation.vllm_generation")

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        weights = dict(self._iter_named_params())
        if self.model.config.tie_word_embeddings:
            weights["lm_head.weight"] = self.model.lm_head.weight.data
        runner.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        self.llm.reset_prefix_cache()

    original = vllm_generation.LLM

    def make_llm(*args: Any, **kwargs: Any) -> Any:
        llm = original(*args, **kwargs, dtype="float32", enforce_eager=True)
        step = llm.llm_engine.step

        def counted_step() -> Any:
            counts.decode_steps += 1
            return step()

        llm.llm_engine.step = counted_step
        return llm

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = make_llm


def make_config(setting: common.Setting, folder: Path, longest_prompt: int) -> Any:
    """Return the quick task as TRL's configuration."""
    from trl import GRPOConfig

    vllm: dict[str, Any] = {}
    if setting.trl_backend == "vllm":
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": longest_prompt + setting.limit,
        }
    return GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=setting.trl_batch_size,
        gradient_accumulation_steps=setting.completions // setting.trl_batch_size,
        num_generations=setting.generations,
        max_completion_length=setting.limit,
        max_steps=setting.rounds,
        temperature=common.TEMPERATURE,
        learning_rate=setting.learning_rate,
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=common.WARMUP_STEPS,
        max_grad_norm=common.CLIP,
        loss_type="dapo",
        beta=0.0,
        mask_truncated_completions=setting.mask_truncated,
        shuffle_dataset=False,
        seed=setting.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **vllm,
    )


def train(setting: common.Setting, folder: Path) -> dict[str, Any]:
    """Train, save the weights and return the figures."""
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(setting.model, padding_side="left")
    rounds = common.rounds_of_prompts(common.training_rows(setting), tokenizer, setting)
    column = common.TASKS[setting.task].column
    rows = []
    for prompt in (p for prompts in rounds for p in prompts):
        value = prompt.columns[column]
        if not isinstance(value, str):  # Arrow would give every row the keys of all rows
            value = json.dumps(value)
        rows.append({"prompt": prompt.text, column: value})
    meter = common.Meter()
    if setting.trl_backend == "vllm":
        adapt_vllm(meter.counts)
    trainer = make_trainer_class(setting, rounds, meter)(
        model=setting.model,
        reward_funcs=make_reward(setting, tokenizer.eos_token_id, meter),
        args=make_config(setting, folder, max(len(p.token_ids) for r in rounds for p in r)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock(meter, setting, folder)],
    )
    torch.set_num_threads(setting.threads)
    trainer.train()
    if setting.trl_backend == "vllm":
        meter.counts.decode_rows = meter.counts.tokens  # so that no row waits for another
        gap = trainer.state.log_history[-1]["sampling/sampling_logp_difference/mean"]
        assert gap < MAX_GAP, f"TRL's engine decoded with other weights: log-probs differ by {gap}"
    return meter.result()


if __name__ == "__main__":
    common.run_side(train)
    os._exit(0)  # TRL never closes vLLM's engine, which would print an error
