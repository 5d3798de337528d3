"""What is refused, and with which words: calls, and regexes of their messages.

Each list is one thing that is set. A row is built when its test runs.
"""

import gzip
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from character_tokenizer import make_tokenizer
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule
from lit_rlsched import callbacks as cb
from lit_rlsched import engines as en
from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.source import PromptSource
from lit_rlsched.data.tasks import Countdown, ReasoningGym
from lit_rlsched.engines._vllm_args import engine_args
from lit_rlsched.engines._vllm_guest import bind_threads
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import AdapterSpec
from lit_rlsched.rewards import JudgeReward, RewardScheduler
from lit_rlsched.rewards import functions as rewards
from lit_rlsched.rewards.checks import GIVEN, OFFERED
from lit_rlsched.rewards.functions import check_countdown_row, check_reasoning_gym_row
from lit_rlsched.run.same_ranks import check_same
from lit_rlsched.run.trainer import MicroBatchAccumulation
from lit_rlsched.scheduling import down_sampling
from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.recorded_lengths import LogNormalLengths, Oracle
from lit_rlsched.scheduling.tail_batching import quotas
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.text import parse_bytes
from lit_rlsched.training.advantages import group_relative, leave_one_out
from lit_rlsched.training.losses import check_loss_settings, policy_loss
from lit_rlsched.types import Prompt

NAN, INF = math.nan, math.inf


def compared(ranks: list[tuple[str, dict[str, Any]]]) -> None:
    """Compare what processes have gathered of each other."""
    check_same(lambda own: ranks, {})


def bad(make: Callable, says: str, *args: Any, **settings: Any) -> Any:
    """One row: `make` with these arguments. The message names the first setting and its value."""
    named = [f"{name}={value!r}" for name, value in settings.items()]
    needs = f"(?=.*{re.escape(named[0])})" if named else ""
    function = getattr(make, "func", make).__name__
    call = f"{function}({', '.join([*map(repr, args), *named])})" if args or named else says
    call = re.sub(r" at 0x\w+", "", call)[:80]  # the same in every process
    return pytest.param(partial(make, *args, **settings), f"(?s){needs}.*{says}", id=call)


def unnamed(make: Callable, says: str, *args: Any, **settings: Any) -> Any:
    """One row whose message does not repeat the setting."""
    return bad(partial(make, *args, **settings), says)


def each(make: Callable, says: str, **settings: Any) -> list[Any]:
    """A row for each value of the first setting."""
    (name, values), *others = settings.items()
    return [bad(make, says, **{name: value}, **dict(others)) for value in values]


def during(says: str, made: Callable = list, module: Any = None, **settings: Any) -> Any:
    """One row: a run with these callbacks and settings of the module and of the data."""

    def run(fit: Callable, model: str) -> None:
        callbacks = made()
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        fit(GRPOModule(model, **module or {}), callbacks, **settings)

    return bad(run, says)


def trains(fit: Callable, model: str, **settings: Any) -> None:
    fit(**settings)


def streams_rloo(fit: Callable, model: str, **settings: Any) -> None:
    fit(RLOOModule(model, **settings), [cb.StreamedTraining()], **BESIDE)


def rows(prompt: str = "1+1=", **columns: Any) -> list[dict[str, Any]]:
    """Data of which the first row has more columns."""
    others = [{"prompt": str(n), "answer": "1"} for n in range(7)]
    return [{"prompt": prompt, "answer": "1", **columns}, *others]


def data(*funcs: Any, **settings: Any) -> RolloutDataModule:
    return RolloutDataModule(rows(), *funcs or [[len]], **settings)


def judge(model: str = "m", base_url: str = "http://localhost/v1", **settings: Any) -> JudgeReward:
    return JudgeReward(model, base_url, **settings)


def score(**kwargs: Any) -> list[float]:
    return [1.0]


def columns(row: dict[str, Any]) -> None:
    RewardScheduler([score]).check_columns([row], "val_data")


def countdown(**columns: Any) -> None:
    RewardScheduler([rewards.countdown_reward]).check_rows([("b", columns)])


def read(name: str, raw: str | bytes) -> None:
    """Load a file of rows."""
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        load_rows(path)


def resumed(names: str, **settings: Any) -> None:
    def source(names: str, **settings: Any) -> PromptSource:
        prompts = [Prompt(name, name, (ord(name),)) for name in names]
        return PromptSource(prompts, **{"seed": 0, **settings})

    source(names, **settings).load_state_dict(source("abc").state_dict())


def made(rows: list[dict[str, Any]]) -> None:
    make_prompts(rows, make_tokenizer(), max_prompt_length=9)


