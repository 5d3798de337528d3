"""Our advantages, losses, gradients and metrics against TRL's own methods on the same tensors."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_trl import (
    MAX_COMPLETION_LENGTH,
    NUM_GENERATIONS,
    REWARD_WEIGHTS,
    TRL,
    Dataset,
    Sample,
    build_trainer,
    make_sample,
)
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as async_trl
from trl.experimental.async_grpo import async_rollout_worker as worker
from trl.trainer.utils import split_tensor_dict

from lit_rlsched import RolloutDataModule
from lit_rlsched import trl as ours
from lit_rlsched.engines import SimulatedEngine, TransformersEngine
from lit_rlsched.training.advantages import (
    combine_rewards,
    group_relative,
    kl_in_reward,
    leave_one_out,
    mean_kl,
)
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.losses import LossOutput, policy_loss
from lit_rlsched.training.round import Round
from lit_rlsched.training.update import Update
from lit_rlsched.trl import AsyncGRPOConfig, AsyncGRPOTrainer
from lit_rlsched.types import Completion, Group, Prompt, Sampling

MODES = [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CLIP_MAX = 1.3
SLOW = pytest.mark.slow
SCALES = ["group", pytest.param("batch", marks=SLOW), pytest.param("none", marks=SLOW)]
# fp64 but for two factors that TRL computes in fp32.
close = {"rtol": 1e-6, "atol": 1e-9}

MakeTRL = Callable[..., TRL]


@pytest.fixture
def make_trl(tiny_model: str, tmp_path: Path) -> MakeTRL:
    def make(kind: str, sample: Sample, mode: str | None = None, **settings: Any) -> TRL:
        if mode is not None:
            settings |= {
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_max": CLIP_MAX,
            }
        trainer = build_trainer(kind, tiny_model, tmp_path, **settings)
        return TRL(trainer, sample, rollout_correction=mode is not None)

    return make


def settings_of(loss_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same loss in TRL's settings and in ours."""
    if loss_type == "gspo":
        return {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss_type": "gspo"}
    both = {"loss_type": loss_type} | ({"epsilon_high": 1.2} if loss_type == "cispo" else {})
    return both, both


def our_advantages(sample: Sample, scale_rewards: str) -> Tensor:
    rewards = combine_rewards(sample.rewards, torch.tensor(REWARD_WEIGHTS))
    return group_relative(rewards.view(-1, NUM_GENERATIONS), scale_rewards).flatten()


def our_loss(
    sample: Sample, advantages: Tensor, rows: slice | list = slice(None), **settings: Any
) -> tuple[LossOutput, Tensor]:
    """Loss of some rows, and its gradient with respect to all of the log-probs."""
    logp = sample.logp.clone().requires_grad_()
    tensors = {"old_logp": sample.old_logp[rows]} | settings
    tensors |= {"max_completion_length": MAX_COMPLETION_LENGTH}
    output = policy_loss(logp[rows], advantages[rows], sample.mask[rows], **tensors)
    return output, torch.autograd.grad(output.loss, logp)[0]


def trl_loss(trl: TRL, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logp = trl.sample.logp.clone().requires_grad_()
    loss = trl.loss(batch, logp)
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def assert_same(ours: tuple[LossOutput, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0].loss.detach(), theirs[0], **close)
    torch.testing.assert_close(ours[1], theirs[1], **close)
    assert ours[1].abs().max() > 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale_rewards", SCALES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_grpo_losses(
    make_trl: MakeTRL, loss_type: str, scale_rewards: str, mode: str | None
) -> None:
    sample = make_sample()
    theirs, ours = settings_of(loss_type)
    # Two iterations, so that TRL, too, keeps the old policy's log-probs.
    trl = make_trl("grpo", sample, mode, scale_rewards=scale_rewards, num_iterations=2, **theirs)
    batch = trl.score()
    advantages = our_advantages(sample, scale_rewards)
    torch.testing.assert_close(advantages, batch["advantages"], **close)
    ours |= {
        "rollout_logp": sample.rollout_logp,
        "importance_sampling_mode": mode,
        "importance_sampling_clip_max": CLIP_MAX,
    }
    assert_same(our_loss(sample, advantages, **ours), trl_loss(trl, batch))


OPTIONS = [
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.4},
    {"beta": 0.1},
    {"epsilon_high": 0.28, "delta": 1.5, "beta": 0.3},
    {"beta": 0.1, "delta": 1.25},
]


