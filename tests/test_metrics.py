"""The page of metrics: complete, without dead entries, and right."""

import copy
import math
import re
from importlib.util import find_spec
from pathlib import Path

import logged_metrics
import pytest
import torch
from lightning import LightningModule, Trainer

import lit_rlsched
from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    AdaptiveTimeouts,
    AsyncRollout,
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    ParallelismPlanner,
    PromptBudget,
    PromptChoice,
    RolloutCallback,
    RolloutWindow,
    SortedBatching,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.scheduling.length_prediction import PromptHistory

SOURCE = Path(lit_rlsched.__file__).parent
PAGE = {name: cells for name, cells in logged_metrics.described()}
HUGGING_FACE = {"loss", "grad_norm", "learning_rate"}
"""Logged by the Trainer of transformers, from which TRL's trainers inherit."""
OTHER_FORMULA = {"policy_loss"}
"""TRL's has the normalisation of the loss, and is only logged with an entropy bonus."""
RARE = {
    "dropped/too_few_scores": "rewards that are None",
    "dropped/unscored": "rewards that are None",
    "dropped/nonfinite_advantage": "huge rewards",
    "dropped/nonfinite_logprob": "an engine that reports NaN",
    "dropped/nonfinite_draft": "a policy that gives NaN",
    "dropped/lost_draft": "kept weights that are missing; `callbacks/test_rollout_window.py`",
    **dict.fromkeys(
        (
            *("tools/call_frequency", "tools/failure_frequency", "tools/wait_ratio"),
            *("tools/trained_over_drawn_wait", "tools/unparsed_frequency", "tools/control_tokens"),
            "tools/cache_hit_rate",
            *(f"dropped/environment_{why}" for why in ("raised", "timeout", "crashed")),
            *(f"dropped/environment_{why}" for why in ("out_of_memory", "observation", "reply")),
            "dropped/environment_diverged",
        ),
        "tools; `tests/environments`",
    ),
    "rollout/control_tokens": "rows with tokens of the chat template",
    "dropped/stale": "a completion that was drawn under a larger `max_staleness`",
    "dropped/limit_train_batches": "a Trainer that stops within a round",
    "dropped/new_trainer": "a second Trainer",
}
"""Metrics that the runs below do not log, and what they need."""


def test_the_page_is_a_table_without_gaps():
    names = [name for name, _ in logged_metrics.described()]
    assert len(names) == len(PAGE) > 100
    for name, (unit, limits, trl, definition) in PAGE.items():
        assert unit and limits and definition and trl in ("", "yes"), name
        if unit.startswith("share"):
            assert limits == "0 to 1", name


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_logs_what_is_marked():
    folder = Path(find_spec("trl").origin).parent / "trainer"
    source = "".join((folder / f"{name}_trainer.py").read_text() for name in ("grpo", "rloo"))
    theirs = {
        re.sub(r"\{\w+\}", "<func>", name)
        for name in re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source)
    }
    marked = {name for name, (_, _, trl, _) in PAGE.items() if trl}
    assert len(marked) > 25
    assert marked == (theirs & PAGE.keys()) - OTHER_FORMULA | HUGGING_FACE