def some_loss(**settings: Any) -> None:
    policy_loss(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), **settings)


def started(engine: Any, slots: int = 4) -> None:
    engine.start(en.EngineSpec("", slots, 64, (1,)))


def with_adapters(adapters: AdapterSpec | None) -> None:
    engine_args(en.VLLMEngine(enable_lora=True), en.EngineSpec("m", 2, 64, (), adapters=adapters))


keyed = partial(score)
keyed.env_vars = "JUDGE_KEY"  # type: ignore[attr-defined]
COUNT = "must be a whole number, "
SECONDS = "use 0.01 to 1,000,000. It is a number of seconds"
SORTED = r"`SortedBatching\(.*"
BESIDE = {"engine": en.ProcessEngine(en.TransformersEngine())}
grpo, rloo = partial(GRPOModule, "m"), partial(RLOOModule, "m")
in_ray = partial(en.RayEngine, en.SimulatedEngine())
early = partial(cb.DownSampling, 4, early_stop=True)
early2 = partial(cb.DownSampling, 2, early_stop=True)
SETTERS = (cb.SortedBatching, cb.DynamicSampling, cb.DownSampling, cb.MicroGroupSampling)
sorted_partial = partial(cb.SortedBatching, mode="partial", max_staleness=1)

CALLBACKS = [
    bad(cb.AdaptiveTimeouts, "use 1 or more", scale=0.9),
    bad(cb.AdaptiveTimeouts, SECONDS, minimum=-1),
    bad(cb.AdaptiveTimeouts, SECONDS, maximum="30"),
    bad(cb.AdaptiveTimeouts, SECONDS, minimum=0.0),
    bad(cb.AdaptiveTimeouts, "maximum=4.0.*Lower `minimum`, or raise", minimum=5.0, maximum=4.0),
    bad(cb.CompletionWriter, "use a name in", path="x.csv"),
    *each(cb.DownSampling, COUNT + "2 or more", keep=(1, 2.0)),
    bad(early, "groups stop at.*Use `rule='max_variance'`, or leave `early_stop`", rule="random"),
    *each(early, "give the smallest", reward_range=((1, 0), (1.0, 1.0), (-INF, 1.0), (0.0, INF))),
    *each(early, "use 0", min_length_ratio=(-0.1, 1.1)),
    bad(cb.DownSampling, "use 0", min_length_ratio=1.5, keep=4),
    bad(cb.DownSampling, "give the smallest", reward_range=(1, 0), keep=4),
    *each(cb.DownSampling, "they have no effect", min_length_ratio=(0, 0.5), keep=4),
    *each(cb.DownSampling, "they have no effect", reward_range=((0.5, 1.0), (0.0, 2.0)), keep=4),
    *each(cb.AsyncRollout, COUNT + "1 or more", max_staleness=(-1, 0)),
    *each(cb.DynamicSampling, COUNT + "2 or more", max_num_gen_batches=(1, 2.5)),
    *each(cb.PromptBudget, COUNT + "2 or more", pilot=(1, 2.5)),
    *each(cb.PromptChoice, "use 0 to 1.*success rate", target=(-0.1, 50)),
    *each(cb.PromptChoice, "more than 0, at most 1.*never be drawn again", explore=(0, 1.1)),
    bad(cb.PromptChoice, "thompson", "best"),
    bad(cb.RolloutWindow, "use 0 or more", overtake=-0.5),
    bad(cb.LengthPrediction, r"is no `LengthPredictor`.*PromptHistory\(\)", PromptHistory),
    bad(cb.LengthPrediction, r"is no `LengthPredictor`.*PromptHistory\(\)", "PromptHistory"),
    *each(cb.LengthPrediction, COUNT + "0 or", probe_tokens=("3", -1)),
    *each(cb.MicroGroupSampling, COUNT + "1 or more", slots=(0, 2.5)),
    bad(cb.MicroGroupSampling, "exactly one"),
    bad(cb.MicroGroupSampling, "exactly one", slots=2, memory_budget="1GiB"),
    *each(cb.MicroGroupSampling, "a size such as", memory_budget=("much", 0.5)),
    bad(cb.MicroGroupSampling, "longest_first", order="planned", refill="rounds", slots=2),
    bad(cb.ParallelismPlanner, "`minimum` must be at most", minimum=4, maximum=2),
    *each(cb.ParallelismPlanner, "must be a power of two", maximum=(-2, 0, 2.0, 3, 6, True)),
    *each(cb.ParallelismPlanner, "must be a power of two", minimum=(0, 2.0, 3)),
    bad(cb.RolloutLogger, COUNT + "1 or more", every_n_rounds=0),
    bad(cb.RolloutLogger, COUNT + "1 or more", report_every_n_rounds=0),
    *each(cb.RoundCheckpoint, "use more than 0, at most 1", max_share=(0.0, 2.0)),
    bad(cb.RoundCheckpoint, COUNT + "1 or more", keep=0),
    *each(cb.SortedBatching, SORTED + COUNT + "1 or", pool_rounds=(0, 1.5, None)),
    *each(cb.SortedBatching, SORTED + COUNT + "1", update_prompts=(0, 2.0)),
    *each(cb.SortedBatching, "use 1 or more", oversubscribe=(0.99, INF)),
    bad(sorted_partial, SORTED + COUNT + r"1 or more\. For .*`RolloutWindow`", max_staleness=0),
    bad(cb.SortedBatching, "'on_policy'.*partial.* leave `max_staleness`", max_staleness=2),
    bad(cb.SortedBatching, "'on_policy'.*or leave `mask_stale_tokens`", mask_stale_tokens=True),
    *each(cb.StreamedTraining, "a share of the update's prompts", start=(-0.1, 1.0, "soon")),
]