@pytest.mark.parametrize("mode", [None, *(pytest.param(mode, marks=SLOW) for mode in MODES[2:4])])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "gspo"])
def test_options(
    make_trl: MakeTRL, loss_type: str, options: dict[str, Any], mode: str | None
) -> None:
    sample = make_sample(seed=1)
    theirs, ours = settings_of(loss_type)
    trl = make_trl("grpo", sample, mode, num_iterations=2, **theirs, **options)
    output = our_loss(
        sample,
        our_advantages(sample, "group"),
        ref_logp=sample.ref_logp,
        rollout_logp=sample.rollout_logp,
        importance_sampling_mode=mode,
        importance_sampling_clip_max=CLIP_MAX,
        **ours,
        **options,
    )
    assert_same(output, trl_loss(trl, trl.score()))


def test_cispo_with_kl(make_trl: MakeTRL) -> None:
    sample = make_sample(seed=2)
    options = {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.2}
    trl = make_trl("grpo", sample, num_iterations=2, **options)
    ours = our_loss(sample, our_advantages(sample, "group"), ref_logp=sample.ref_logp, **options)
    assert_same(ours, trl_loss(trl, trl.score()))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "gspo"])
def test_on_policy(make_trl: MakeTRL, loss_type: str) -> None:
    """TRL leaves the old log-probs out when rollout and update are of one policy."""
    sample = make_sample()
    theirs, ours = settings_of(loss_type)
    trl = make_trl("grpo", sample, **theirs)
    batch = trl.score()
    assert "old_per_token_logps" not in batch
    advantages = our_advantages(sample, "group")
    assert_same(our_loss(sample, advantages, old_logp=None, **ours), trl_loss(trl, batch))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo(make_trl: MakeTRL, beta: float, normalize: bool) -> None:
    sample = make_sample()
    trl = make_trl("rloo", sample, beta=beta, normalize_advantages=normalize)
    batch = trl.score()
    rewards = combine_rewards(sample.rewards, torch.tensor(REWARD_WEIGHTS))
    rewards = kl_in_reward(rewards, sample.old_logp, sample.ref_logp, sample.mask, beta=beta)
    advantages = leave_one_out(rewards.view(-1, NUM_GENERATIONS), normalize).flatten()
    torch.testing.assert_close(advantages, batch["advantages"], **close)
    assert_same(our_loss(sample, advantages, loss_type="rloo"), trl_loss(trl, batch))
    if beta:
        kl = mean_kl(sample.old_logp, sample.ref_logp, sample.mask)
        assert float(kl) == pytest.approx(trl.metrics()["kl"], rel=1e-5)
    assert ("kl" in trl.metrics()) == (beta > 0)


NAN = torch.nan
HARD_GROUPS = [
    [[1.0, NAN, NAN, NAN], [NAN] * 4, [0.0, 1.0, 1.0, NAN]],
    [[1.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]],
    [[3.0, NAN, NAN, NAN], [NAN] * 4, [NAN] * 4],
    [[1e4, -1e4, 0.0, 1.0], [NAN, 1.0, 1.0, 1.0], [NAN, NAN, 2.0, 3.0]],
]


@pytest.mark.parametrize("rewards", HARD_GROUPS)
def test_advantages_of_hard_groups(make_trl: MakeTRL, rewards: list[list[float]]) -> None:
    sample = make_sample()
    groups = torch.tensor(rewards, dtype=torch.float64)
    sample.rewards = torch.stack([groups.flatten(), torch.full((groups.numel(),), NAN)], dim=1)
    for scale in ("group", "batch", "none"):
        theirs = make_trl("grpo", sample, scale_rewards=scale).score()["advantages"]
        torch.testing.assert_close(our_advantages(sample, scale), theirs, **close)
    for normalize in (False, True):
        trl = make_trl("rloo", sample, beta=0.0, normalize_advantages=normalize)
        ours = leave_one_out(groups, normalize).flatten()
        torch.testing.assert_close(ours, trl.score()["advantages"], **close)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"])
