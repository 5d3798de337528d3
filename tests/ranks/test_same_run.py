"""One rank, several with DDP and several with FSDP2: the same completions and the same weights."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lora_policy import with_lora
from several_ranks import ALONE, DDP, FSDP2, check_same, ended
from transformers import AutoTokenizer
from worlds import CHATS, with_tools

from lit_rlsched.run.checks import check_strategy
from lit_rlsched.run.fsdp2 import FSDP2Strategy
from lit_rlsched.settings import UsageError


def test_ddp_and_fsdp2_are_the_run_of_one_rank(run):
    check_same(run(ALONE, DDP, FSDP2), 1e-6)


VARIANTS = {
    "two iterations of two steps, KL, validation": {
        "module": {"beta": 0.05, "loss_type": "gspo", "learning_rate": 1e-4},
        "data": {
            "num_iterations": 2,
            "steps_per_round": 2,
            "val_data": [{"prompt": "10+1=", "answer": "11"}, {"prompt": "10+4=", "answer": "14"}],
            "val_num_generations": 2,
        },
    },
    "LoRA, RLOO": {"module": {"kind": "rloo", "lora_rank": 4}},
    "streamed from two engines, gradient checkpointing": {
        "module": {"gradient_checkpointing": True},
        "callbacks": {"TailBatching": {}, "StreamedTraining": {"start": 0}},
        "engine": "TransformersEngine",
        "data": {"num_engines": 2, "num_iterations": 2},
    },
    "partial rounds": {
        "module": {"old_logprobs": "engine", "advantage": "reinforce++"},
        "callbacks": {
            "SortedBatching": {"pool_rounds": 2, "mode": "partial"},
            "LengthPrediction": {},
            "MicroGroupSampling": {"slots": 6},
        },
    },
    "selected completions": {
        "module": {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch"},
        "data": {"mask_truncated_completions": True},
        "callbacks": {"DownSampling": {"keep": 2}, "DynamicSampling": {}, "AdaptiveTimeouts": {}},
    },
    "chosen prompts, a pilot, two engines": {
        "callbacks": {"PromptChoice": {"explore": 0.3}, "PromptBudget": {"pilot": 2}},
        "engine": "TransformersEngine",
        "data": {"num_engines": 2},
        "rounds": 4,
    },
    "a tracker of chosen prompts": {
        "module": {"advantage": "tracker"},
        "callbacks": {"PromptChoice": {"rule": "thompson"}, "SortedBatching": {"pool_rounds": 2}},
        "rounds": 4,
    },
    "drawn beside updates": {
        "callbacks": {"AsyncRollout": {"too_old": "wait"}},
        "engine": "TransformersEngine",
        "data": {"steps_per_round": 2},
        "rounds": 3,
    },
    "fewer micro-batches than ranks": {
        "module": {"loss_type": "bnpo"},
        "data": {"micro_batch_tokens": 4096, "prompts_per_round": 1, "num_generations": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants(run, exact_model, variant):
    exact = {"precision": "64-true", **variant}
    check_same(run(*({**exact, **r} for r in (ALONE, DDP, FSDP2)), model=exact_model), 1e-12)


@pytest.mark.slow
def test_tools(run, exact_model, tmp_path):
    with_tools(AutoTokenizer.from_pretrained(exact_model)).save_pretrained(tmp_path / "tools")
    settings = {
        "train_data": CHATS,
        "tokenizer": str(tmp_path / "tools"),
        "environment_factory": "worlds.Numbered",
        "max_completion_length": 96,
        "micro_batch_tokens": 512,
    }
    data = settings | {"num_engines": 2}
    exact = {"precision": "64-true", "data": data, "engine": "TransformersEngine"}
    check_same(run(*({**exact, **r} for r in (ALONE, DDP, FSDP2)), model=exact_model), 1e-9)


@pytest.mark.slow
def test_an_adapter_is_trained_further_on_all_ranks(run, exact_model, tmp_path):
    """Its frozen copy, the reference, is sharded with it."""
    with_lora(exact_model).save_pretrained(tmp_path / "adapter")
    exact = {"precision": "64-true", "module": {"beta": 0.05, "learning_rate": 1e-4}}
    results = run(*({**exact, **r} for r in (ALONE, DDP, FSDP2)), model=str(tmp_path / "adapter"))
    check_same(results, 1e-12)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_adapters_alone_reach_vllm(run, tiny_model, tmp_path):
    with_lora(tiny_model).save_pretrained(tmp_path / "adapter")
    adapters = {
        "module": {"learning_rate": 1e-5},  # so that rounding changes no draw
        "engine": "VLLMEngine",
        "engine_settings": {"enable_lora": True},
    }
    # AdamW turns the rounding of a small gradient into a part of the learning rate
    results = run(*({**adapters, **r} for r in (ALONE, FSDP2)), model=str(tmp_path / "adapter"))
    check_same(results, 1e-6)


@pytest.mark.slow
def test_completions_share_a_prompt_on_all_ranks(run, exact_model):
    exact = {"precision": "64-true", "long_prompts": True}
    exact["data"] = {"max_completion_length": 8, "micro_batch_tokens": 512}
    exact |= {"callbacks": {"StreamedTraining": {"start": 0}}, "engine": "TransformersEngine"}
    results = run(*({**exact, **r} for r in (ALONE, DDP)), model=exact_model)
    check_same(results, 1e-12)
    assert all(rank["shares"] is True for result in results for rank in result["ranks"])


@pytest.mark.slow
def test_drafts_and_automatic_optimization_with_ddp(run, exact_model):
    window = {"callbacks": {"RolloutWindow": {}}, "rounds": 4}
    overtaking = {"callbacks": {"RolloutWindow": {"overtake": 2}}, "rounds": 4}
    mixed = {
        "callbacks": {"AsyncRollout": {"max_staleness": 1}},
        "engine": "TransformersEngine",
        "data": {"steps_per_round": 2},
        "rounds": 4,
    }
    plain = {"plain": True}
    for variant in (window, overtaking, mixed, plain):
        exact = {"precision": "64-true", **variant}
        check_same(run(*({**exact, **r} for r in (ALONE, DDP)), model=exact_model), 1e-12)


@pytest.mark.slow
def test_half_precision(run):
    alone, *others = run(*({"precision": "bf16-mixed", **r} for r in (ALONE, DDP, FSDP2)))
    for result in (alone, *others):
        assert set(result["codes"]) == {0}, "\n".join(result["said"])[-6000:]
    for other in others:
        # the engine may draw other tokens in the second round
        assert other["ranks"][0]["rounds"][0] == alone["ranks"][0]["rounds"][0]
        assert other["ranks"][0]["losses"][0] == pytest.approx(
            alone["ranks"][0]["losses"][0], rel=0.05, abs=1e-3
        )


REFUSED = {
    "shared prefix": ({"module": {"shared_prefix": True}}, FSDP2, "shared_prefix=True"),
    "window": (
        {"callbacks": {"RolloutWindow": {}}},
        FSDP2,
        "tokens are verified with weights of earlier policy versions",
    ),
    "tokens of several policies": (
        {"callbacks": {"AsyncRollout": {"too_old": "verify"}}, "engine": "TransformersEngine"},
        FSDP2,
        "`AsyncRollout(too_old='wait')`",
    ),
    "planner": ({"callbacks": {"ParallelismPlanner": {}}}, DDP, "ParallelismPlanner"),
    "slots": (
        {"callbacks": {"MicroGroupSampling": {"slots": 7}}, "data": {"num_engines": 2}},
        DDP,
        "`num_engines=2`: each engine has the same number of slots. Use 6 slots",
    ),
    "versions": (
        {"of_rank": {"1": {"version": "0.0.1"}}},
        DDP,
        "Rank 1 has `versions.lit_rlsched=0.0.1`, and rank 0 has",
    ),
}


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_by_name_on_every_rank(run):
    refused = run(*({**more, **ranks} for more, ranks, _ in REFUSED.values()))
    for result, (_, _, words) in zip(refused, REFUSED.values(), strict=True):
        assert result["codes"] == [1, 1], "\n".join(result["said"])[-6000:]
        assert all(words in said for said in result["said"]), "\n".join(result["said"])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (FSDPStrategy(), "`FSDPStrategy` is not supported with 2 processes"),
        (DDPStrategy(start_method="fork"), "starts its 2 processes from this one"),
        (ModelParallelStrategy(), "`ModelParallelStrategy` is not supported with 2 processes"),
    ],
)
def test_other_strategies_are_refused_with_the_fix(strategy, words):
    if isinstance(strategy, DDPStrategy):
        strategy._launcher = _MultiProcessingLauncher(strategy, "fork")
    with pytest.raises(UsageError, match=r"strategy='fsdp2'") as error:
        check_strategy(SimpleNamespace(strategy=strategy, world_size=2))
    assert words in str(error.value)


@pytest.mark.parametrize("strategy", [DDPStrategy(), FSDP2Strategy()])
def test_strategies_that_work(strategy):
    check_strategy(SimpleNamespace(strategy=strategy, world_size=2))


@pytest.mark.slow
def test_on_vllm(run):
    vllm = {"engine": "VLLMEngine"}
    alone, *others = run(*({**vllm, **r} for r in (ALONE, DDP, FSDP2)))
    for other in others:
        leader = ended(other)["ranks"][0]
        # the first round has the same weights; later ones differ by rounding
        assert leader["rounds"][0] == alone["ranks"][0]["rounds"][0]
        assert leader["losses"][0] == pytest.approx(alone["ranks"][0]["losses"][0], abs=1e-6)
        assert leader["metrics"]["sync/max_logp_diff"] < 1e-4