OWNER = r"`(GRPOModule|policy_loss)\(.*"
LOSSES = [
    ("`importance_sampling_mode=None` to switch", {"importance_sampling_clip_max": 0.0}),
    (OWNER + "use 0 or more", {"epsilon": -0.1}),
    ("use 0 or more", {"epsilon": -0.1, "epsilon_high": 0.2, "beta": 0.1}),
    ("use 0 or more", {"epsilon_high": -0.1}),
    ("use 0 or more", {"beta": -0.1}),
    ("must exceed", {"delta": 1.2}),
    ("must exceed", {"delta": 1.25, "epsilon_high": 0.28}),
    ("no effect on `loss_type='rloo'`", {"delta": 4.0, "loss_type": "rloo"}),
    ("`loss_type='cispo'`. Remove", {"delta": 4.0, "loss_type": "cispo", "epsilon_high": 2.0}),
    ("Set it, for example to 5.0", {"loss_type": "cispo"}),
    ("Set it, for example to 5.0", {"epsilon_high": 0.28, "loss_type": "cispo"}),
    ("Use `RLOOModule`", {"beta": 0.1, "loss_type": "rloo"}),
    ("'sequence_mask'", {"importance_sampling_mode": "token_mask", "loss_type": "rloo"}),
    ("'sequence_mask'", {"importance_sampling_mode": "token_truncate", "loss_type": "rloo"}),
    (OWNER + "unknown. Use one of", {"loss_type": "ppo"}),
    (OWNER + "unknown", {"importance_sampling_mode": "token"}),
]
checked, lost = (partial(f, loss_type="dapo") for f in (check_loss_settings, some_loss))
ADVANTAGES = [
    *(partial(group_relative, scale_rewards=scale) for scale in ("group", "batch", "none")),
    *(partial(leave_one_out, normalize=normalize) for normalize in (False, True)),
]
MODULES = [
    *(bad(make, says, **loss) for says, loss in LOSSES for make in (grpo, checked, lost)),
    unnamed(some_loss, "needs `ref_logp`", beta=0.1),
    unnamed(some_loss, "divides by `max_completion_length`", loss_type="dr_grpo"),
    bad(rloo, "use 0 to 100", learning_rate=-1.0),
    bad(rloo, "`loss_type='rloo'`", old_logprobs="engine"),
    bad(grpo, r"no effect on `adv.*\+\+'`", scale_rewards="none", advantage="reinforce++"),
    bad(GRPOModule, r"`GRPOModule\(model=...\)` is a `Linear` object", nn.Linear(2, 2)),
    bad(RLOOModule, r"`RLOOModule\(model=...\)` is a `PosixPath` object", Path("m")),
    unnamed(grpo, r"is `RLOOModule\(normalize_advantages=...\)` here", normalize_advantages=True),
    unnamed(grpo, r"such argument\. Did you mean `learning_rate`", learn_rate=1e-5),
    *(
        bad(rule, "Set `num_generations` to 2 or more", torch.zeros(shape))
        for shape in ((3, 1), (4,), (2, 0))
        for rule in ADVANTAGES
    ),
    bad(group_relative, r"`group_relative\(scale_rewards='std'", torch.zeros(1, 2), "std"),
]