class Tiny(LightningModule):
    """One weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch).sum()
        self.log_dict({"loss": loss, "made/up": loss})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def fit_tiny(folder):
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=folder, **off)
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.ones(1, 1)))


def test_a_metric_that_the_page_lacks_fails_the_test_that_logs_it(tmp_path):
    with pytest.raises(pytest.fail.Exception, match=r"logged \['made/up'\]: describe it"):
        fit_tiny(tmp_path)


@pytest.mark.logs("made/up")
def test_a_test_may_log_made_up_metrics(tmp_path):
    fit_tiny(tmp_path)


def test_names_with_a_part_that_varies():
    logged_metrics.check(["rewards/mine/std", "val/mean@4", "test/pass@16", "staleness/8+"])
    with pytest.raises(pytest.fail.Exception, match=r"\['rewards/a/b/std', 'tests/accuracy'\]"):
        logged_metrics.check(["tests/accuracy", "reward", "rewards/a/b/std"])


class Divisible(TransformersEngine):
    """Claims that its model can be split."""

    tensor_parallel_size = 1

    def max_tensor_parallel_size(self, spec):
        return 2


def judge(prompts, completions, completion_ids, log_failure, **kwargs):
    return [float(len(text) % 3) for text in completions]


@pytest.mark.slow
def test_each_described_metric_is_logged(fit, tiny_model, sums):
    short = {"num_generations": 2, "max_completion_length": 16, "reward_funcs": [judge]}
    cispo = {"loss_type": "cispo", "epsilon_high": 5.0}
    runs = [
        fit(
            GRPOModule(tiny_model, beta=0.1),
            [
                SortedBatching(mode="partial"),
                LengthPrediction(PromptHistory()),
                AdaptiveTimeouts(),
            ],
            val_data=sums[:2],
            val_num_generations=2,
            **short,
        ),
        fit(
            GRPOModule(tiny_model, learning_rate=1e-3),
            [
                TailBatching(completion_ratio=1.5),
                DownSampling(keep=2),
                DynamicSampling(),
                ParallelismPlanner(),
            ],
            trainer={"max_epochs": 6},
            engine=Divisible(),
            **{**short, "num_generations": 4},
        ),
        fit(
            GRPOModule(tiny_model, learning_rate=1e-2, **cispo),  # so that drafts are cut
            [StreamedTraining(), RolloutWindow(), PromptChoice(), PromptBudget(2)],
            engine=ProcessEngine(TransformersEngine()),
            # they end apart, so others begin
            **{**short, "max_completion_length": 48, "num_generations": 3},
        ),
        fit(callbacks=[AsyncRollout()], num_engines=2, **short),
    ]
    logged = {key for trainer, _, _ in runs for key in trainer.callback_metrics}
    seen = {
        name
        for name in PAGE
        if any(re.fullmatch(logged_metrics.pattern(name), key) for key in logged)
    }
    assert PAGE.keys() - seen == RARE.keys()
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    names = [name.rpartition("/")[2].removeprefix("environment_") for name in RARE]
    assert all(re.search(rf'[/"_]{name}[":]', code) for name in names)


def logprobs(model, ids, tokens):
    """Log-probs of the whole vocabulary at each of the last tokens."""
    return model(input_ids=ids).logits[0, -tokens - 1 : -1].log_softmax(-1)


class Recompute(RolloutCallback):
    """Computes metrics of the last round anew, from its completions and a plain forward pass."""

    def on_round_end(self, trainer, pl_module, round):
        if round.number == 0:
            self.reference = copy.deepcopy(pl_module.model)
            return
        self.round, policy = round, pl_module.model
        policy.zero_grad()
        loss, entropy, kl, gap, tokens = 0.0, 0.0, 0.0, [], 0
        for sample in round.samples:
            prompt, drawn = sample.group.prompt.token_ids, sample.completion.token_ids
            ids = torch.tensor([[*prompt, *drawn]])
            with torch.enable_grad():
                every = logprobs(policy, ids, len(drawn))
                p = every[range(len(drawn)), drawn]
                with torch.no_grad():
                    q = logprobs(self.reference, ids, len(drawn))[range(len(drawn)), drawn]
                k3 = (q - p).exp() - (q - p) - 1
                ratio = (p - p.detach()).exp()
                of_engine = p.detach() - torch.tensor(sample.completion.logprobs)
                weight = of_engine.sum().exp()  # `sequence_mask`
                surrogate = -ratio * sample.completion.advantage * weight
                loss = loss + (surrogate + 0.5 * ratio * k3).sum()
            entropy -= float((every.exp() * every).sum().detach())
            kl += float(k3.sum().detach())
            gap += of_engine.abs().tolist()
            tokens += len(drawn)
        with torch.enable_grad():
            grads = torch.autograd.grad(loss / tokens, list(policy.parameters()))
        lengths = [len(c.token_ids) for c in round.completions]
        ended = [len(c.token_ids) for c in round.completions if c.finish_reason == "stop"]
        rewards = torch.tensor([c.scores[0] for c in round.completions]).double()
        steps, slots = round.trace.steps, round.trace.slots
        lasts = [e - s for s, e in zip([0.0, *steps["end"]], steps["end"], strict=False)]
        free = [slots - n for n in steps["running"]]
        idle = sum(n * dt for n, dt in zip(free, lasts, strict=True))
        self.expected = {
            "loss": float(loss.detach()) / tokens,
            "policy_loss": float(loss.detach()) / tokens,
            "entropy": entropy / tokens,
            "kl": kl / tokens,
            "grad_norm": math.sqrt(sum(float(g.square().sum()) for g in grads)),
            "sampling/sampling_logp_difference/mean": sum(gap) / tokens,
            "sampling/sampling_logp_difference/max": max(gap),
            "clip_ratio/region_mean": 0.0,
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "frac_reward_zero_std": float((rewards.view(4, 4).std(1) == 0).double().mean()),
            "rewards/digits/mean": float(rewards.mean()),
            "completions/mean_length": sum(lengths) / 16,
            "completions/max_length": max(lengths),
            "completions/mean_terminated_length": sum(ended) / max(1, len(ended)),
            "completions/clipped_ratio": 1 - len(ended) / 16,
            "rollout/tokens": sum(lengths),
            "rollout/slot_steps": slots * round.trace.decode_steps,
            "rollout/trained_over_drawn_length": 1.0,
            "rollout/idle_slot_steps": sum(free),
            "rollout/bubble_ratio": idle / slots / steps["end"][-1],
            "rollout/tokens_per_second": sum(lengths) / steps["end"][-1],
            "batch/completions": 16,
        }


def test_formulas(fit, tiny_model):
    recompute = Recompute()
    module = GRPOModule(tiny_model, learning_rate=1e-3, beta=0.5, shared_prefix=False)
    trainer, _, _ = fit(module, [recompute])
    found = {name: float(trainer.callback_metrics[name]) for name in recompute.expected}
    assert found["kl"] > 1e-3 and found["completions/mean_terminated_length"] > 0
    assert not any("reference" in name for name in module.state_dict())
    loose = {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"}
    for name, value in recompute.expected.items():
        allowed = 1e-6 if name in loose else 1e-6 + 1e-4 * abs(value)
        assert found[name] == pytest.approx(value, abs=allowed), name