def test_wholly_masked_rows(make_trl: MakeTRL, loss_type: str) -> None:
    sample = make_sample()
    theirs, ours = settings_of(loss_type)
    kind = "rloo" if loss_type == "rloo" else "grpo"
    theirs = {"beta": 0.0} if kind == "rloo" else {**theirs, "num_iterations": 2}
    trl = make_trl(kind, sample, mask_truncated_completions=True, **theirs)
    batch = trl.score()
    finished = torch.tensor(sample.lengths) < MAX_COMPLETION_LENGTH
    assert 0 < finished.sum() < len(finished)
    sample.mask = sample.mask & finished.unsqueeze(1)
    assert_same(our_loss(sample, batch["advantages"], **ours), trl_loss(trl, batch))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"loss_type": "dapo", "beta": 0.1, "delta": 1.4}, ["kl"]),
        ({"loss_type": "cispo", "epsilon_high": 1.1}, ["cispo_clip_ratio"]),
    ],
)
def test_metrics(make_trl: MakeTRL, options: dict[str, Any], keys: list[str]) -> None:
    sample = make_sample(seed=3)
    mode, prefix = "token_truncate", "sampling/importance_sampling_ratio"
    trl = make_trl("grpo", sample, mode, num_iterations=2, **options)
    # TRL logs the truncated ratios and we the raw ones: they agree where nothing is truncated.
    trl.trainer.vllm_importance_sampling_clip_max = 1e9
    trl_loss(trl, trl.score())
    theirs = trl.metrics()
    ours = our_loss(
        sample,
        our_advantages(sample, "group"),
        ref_logp=sample.ref_logp,
        rollout_logp=sample.rollout_logp,
        importance_sampling_mode=mode,
        importance_sampling_clip_max=1e9,
        **options,
    )[0].metrics
    keys = keys + [f"{prefix}/{name}" for name in ("min", "mean", "max")]
    keys += [f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")]
    keys += [key for key in theirs if key.startswith("clip_ratio/")]
    for key in keys:
        assert ours[key].item() == pytest.approx(theirs[key], rel=1e-5), key


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"])
def test_sum_over_ragged_micro_batches(make_trl: MakeTRL, loss_type: str) -> None:
    """TRL over three equal micro-batches, ours over three unequal ones, and ours in one piece.

    TRL's bnpo is over one: of several it takes the mean of their means.
    """
    sample = make_sample(seed=4)
    theirs, ours = settings_of(loss_type)
    kind = "rloo" if loss_type == "rloo" else "grpo"
    theirs = {"beta": 0.0} if kind == "rloo" else {**theirs, "num_iterations": 2}
    pieces = 1 if loss_type == "bnpo" else 3
    size = {"per_device_train_batch_size": 12 // pieces, "gradient_accumulation_steps": pieces}
    trl = make_trl(kind, sample, **size, **theirs)
    batch = trl.score()

    step = {
        "step_sequences": len(sample.lengths),
        "step_tokens": sum(sample.lengths),
        "importance_sampling_mode": None,
        **ours,
    }

    def in_pieces(bounds: list[int]) -> tuple[Tensor, Tensor]:
        outputs = [
            our_loss(
                sample, batch["advantages"], slice(a, b), **step, old_logp=sample.old_logp[a:b]
            )
            for a, b in pairwise(bounds)
        ]
        return sum(o.loss.detach() for o, _ in outputs), sum(g for _, g in outputs)

    logp = sample.logp.clone().requires_grad_()
    losses = [
        trl.loss(part, rows)
        for part, rows in zip(split_tensor_dict(batch, pieces), logp.chunk(pieces), strict=True)
    ]
    # RLOO's loss is divided by the number of micro-batches in transformers' `training_step`.
    expected = sum(losses) / (3 if kind == "rloo" else 1)
    gradient = torch.autograd.grad(expected, logp)[0]

    for bounds in ([0, 4, 8, 12], [0, 5, 6, 12], [0, 12]):
        total, total_gradient = in_pieces(bounds)
        torch.testing.assert_close(total, expected.detach(), **close)
        torch.testing.assert_close(total_gradient, gradient, **close)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_several_steps_of_a_round(make_trl: MakeTRL, loss_type: str) -> None:
    """Three steps on one round, of their own numbers of tokens each: TRL's loss and gradient."""
    sample = make_sample(seed=5)
    theirs, ours = settings_of(loss_type)
    size = {"per_device_train_batch_size": 4, "steps_per_generation": 3}
    trl = make_trl("grpo", sample, gradient_accumulation_steps=1, **size, **theirs)
    batch = trl.score()
    groups = [
        Group(
            str(at),
            Prompt(str(at), "ab", (4, 5)),
            Sampling(MAX_COMPLETION_LENGTH),
            [
                Completion(i, [6] * n, [-1.0] * n, [(0, n)], "stop")
                for i, n in enumerate(sample.lengths[at : at + NUM_GENERATIONS])
            ],
        )
        for at in range(0, len(sample.lengths), NUM_GENERATIONS)
    ]
    data = RolloutDataModule(
        [{"prompt": "ab"}],
        len,
        engine=TransformersEngine(),
        prompts_per_round=3,
        steps_per_round=3,
        micro_batch_tokens=64,
        seed=0,
    )
    update = Update(data.run.settings, data.run.schedule, PlainLearner())
    tokens = set()
    for index in range(3):
        step = update.step(Round(0, 0, groups), index)
        rows = [int(row.group.id) + row.completion.index for row in step.samples]
        tokens.add(step.totals.tokens)
        part = {k: v[rows] if v.dim() and len(v) == 12 else v for k, v in batch.items()}
        logp = sample.logp.clone().requires_grad_()
        loss = trl.loss(part, logp[rows])
        gradient = torch.autograd.grad(loss, logp)[0]
        output = our_loss(
            sample,
            batch["advantages"],
            rows,
            step_sequences=step.divisor.sequences,
            step_tokens=step.totals.tokens if loss_type == "bnpo" else step.divisor.tokens,
            old_logp=part.get("old_per_token_logps", sample.old_logp[rows]),
            **ours,
        )
        assert_same(output, (loss.detach(), gradient))
    assert len(tokens) == 3


def test_asynchronous_grpo(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages of TRL's worker, and loss of its trainer, which has the engine's log-probs."""
    sample, clip = make_sample(seed=6), {"epsilon": 0.1, "epsilon_high": 0.28}
    args = async_trl.AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **clip)
    parts = {"rollout_worker": SimpleNamespace(rollout_buffer=None), "weight_transfer": object()}
    prompts = Dataset.from_dict({"prompt": ["ab"] * 9})
    monkeypatch.setattr(async_trl, "get_peak_flops_per_device", lambda *_: None)  # of a GPU
    trainer = async_trl.AsyncGRPOTrainer(tiny_model, len, args, prompts, **parts)
    trainer.current_gradient_accumulation_steps = 1
    scores = [lambda prompts, k=k, **_: sample.rewards[prompts, k].tolist() for k in (0, 1)]
    loop = SimpleNamespace(reward_funcs=scores, reward_func_names=["first", "second"])
    loop._env_reward_types, loop._provides_rollout_reward = [], False
    row, lengths, drawn = async_trl.TreeRow(), sample.lengths, sample.old_logp.tolist()
    for at in range(0, len(lengths), NUM_GENERATIONS):
        rows = [*range(at, at + NUM_GENERATIONS)]
        given = {f.name: rows for f in fields(worker.RolloutGroup)} | {"group_id": at}
        given["completions_sequences"] = [
            [worker.TrainingSequence([i, *[1] * n], [0] + [1] * n, [0.0, *drawn[i][:n]], "")]
            for i, n in enumerate(lengths[at : at + NUM_GENERATIONS], start=at)
        ]
        group = worker.RolloutGroup(**{**given, "reward_kwargs": {}})
        for one in asyncio.run(worker._AsyncRolloutLoop._score_group(loop, group)):
            row.add(asdict(one))
    batch = async_trl.DataCollatorForRollout(pad_token_id=0)([[row]])
    logp = sample.logp.clone().requires_grad_()
    packed = torch.zeros(batch["input_ids"].numel(), dtype=logp.dtype)
    packed = packed.index_put((batch["token_index"][0],), logp[sample.mask])
    loss = trainer.compute_loss(
        lambda **_: SimpleNamespace(log_probs=packed, entropy=packed), batch
    )
    config = AsyncGRPOConfig(str(tmp_path), use_cpu=True, num_generations=NUM_GENERATIONS, **clip)
    module = AsyncGRPOTrainer(tiny_model, len, config, prompts).module
    rewards = combine_rewards(sample.rewards, torch.ones(2)).view(-1, NUM_GENERATIONS)
    advantages = module.compute_advantages(rewards, None).flatten()
    assert advantages.tolist() == pytest.approx([one["advantage"] for one in row.samples])
    assert module.needs_engine_logprobs(off_policy=False)
    ours = our_loss(sample, advantages, **module._loss_settings)
    assert_same(ours, (loss.detach(), torch.autograd.grad(loss, logp)[0]))


def test_model_gradients(make_trl: MakeTRL, tiny_model: str) -> None:
    """From token ids to parameter gradients: TRL pads prompts on the left, we have none inside."""
    sample = make_sample()
    trl = make_trl("grpo", sample, temperature=0.7)
    batch = trl.score()
    del trl.trainer._get_per_token_logps_and_entropies  # the real one
    prompts = torch.randint(4, 60, (len(sample.lengths), 3), generator=torch.Generator())
    prompt_lengths = torch.tensor([1, 2, 3] * 4)
    batch["prompt_mask"] = (torch.arange(3) >= 3 - prompt_lengths.unsqueeze(1)).long()
    batch["prompt_ids"] = prompts * batch["prompt_mask"]
    batch["advantages"] = batch["advantages"].float()
    theirs = trl.trainer._compute_loss(trl.trainer.model, batch)
    theirs.backward()

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    lengths = torch.tensor(sample.lengths)
    rows = [
        torch.cat([prompts[i, 3 - p :], batch["completion_ids"][i, :n]])
        for i, (p, n) in enumerate(zip(prompt_lengths, lengths, strict=True))
    ]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logp, entropy = completion_logprobs(
        model, input_ids, prompt_lengths, lengths, temperature=0.7, entropy=True, chunk_tokens=7
    )
    ours = policy_loss(logp, batch["advantages"], sample.mask).loss
    ours.backward()

    torch.testing.assert_close(ours, theirs)
    assert entropy is not None
    mean_entropy = (entropy.sum() / sample.mask.sum()).item()
    assert mean_entropy == pytest.approx(trl.metrics()["entropy"], rel=1e-5)
    reference = dict(trl.trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)


class Recorded:
    """Completions that TRL has drawn, as the lengths and tokens of a `SimulatedEngine`."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, ...], list[list[int]]] = {}

    def token_ids(self, request: Any) -> list[int]:
        return self.drawn[tuple(request.prompt_ids)][int(request.id.rpartition("/")[2])]

    def __call__(self, request: Any) -> int:
        return len(self.token_ids(request))


@pytest.mark.parametrize(
    "given", [{}, {"lr_scheduler_type": "constant"}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_trls_completions_lead_to_trls_weights(
    given: dict[str, Any], tiny_model: str, tmp_path: Path
) -> None:
    """Four rounds with the settings of one script, from the prompts to the last optimizer step."""
    recorded = Recorded()

    class Theirs(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            for prompt, ids in zip(prompt_ids, output[0], strict=True):
                recorded.drawn.setdefault(tuple(prompt), []).append(list(ids))
            return output

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 3) for ids in completion_ids]

    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4}
    settings |= {"max_completion_length": 32, "mask_truncated_completions": True, "use_cpu": True}
    settings |= {"learning_rate": 1e-3, "max_grad_norm": 0.1, "shuffle_dataset": False, **given}
    settings |= {"bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    rows = Dataset.from_dict({"prompt": [f"{i}+{j}=" for i in range(4) for j in range(4)]})
    theirs = Theirs(tiny_model, reward, GRPOConfig(f"{tmp_path}/theirs", **settings), rows)
    first = [one.clone() for one in theirs.model.parameters()]
    theirs.train()
    config = ours.GRPOConfig(f"{tmp_path}/ours", **settings)
    trainer = ours.GRPOTrainer(tiny_model, reward, config, rows, engine=SimulatedEngine(recorded))
    trainer.train()
    lengths = [len(ids) for of in recorded.drawn.values() for ids in of]
    assert min(lengths) < 32 == max(lengths) and trainer.state.global_step == 4
    for mine, other, before in zip(
        trainer.model.parameters(), theirs.model.parameters(), first, strict=True
    ):
        moved = (other - before).norm()
        assert moved > 0 and (mine - other).norm() < 1e-3 * moved