DATA_MODULES = [
    unnamed(data, "TRL's `eval_dataset` is `val_data` here", eval_dataset=[]),
    unnamed(data, r"is `GRPOModule\(gradient_clip_val=...\)` here\.", max_grad_norm=1.0),
    bad(data, "`reward_funcs=Qwen/Reward-8B`: .*Reward models of the Hub", "Qwen/Reward-8B"),
    bad(data, "`reward_funcs=mine.score`: No module named 'mine'", ["mine.score"]),
    bad(data, r"`reward_funcs\[0\]=3` is not callable", [3]),
    bad(data, "`reward_funcs` is empty", []),
    unnamed(data, r"tokenizer=...\)` is a `object`", tokenizer=object()),
    *each(data, "is not an engine", engine=("VLLMEngine", en.VLLMEngine)),
    bad(data, "environment does not have NO_SUCH", reward_env_vars=["NO_SUCH"]),
    bad(
        compared,
        "Rank 2 has `seed=4`, and rank 0 has `seed=3`",
        [("a", {"seed": 3})] * 2 + [("a", {"seed": 4})],
    ),
    bad(
        compared,
        "Rank 1 on b has `version=2`, and rank 0 on a has `version=1`",
        [("a", {"version": 1}), ("b", {"version": 2})],
    ),
    *(
        bad(parse_bytes, f"`memory={size!r}`: expected a size such as", size, "memory")
        for size in ("", "GiB", "2 potatoes", "-1", "0", "0.1B", "1,5 GB")
    ),
]

ENGINES = [
    bad(en.VLLMEngine, "unknown", dtype="float64"),
    *each(en.VLLMEngine, "must be", tensor_parallel_size=(0, 2.0, True)),
    *(
        unnamed(
            en.VLLMEngine,
            rf"\(engine_kwargs=\{{'{name}': .* is refused: .*{why}.*Passed on to vLLM are ",
            engine_kwargs={"block_size": 64, name: value},
        )
        for name, value, why in (
            ("speculative_config", {"method": "ngram"}, "draws wrongly at temperature 1"),
            ("override_generation_config", {"top_k": 5}, "set by `temperature`"),
            ("tensor_parallel_size", 2, r"itself: `VLLMEngine\(tensor_parallel_size=2\)`"),
            ("dtype", "float16", r"itself: `VLLMEngine\(dtype='float16'\)`"),
            ("pipeline_parallel_size", 2, "use `tensor_parallel_size`"),
            ("data_parallel_size", 2, "one replica"),
            ("enable_lora", True, r"itself: `VLLMEngine\(enable_lora=True\)`"),
            ("max_lora_rank", 8, "follows from the policy's adapters"),
            ("blok_size", 64, "may draw or record something else"),
        )
    ),
    bad(with_adapters, r"`VLLMEngine\(enable_lora=True\)`: there are no adapters", None),
    bad(
        with_adapters,
        r"rank of 513.*up to 512\. Lower `lora_rank`",
        AdapterSpec(513, ("q_proj",), 100),
    ),
    bad(bind_threads, r"size=4\)` needs a core.*may use 3. Use 3 or less", [0, 1, 2], 4),
    bad(en.TransformersEngine, r"`TransformersEngine\(\)` takes no arguments", 8),
    bad(en.SimulatedEngine, "1 or more", max_jump=0),
    bad(en.SimulatedEngine, "1 or more", kv_block=0),
    bad(en.SimulatedEngine, "1 or more", kv_capacity=0),
    bad(en.SimulatedEngine, "use 0 or more", per_running=-1.0),
    unnamed(en.SimulatedEngine, "at least one length", lengths=[]),
    bad(in_ray, "`tensor_parallel_size`", resources={"GPU": 2}),
    bad(in_ray, "use more than 0", resources={"CPU": 0}),
    *each(in_ray, SECONDS, timeout=(0, INF)),
    bad(en.RayEngine, "one process is enough", en.ProcessEngine(en.SimulatedEngine())),
    bad(en.ProcessEngine, "one process is enough", en.ProcessEngine(en.SimulatedEngine())),
    *(
        bad(partial(kind, engine), says, weight_transfer="nccl")
        for kind in (en.ProcessEngine, en.RayEngine)
        for engine, says in (
            (en.TransformersEngine(), "vLLM's, and `TransformersEngine` has no part"),
            (en.SimulatedEngine(), "vLLM's, and `SimulatedEngine` has no part"),
            (en.VLLMEngine(enable_lora=True), r"`VLLMEngine\(enable_lora=True\)`"),
        )
    ),
    *(
        bad(lambda e, n: started(EnginePool.of(e, n) if n > 1 else e), "on cpu.* Leave `we", e, n)
        for kind in (en.ProcessEngine, en.RayEngine)
        for e in (kind(weight_transfer="nccl"),)
        for n in (1, 2)
    ),
    bad(started, "multiple of the number of engines, 2", EnginePool([en.SimulatedEngine()] * 2), 3),
    bad(EnginePool, "at least one", []),
]

TEMPLATES = (
    {"tokenize": False},
    {"max_length": 3, "truncation": True},
    {"padding": True},
    {"return_dict": False},
    {"continue_final_message": True, "add_generation_prompt": True},
)
REWARDS = [
    *(
        bad(partial(RewardScheduler, [len]), says, **setting)
        for says, setting in (
            ("has 2 entries, but", {"reward_weights": [1.0, 2.0]}),
            (COUNT + "1 or more", {"workers": 0}),
            ("expected a size such as '2GiB'", {"memory_limit": "much"}),
            ("use '64MiB' or more", {"memory_limit": "1MB"}),
            ("use 0.01 to 1,000,000", {"timeout": 0}),
        )
    ),
    bad(RewardScheduler, "is a torch module", [nn.Linear(1, 1)]),
    unnamed(RewardScheduler, r"give a list of names, such as `\[PATH\]`", [len], env_vars="PATH"),
    bad(RewardScheduler, "Make it a tuple of names of environment variables", [keyed]),
    *(
        bad(columns, rf"The column `{name}` of row 0 of `val_data` .*Rename", {name: ["x"]})
        for name in (*GIVEN, *OFFERED)
    ),
    *(
        unnamed(countdown, "`countdown_reward` refuses the row `b`", metadata=metadata)
        for metadata in (None, {"numbers": [1, 2]}, {"numbers": ["1"], "target": 1})
    ),
    bad(rewards.math_verify_reward, "needs a column `answer` or `solution`", ["1"]),
    bad(rewards.math_verify_reward.check_row, "no column `answer` or `solution`", {"level": 1}),
    *(
        bad(judge, says, **setting)
        for says, setting in (
            ("has no `{completion}`, so the judge would not see it", {"template": "Is it good?"}),
            ("Double every brace that is not of a field", {"template": "{completion} as {"}),
            ("the names of columns. Double", {"template": '{completion} as {"score": 1}'}),
            ("the template has no", {"rubric": "x", "template": "{completion}"}),
            ("is not a regular expression", {"score_pattern": "(a"}),
            ("has 2 groups: exactly one", {"score_pattern": r"(\d)/(\d)"}),
            ("the first must be less", {"score_range": (5, 1)}),
            (COUNT + "1 or more", {"max_tokens": 0}),
            (COUNT + "0 or more", {"max_retries": -1}),
            ("use letters, digits and underscores", {"name": "my judge"}),
            ("an address such as 'http://localhost:8000/v1'", {"base_url": "localhost:8000/v1"}),
            ("is not set", {"api_key_env": "NO_SUCH_KEY"}),
        )
    ),
    *(
        unnamed(data, rf"`chat_template_kwargs` has `{[*given][-1]}`", chat_template_kwargs=given)
        for given in TEMPLATES
    ),
]

ONE_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = [
    bad(Countdown, COUNT + "1 or more", size=0),
    *each(Countdown, "must give sizes of 2 or more a share", numbers=({1: 1.0}, {}, {3: 0.0})),
    unnamed(ReasoningGym, "`config` sets", "chain_sum", config={"seed": 1}),
    bad(
        lambda: ReasoningGym("chain_sum", size=1000, config=ONE_SUM).rows(),
        r"found only \d+ different questions",
    ),
    *(
        bad(check_reasoning_gym_row, says, {"task": task, "metadata": facts, "answer": answer})
        for task, facts, answer, says in (
            *(
                (task, {}, "1", f"`task={task!r}`.*reviewed.*Use one of ab, acre.*countdown_reward")
                for task in (None, "composite", "countdown", "number_sorting", "simple_integration")
            ),
            ("gcd", [1], "1", r"`metadata=\[1\]` is not a dict"),
            ("gcd", "{", "1", "`task='gcd'`: the columns"),
            ("rubiks_cube", {"cube_size": 10**9, "scramble_moves": ""}, None, "from 1 to 20"),
            ("tower_of_hanoi", {"num_disks": 10**9, "num_pegs": 3}, "1", "from 1 to 100"),
            ("propositional_logic", {"variables": ["P"], "premises": ["Q"]}, None, "letters that"),
            ("coin_flip", {}, "1e999999999", "`answer='1e999999999'` is not a number"),
            ("gcd", {}, 42, "`answer=42` is not text"),  # "42" would never equal it
            ("gcd", {}, None, "`answer=None` is not text"),
            ("graph_color", {}, 0, "`answer=0` is not text"),
            ("ab", {"x": object}, "1", "type .* is not JSON serializable"),
            ("ab", {"x": "y" * 300_000}, "1", "more than 300000 characters as JSON"),
        )
    ),
    bad(check_countdown_row, r"`metadata=\[1\]` is not a dict", {"metadata": [1]}),
    bad(check_countdown_row, "`task='countdown'`: the columns", {"metadata": "{"}),
    bad(
        check_countdown_row,
        "`metadata.numbers` has '1'",
        {"metadata": {"numbers": ["1"], "target": 2}},
    ),
]

NO_PROMPT = '{"prompt": "a"}\n{"question": "b"}'
DATA = [
    bad(read, r"a\.jsonl`, row 1 .*no column `prompt`.*question", "a.jsonl", NO_PROMPT),
    *(
        bad(read, rf"a\.jsonl`, line {says}", "a.jsonl", raw)
        for raw, says in (
            ('{"prompt": "a"}\n{', "2 is not JSON"),
            ('{"prompt": " "}', "1 .*empty `prompt`"),
            ('{"prompt": "1"}\n{"prompt": ""}', "2 has an empty `prompt`"),
            ('{"prompt": []}', "1 .*empty `prompt`"),
            ('{"prompt": 3}', "1 .*neither a string nor chat messages"),
            ('{"prompt": [{"role": "user"}]}', "1 .*`role` and `content`"),
            ("3", "1 .*must be a dict"),
            (b'{"prompt": "1"}\n\n"\xe9"', r"3 is not UTF-8 \(byte 0xe9"),
            ('{"prompt": "1"}'.encode("utf-16"), "1: the file is UTF-16.*iconv"),
            (gzip.compress(b"{}", mtime=0), "1: the file is compressed with gzip.*gunzip"),
            ('{"prompt": "1"}\n\n{"prompt": "\\ud83d"}', "3 has half of a surrogate pair"),
            (
                '{"prompt": [{"role": "user", "content": "\\udc00!"}]}',
                r"1 has half of a surrogate pair in its `prompt` \('\\udc00' at character 0\)",
            ),
        )
    ),
    bad(read, r"a\.json`, line 2 is not UTF-8", "a.json", b'[{"prompt": "1"},\n"\xe9"]'),
    bad(read, r"a\.jsonl` is empty", "a.jsonl", ""),
    bad(made, "Rows 0 and 2 have the same `uid` '0'", [{"prompt": "a", "uid": n} for n in "010"]),
    bad(resumed, "another data set", "abcd"),
    bad(resumed, "another data set", "cba"),
    unnamed(resumed, "`seed=0`, this run has `seed=1`", "abc", seed=1),
    unnamed(resumed, "`shuffle=True`, this run has `shuffle=False`", "abc", shuffle=False),
]

SCHEDULING = [
    *(
        bad(rule, says, values, keep)
        for rule in down_sampling.RULES.values()
        for values, keep, says in (
            ([1, 2], 0, "`keep=0` of 2 rewards in a group: use 1 to 2"),
            ([1, 2], 3, "`keep=3` of 2 rewards in a group: use 1 to 2"),
            ([[1, 2]], -1, "`keep=-1` of 2"),
            (1.0, 1, r"`rewards` has the shape \(\): give one row per group"),
            ([[[1.0]]], 1, r"the shape \(1, 1, 1\)"),
        )
    ),
    bad(PromptHistory, r"`PromptHistory\(.* use 0 or more", shrinkage=-0.1),
    bad(PromptHistory, r"`PromptHistory\(.* use more than 0", half_life=0.0),
    bad(TokenConditioned, rf"`TokenConditioned\(fea.* {COUNT}1 or more", features=0),
    *each(TokenConditioned, r"`TokenConditioned\(rid.* use more than 0", ridge=(0, -1)),
    bad(TokenConditioned, r"`TokenConditioned\(half_.* use more than 0", half_life=0),
    bad(TokenConditioned, rf"`TokenConditioned\(max_.* {COUNT}1 or more", max_waiting=0),
    bad(
        lambda: TokenConditioned(features=9).load_state_dict(TokenConditioned().state_dict()),
        "has 16 features, the saved one",
    ),
    *each(LogNormalLengths, r"`LogNormalLengths\(med.* use more than 0", median=(0, -1)),
    bad(LogNormalLengths, r"`LogNormalLengths\(sig.* use 0 or more", sigma=-0.1),
    bad(Oracle, "does not name the request of each length", {}),
    bad(Oracle, "does not name the request of each length", [5, 6]),
    bad(quotas, r"no prompt of 'b' in a round of 4\. Raise", {"a": 0.9, "b": 0.1}, 4),
]

ROWS = [*(*CALLBACKS, *MODULES, *DATA_MODULES, *ENGINES, *REWARDS, *TASKS, *DATA, *SCHEDULING)]

AT_FIT = [
    bad(trains, "use 2 or more", num_generations=1),
    bad(trains, COUNT + "1 or more", prompts_per_round=0),
    bad(trains, "is more than `train_data` holds: 80", prompts_per_round=100),
    bad(trains, r"does not divide .*=4`. Use one of \[1, 2, 4\]", steps_per_round=3),
    bad(trains, COUNT + "1 or more", num_iterations=0),
    bad(trains, COUNT + "1 or more", num_engines=0),
    bad(trains, "is more than `prompts_per_round=4`.* Use 4 or less", num_engines=5),
    bad(trains, COUNT + "1 or more", max_completion_length=0),
    bad(trains, "leaves no room", max_completion_length=512),
    bad(trains, "use more than 0", temperature=0.0),
    bad(trains, "use more than 0", val_temperature=0.0),
    bad(trains, "use ", top_p=1.5),
    bad(trains, "has 2 entries, but", reward_weights=[1.0, 2.0]),
    bad(trains, "cannot hold .* Use 28 or more", micro_batch_tokens=20),
    bad(trains, "leaves nothing to validate", val_greedy=False, val_data=[{"prompt": "1"}]),
    bad(trains, "use 0.01 to 1,000,000", reward_timeout=0.0),
    during("empty", train_data=[]),
    during("row 0.*`prompt`", train_data=[{"text": "1+1="}]),
    during("no file `no/such/file.jsonl`", train_data="no/such/file.jsonl"),
    during("endless.*500.*488", train_data=rows("7" * 500, uid="endless")),
    during("nowhere", tokenizer="./nowhere"),
    during("requires `task`, and row 0 of", reward_funcs=[rewards.reasoning_gym_reward]),
    during(
        "`reasoning_gym_reward` refuses the row `0 of .*`task='new_task'`.* reviewed",
        reward_funcs=[rewards.reasoning_gym_reward],
        train_data=rows(task="new_task", metadata={})[:1],
        prompts_per_round=1,
    ),
    during(
        r"`num_engines=3` with `engine=EnginePool\(...\)`",
        engine=EnginePool([en.SimulatedEngine()] * 2),
        num_engines=3,
    ),
    *(
        bad(lambda fit, m, name=name: fit(GRPOModule(name)), f"`model={name}`: .*folder")
        for name in ("./no/such/model", "/no/such/model", "no/such")
    ),
    during("`old_logprobs='engine'` with `top_p", module={"old_logprobs": "engine"}, top_p=0.9),
    during("'` with `engine=Sim", module={"old_logprobs": "engine"}, engine=en.SimulatedEngine()),
    during(r"Set `model\.lora_rank", engine=en.VLLMEngine(enable_lora=True)),
    during("64-true` with `VLLM", engine=en.VLLMEngine(), trainer={"precision": "64-true"}),
    during(r"Use `engine=ProcessEngine\(Transf", cb.AsyncRollout),
    during(
        "the run is on cpu",
        cb.AsyncRollout,
        engine=en.ProcessEngine(en.VLLMEngine(), weight_transfer="nccl"),
    ),
    during(
        "`DynamicSampling` with `SortedBatching`.*Remove one",
        lambda: [type("Mine", (cb.SortedBatching,), {})(), cb.DynamicSampling()],
    ),
    during(
        "`AsyncRollout` with `StreamedTraining`.*or use `RolloutWindow`",
        lambda: [cb.AsyncRollout(), cb.StreamedTraining()],
        **BESIDE,
    ),
    during(r"`RolloutWindow` with `top_p=0\.9", cb.RolloutWindow, top_p=0.9),
    during("`AsyncRollout` with .*needs an engine that", cb.AsyncRollout),
    during(
        "prompts_in_flight=9, .*with an update of 4 .*4 to 8",
        lambda: cb.AsyncRollout(prompts_in_flight=9, too_old="wait"),
        **BESIDE,
    ),
    during("`Ro.*: an update has 4 .*Use 4 or more", lambda: cb.RolloutWindow(3)),
    during("_flight=3, .*use 4 or more", lambda: cb.AsyncRollout(prompts_in_flight=3), **BESIDE),
    during("_flight=99` is more than `train_data` holds", lambda: cb.RolloutWindow(99)),
    *(
        during("that decide when", lambda kind=kind: [kind(), cb.RolloutWindow()], **BESIDE)
        for kind in (cb.AsyncRollout, cb.SortedBatching, cb.TailBatching)
    ),
    during(r"`AsyncRollout` with `top_p=0\.9", cb.AsyncRollout, **BESIDE, top_p=0.9),
    during(
        "`DynamicSampling` with a window in which prompts overtake",
        lambda: [cb.RolloutWindow(overtake=1), cb.DynamicSampling()],
    ),
    during(
        r"`DownSampling\(early_stop=True\)` with a window",
        lambda: [cb.AsyncRollout(), cb.DownSampling(2, early_stop=True)],
        **BESIDE,
    ),
    *(
        during(
            f"2 callbacks that decide .*`{kind.__name__}` and `{other.__name__}`.*Remove all",
            lambda kind=kind, other=other: [kind(2), other(2)],
        )
        for kind, other in (
            (cb.SortedBatching, cb.SortedBatching),
            *((kind, type("Mine", (kind,), {})) for kind in SETTERS),
        )
    ),
    during(r"ProcessEngine\(TransformersEngine", cb.StreamedTraining),
    during("steps_per_round=2", cb.StreamedTraining, **BESIDE, steps_per_round=2),
    during("scale_rewards='batch'", cb.StreamedTraining, {"scale_rewards": "batch"}, **BESIDE),
    during(r"advantage='reinforce\+", cb.StreamedTraining, {"advantage": "reinforce++"}, **BESIDE),
    bad(streams_rloo, "", normalize_advantages=True),
    during(
        "`pool_rounds=2` times `prompts_per_round=4` is 8 .*Use 8",
        lambda: cb.SortedBatching(2, update_prompts=9),
    ),
    during(r"`SortedBatching\(update_prompts=2\)`", cb.SortedBatching, steps_per_round=2),
    during("=SimulatedEngine`.*Use `VLLM", sorted_partial, engine=en.SimulatedEngine()),
    during("`top_p=0.9.*truncated", sorted_partial, top_p=0.9),
    during("=1.*with `num_iterations=2`.*Use 2 or more", sorted_partial, num_iterations=2),
    during("84 prompts .* holds 80. Use fewer `pool_rounds`", lambda: cb.SortedBatching(21)),
    during("`num_generations=4`.*Use 4 or less, or more `num", lambda: cb.DownSampling(5)),
    during("keep=4.*`num_generations=4`.*Keep fewer, or leave `early_stop`", early),
    during("of 80 .* draw 100. Use 4 or", lambda: cb.DynamicSampling(5), prompts_per_round=20),
    during(
        "of 80 .* draw 100. (?!Use 1).*prompts_per_r",
        lambda: cb.DynamicSampling(2),
        prompts_per_round=50,
    ),
    *(
        during(rf"{name}.*with `advantage='{advantage[:4]}", made, {"advantage": advantage})
        for name, made in (
            ("DynamicSampling", cb.DynamicSampling),
            ("PromptBudget", lambda: cb.PromptBudget(2)),
            ("PromptChoice.rule='skip_", cb.PromptChoice),
        )
        for advantage in ("reinforce++", "tracker")
    ),
    during("`PromptBudget.pilot=4.*`num_generations=4`.*Use a smaller", cb.PromptBudget),
    *(
        during(
            "`PromptBudget` with .*both would decide", lambda one=one: [one(), cb.PromptBudget(2)]
        )
        for one in (
            cb.TailBatching,
            cb.SortedBatching,
            lambda: cb.RolloutWindow(overtake=1),
            early2,
        )
    ),
    during("probe_tokens=24.*length=24", lambda: cb.LengthPrediction(probe_tokens=24)),
    *(
        during(f"'{order}'.*`LengthPr", partial(cb.MicroGroupSampling, slots=2, order=order))
        for order in ("shortest_first", "longest_first", "planned")
    ),
    during("less than one", lambda: cb.MicroGroupSampling(memory_budget="1KiB")),
    during(r"slots=7\)` .* Use 6 slots", lambda: cb.MicroGroupSampling(7), num_engines=3),
    during(
        "slots=8.*`slots=3`.*`memory_budget`",
        lambda: cb.MicroGroupSampling(8),
        engine=en.SimulatedEngine(kv_capacity=100),
        verify_sync=False,
    ),
    during("Remove `MicroBatchAccumulation`", MicroBatchAccumulation),
    during(r"`GRPOModule` has none\. Add", BackboneFinetuning),
]
