"""Runs with tools: turns, masks, and that latency decides nothing."""

import json
import re
import shutil
import time
from itertools import count, groupby
from statistics import fmean

import forked
import killed_tools
import psutil
import pytest
import torch
from lightning import Trainer
from placements import on_ray
from seen_rounds import Policies, Rounds, vector
from transformers import AutoTokenizer
from worlds import CHATS as ROWS
from worlds import Troubled, lengths, look, notes, one, wait_and_look

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import (
    AdaptiveTimeouts,
    AsyncRollout,
    DownSampling,
    LengthPrediction,
    MicroGroupSampling,
    PromptBudget,
    RolloutLogger,
    RolloutWindow,
    SortedBatching,
    TailBatching,
)
from lit_rlsched.cli.simulate import simulate
from lit_rlsched.data.prompts import tokenize
from lit_rlsched.data.rows import load_rows
from lit_rlsched.engines import ProcessEngine, RayEngine, TransformersEngine, VLLMEngine
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.types import ENVIRONMENT, Sample


@pytest.fixture
def run(exact_model, tools_tokenizer, tmp_path):
    """Train for two rounds in float64; returns the module and the rounds."""

    def run(
        *callbacks,
        rows=ROWS,
        rewards=None,
        model=exact_model,
        precision="64-true",
        max_epochs=2,
        ckpt_path=None,
        **data,
    ):
        seen = Rounds()
        settings = {
            "prompts_per_round": 4,
            "num_generations": 4,
            "max_completion_length": 96,
            "micro_batch_tokens": 512,
            "engine": TransformersEngine(),
            "seed": 3,
            "val_greedy": False,
        }
        module = GRPOModule(model, learning_rate=1e-3)
        trainer = Trainer(
            accelerator="cpu",
            precision=precision,
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[*callbacks, seen],
        )
        datamodule = RolloutDataModule(
            rows, rewards, tokenizer=tools_tokenizer, **{**settings, **data}
        )
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
        tokenizer = AutoTokenizer.from_pretrained(tools_tokenizer)
        for sample in (s for round in seen.rounds for s in round.samples):
            assert_prompt_is_what_the_policy_saw(sample, tokenizer)
        return module, seen.rounds

    return run


def assert_prompt_is_what_the_policy_saw(sample, tokenizer):
    """Whatever has become of a completion, its readers get the prompt that its tokens go on."""
    if len(sample.completion.token_ids):
        prompt = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True)
        assert [*prompt["input_ids"], *sample.completion.own_ids] == sample.token_ids


def drawn(rounds):
    """All that was drawn and replied, by round."""
    return [
        [(c.token_ids, c.segments, c.scores, c.messages) for c in round.completions]
        for round in rounds
    ]


def test_a_run_with_tools_masks_their_replies(run):
    _, rounds = run(tools=[look], rewards=[lengths])
    completions = [c for round in rounds for c in round.completions]
    turns = [c for c in completions if len(c.messages) > 1]
    assert len(turns) > len(completions) / 4
    for c in completions:
        assert sum(n for _, n in c.segments) == len(c.token_ids) <= 96
        authors = [author for author, _ in c.segments]
        assert (ENVIRONMENT in authors) == (len(c.messages) > 1)
        assert [m["role"] for m in c.messages][::2] == ["assistant"] * ((len(c.messages) + 1) // 2)
        assert c.scores == [len(c.messages)]
    metrics = rounds[0].metrics
    assert metrics["tools/call_frequency"] > 0.25
    assert metrics["tools/failure_frequency"] == 0


def test_waits_for_tools_are_simulated_from_the_traces(run, tmp_path):
    run(RolloutLogger(num_completions=0), tools=[wait_and_look], rewards=[lengths])
    for row in Traces(tmp_path).rows("completions"):
        replies = [n for n in row["turns"] if n < 0]
        assert row["tokens"] == row["drawn"] - sum(replies) == sum(map(abs, row["turns"]))
        assert row["tool_seconds"] > 0 or not replies
    said = simulate(str(tmp_path), rounds=2, most_callbacks=1)
    assert "without tools" not in said  # there are calls
    assert "Tools with" not in said  # which go with each rule


def assert_same(weights, others):
    """Up to the rounding of other rows in a decode step, which the optimizer makes larger."""
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-9)


DELAYS = {
    "none": None,
    "short keys last": lambda key, seed: 0.02 / len(key),
    "by chance": lambda key, seed: hash((key, seed)) % 5 / 200,
}


@pytest.mark.mostly_slow("slots")
@pytest.mark.parametrize(
    ("plain", "callbacks"),
    [
        ([], lambda: [MicroGroupSampling(slots=3)]),
        ([DownSampling(keep=2)], lambda: [DownSampling(keep=2), MicroGroupSampling(slots=5)]),
        (
            [],
            lambda: [MicroGroupSampling(slots=3, order="longest_first"), LengthPrediction()],
        ),
        (
            [AsyncRollout(1, 4, "wait")],
            lambda: [AsyncRollout(1, 4, "wait"), MicroGroupSampling(slots=3)],
        ),
    ],
    ids=["slots", "selected", "longest first", "one step off"],
)
def test_how_long_tools_take_decides_nothing(run, plain, callbacks):
    engine = {"engine": ProcessEngine(TransformersEngine())}
    module, rounds = run(*plain, environment_factory=notes(), max_epochs=3, **engine)
    first, trained = drawn(rounds), vector(module)
    assert any(c.scores[0] for c in rounds[0].completions)
    for delay in list(DELAYS.values())[1:]:
        made = notes(delay)
        module, rounds = run(
            *callbacks(), environment_factory=made, environment_workers=2, max_epochs=3, **engine
        )
        assert drawn(rounds) == first
        assert_same(vector(module), trained)


def test_siblings_see_the_same_task(run):
    _, rounds = run(environment_factory=notes())
    for group in rounds[0].groups:
        opened = {tuple(c.token_ids[: c.segments[0][1]]) for c in group.completions}
        assert len(opened) == 1
        assert all(c.segments[0][0] == ENVIRONMENT for c in group.completions)


KINDS = {"reset": "raised", "exit": "crashed", "hang": "timeout", "memory": "out_of_memory"}


@pytest.mark.mostly_slow("raise")
@pytest.mark.parametrize("trouble", [*KINDS, "raise", "long", "picture", "surrogate"])
def test_trouble_costs_a_completion_and_the_run_goes_on(run, trouble):
    rows = [{**row, "trouble": trouble if i % 3 == 0 else None} for i, row in enumerate(ROWS)]
    _, rounds = run(rows=rows, rewards=[lengths], environment_factory=Troubled, tool_timeout=1.0)
    failed, replies = 0, []
    for c, group in ((c, g) for round in rounds for g in round.groups for c in g.completions):
        bad = group.prompt.columns["trouble"] is not None
        called = len(c.messages) > 0 and "tool_calls" in c.messages[0]
        fails = bad and trouble in KINDS and (called or trouble == "reset")
        assert c.dropped == (f"environment_{KINDS[trouble]}" if fails else None)
        failed += fails
        if bad:
            replies += [m["content"] for m in c.messages if m["role"] == "tool"]
    assert (failed > 0) == (trouble in KINDS)
    if trouble in ("raise", "picture"):
        assert replies and all("error" in reply for reply in replies)
    if trouble == "surrogate":
        assert {*replies} == {"?"}
    if trouble == "long":
        assert replies == []  # it does not fit


def test_a_tool_that_never_returns_has_one_time_out_over_rounds(run):
    """It runs while the weights change, and costs its completion alone."""
    rows = [{**row, "trouble": "hang" if i % 3 == 0 else None} for i, row in enumerate(ROWS)]
    _, rounds = run(
        AsyncRollout(),
        MicroGroupSampling(slots=6),
        rows=rows,
        rewards=[one],
        environment_factory=Troubled,
        tool_timeout=1.0,
        max_sessions=12,
        max_epochs=6,
        engine=ProcessEngine(TransformersEngine()),
    )
    assert [len(round.groups) for round in rounds] == [4] * 6
    dropped = {c.dropped for round in rounds for c in round.completions}
    assert dropped == {None, "environment_timeout"}


def test_a_worker_that_ends_does_not_stop_rounds_whose_replies_have_their_step(run):
    """Those who may have ended it are opened alone, one after the other."""
    rows = [{**row, "trouble": "exit" if i % 3 == 0 else None} for i, row in enumerate(ROWS)]
    _, rounds = run(
        MicroGroupSampling(slots=6),
        rows=rows,
        rewards=[one],
        environment_factory=Troubled,
        tool_timeout=5.0,
        tool_steps=3,
        max_epochs=1,
    )
    for group in rounds[0].groups:
        bad = group.prompt.columns["trouble"] is not None
        called = ["tool_calls" in c.messages[0] for c in group.completions]
        assert [c.dropped is not None for c in group.completions] == [bad and one for one in called]


def test_one_session_is_enough_and_turns_are_limited(run):
    given = {"environment_factory": notes(), "max_tool_calling_iterations": 1}
    _, rounds = run(**given)
    _, few = run(**given, max_sessions=1)
    assert drawn(few) == drawn(rounds)
    replies = [sum(m["role"] == "tool" for m in c.messages) for c in rounds[0].completions]
    assert max(replies) == 1


@pytest.mark.mostly_slow("process")
@pytest.mark.parametrize(
    "engine",
    [
        {"engine": ProcessEngine(TransformersEngine())},
        {"engine": TransformersEngine(), "num_engines": 2},
        pytest.param({"engine": RayEngine(TransformersEngine())}, marks=on_ray[:2]),
    ],
    ids=["process", "two engines", "ray"],
)
def test_any_engine_draws_the_same(run, engine, request):
    if isinstance(engine["engine"], RayEngine):
        request.getfixturevalue("ray_cluster")
    module, rounds = run(environment_factory=notes())
    elsewhere, others = run(MicroGroupSampling(slots=4), environment_factory=notes(), **engine)
    assert drawn(others) == drawn(rounds)
    assert_same(vector(module), vector(elsewhere))


@pytest.fixture(scope="module")
def chatty_model(tiny_model, tmp_path_factory):
    """The tiny Qwen3 with more tokens that end a turn."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | {"eos_token_id": [1, *range(10, 20)]}
    file.write_text(json.dumps(settings))
    return str(folder)


def test_on_vllm_trainer_and_engine_agree_over_turns(run, chatty_model):
    engine = ProcessEngine(VLLMEngine())
    module, rounds = run(
        MicroGroupSampling(slots=5),
        environment_factory=notes(lambda key, seed: 0.01),
        model=chatty_model,
        precision="32-true",
        engine=engine,
    )
    turns = [c for round in rounds for c in round.completions if len(c.messages) > 1]
    assert len(turns) > 8
    assert module.trainer.callback_metrics["sampling/sampling_logp_difference/max"] < 1e-4
    for round in rounds:
        for c in round.completions:
            replies = [i for i, on in enumerate(c.mask()) if not on]
            assert replies and all(c.logprobs[i] == 0 for i in replies)


def test_reward_functions_see_environments(run):
    """As those of TRL's examples; other functions do not, and each has its own weight."""

    def keys(environments, completions, log_extra, **columns):
        log_extra("keys", [len(environment.keys) for environment in environments])
        return [float(len(environment.keys)) for environment in environments]

    def replies(completions, **columns):
        return [float(sum(m["role"] == "tool" for m in c)) for c in completions]

    _, rounds = run(environment_factory=notes(), rewards=[keys, replies], reward_weights=[2.0, 1.0])
    for c in rounds[0].completions:
        number = sum(m["role"] == "tool" for m in c.messages)
        asked, replied, own = c.scores
        assert (c.extra["keys"], replied) == (asked, number)
        assert asked >= number and own == asked % 3  # the last reply may not have fitted
    assert rounds[0].metrics["rewards/Notes/mean"] >= 0


def test_validation_has_turns_too(run):
    module, _ = run(
        environment_factory=notes(),
        max_epochs=1,
        val_data=ROWS[:3],
        val_num_generations=2,
        val_greedy=True,
    )
    logged = module.trainer.callback_metrics
    assert logged["val/mean@2"] >= 0 and logged["val/completions/mean_length"] > 0


def test_import_paths_are_enough():
    data = RolloutDataModule(ROWS, len, environment_factory={"a": "worlds.Troubled"})
    assert data.run.settings.tools.environments.by_name["a"].methods == ("look",)
    with pytest.raises(UsageError, match="is a tool and a method of Troubled"):
        RolloutDataModule(ROWS, len, tools=["worlds.look"], environment_factory="worlds.Troubled")


def test_settings_out_of_range_are_refused():
    whole = "tool_steps", "max_sessions", "environment_workers", "max_tool_calling_iterations"
    for name in whole:
        with pytest.raises(UsageError, match=rf"\({name}=0\)`: must be a whole number, 1 or more"):
            RolloutDataModule(ROWS, len, tools=["worlds.look"], **{name: 0})
    with pytest.raises(UsageError, match=r"\(tool_timeout=0\)`: use 0.01 to 1,000,000"):
        RolloutDataModule(ROWS, len, tools=["worlds.look"], tool_timeout=0)


def test_what_does_not_work_with_tools_is_refused(run):
    rows = [{"prompt": "1+2="}] * 2
    with pytest.raises(UsageError, match="A prompt is a string, and tools are called in chats"):
        run(rows=rows, tools=[look], rewards=[one], prompts_per_round=1)
    rows = [{**row, "environment": "b"} for row in ROWS]
    with pytest.raises(UsageError, match="the column `environment` is 'b'"):
        run(rows=rows, environment_factory={"a": Troubled}, rewards=[one])


def test_groups_that_stop_early_leave_no_session(run):
    early = DownSampling(keep=2, early_stop=True)
    _, rounds = run(early, environment_factory=notes(DELAYS["short keys last"]), max_sessions=9)
    assert len(rounds) == 2
    for round in rounds:
        assert all(len(g.completions) <= 4 for g in round.groups)


def test_a_completion_that_cannot_open_leaves_its_group_the_others(run):
    """Also while the rest of the group, which began after its pilot, still opens."""

    class Flaky(notes()):
        opened = count(1)

        def reset(self, prompt, seed, **columns) -> str:
            if next(self.opened) % 5 == 0:
                raise RuntimeError("not now")
            return super().reset(prompt, seed, **columns)

    _, rounds = run(PromptBudget(2), environment_factory=Flaky, max_epochs=4)
    sizes = {len(group.completions) for round in rounds for group in round.groups}
    dropped = {c.dropped for round in rounds for c in round.completions}
    assert sizes == {2, 4} and dropped == {None, "environment_raised"}


@pytest.mark.slow
def test_a_crash_under_an_engine_that_runs_ahead_changes_no_other_completion(run):
    """Completions whose worker has died with another's begin again, and draw the same."""
    rows = [{**row, "uid": f"{i}", "trouble": "slow"} for i, row in enumerate(ROWS)]
    settings = {"rewards": [lengths], "environment_factory": Troubled, "tool_timeout": 5.0}
    _, whole = run(rows=rows, **settings)
    drawn_first = int(whole[0].groups[0].prompt.uid)
    rows[drawn_first] = {**rows[drawn_first], "trouble": "exit"}
    engine = ProcessEngine(TransformersEngine())
    _, rounds = run(rows=rows, engine=engine, **settings)
    same = dropped = 0
    for group, before in zip(rounds[0].groups, whole[0].groups, strict=True):
        for c, other in zip(group.completions, before.completions, strict=True):
            if c.dropped:
                dropped += 1
                continue
            assert (c.token_ids, c.segments) == (other.token_ids, other.segments)
            same += 1
    assert dropped > 0 and same >= 12


def test_environments_make_the_prompts_of_rows_without_one(run, tools_tokenizer):
    class Own:
        def reset(self, seed, **columns) -> str:
            assert not columns
            return f"{seed % 10**6}?"

        def look(self, key: str) -> str:
            """Look something up.

            Args:
                key: What to look up.
            """
            return "1"

    _, rounds = run(
        rows=[{}] * 6, rewards=[one], environment_factory=Own, val_data=[{}] * 3, val_greedy=True
    )
    groups = [group for round in rounds for group in round.groups]
    tokenizer = AutoTokenizer.from_pretrained(tools_tokenizer)
    begun = set()
    for group in groups:
        asked = {
            tokenizer.decode([*group.prompt.token_ids, *c.token_ids[: c.segments[0][1]]])
            for c in group.completions
        }
        assert len(asked) == 1
        begun |= asked
    assert len(begun) == len(groups) == 8
    assert all(re.fullmatch(r"user: \d+\?\n?assistant: ", each) for each in begun)
    with pytest.raises(UsageError, match=r"`6 rows`, row 0 .*no column `prompt`"):
        run(rows=[{}] * 6, rewards=[one], tools=[look])


def test_longest_first_counts_waits_for_tools(run):
    """Those of the slow environment count for more, once their waits are known."""
    rows = [{**row, "environment": ("slow", "quick")[i % 2]} for i, row in enumerate(ROWS)]
    factory = {"slow": notes(lambda key, seed: 0.1), "quick": notes()}
    waits = {}

    class Watched(TransformersEngine):
        def submit(self, requests):
            requests = [*requests]
            for request in requests:
                waits.setdefault(request.id, request.waits)
            super().submit(requests)

    _, rounds = run(
        MicroGroupSampling(slots=3, order="longest_first"),
        LengthPrediction(),
        rows=rows,
        rewards=[one],
        environment_factory=factory,
        engine=Watched(),
        shuffle=False,
        max_epochs=3,
    )
    found = {"slow": [], "quick": []}
    for group in rounds[-1].groups:
        kind = found[group.prompt.columns["environment"]]
        kind += [waits[Sample(group, c).id] for c in group.completions]
    assert fmean(found["slow"]) > fmean(found["quick"])


def turns_in(completion):
    """Turns and replies of a completion by its tokens."""
    return [
        "tool" if is_reply else "assistant"
        for is_reply, _ in groupby(author == ENVIRONMENT for author, _ in completion.segments)
    ]


@pytest.mark.mostly_slow("beside-tools")
@pytest.mark.parametrize("given", ["tools", "environment"])
@pytest.mark.parametrize(
    "rule",
    [lambda: SortedBatching(mode="partial", pool_rounds=2), lambda: AsyncRollout(3, 10)],
    ids=["partial", "beside"],
)
def test_a_completion_that_outlives_its_round_finds_its_environment_as_it_was(
    run, given, rule, tmp_path
):
    """Each reply has the number of calls before it, and no call is made twice."""
    made = tmp_path / "calls"
    made.touch()

    def noting(key, seed):
        with made.open("a") as file:
            file.write("x")
        return 0.0

    given = {"environment_factory": notes(noting)} if given == "environment" else {"tools": [look]}
    module, rounds = run(
        rule(),
        MicroGroupSampling(slots=5),
        max_epochs=8,
        rewards=[one],
        engine=ProcessEngine(TransformersEngine()),
        **given,
    )
    completions = [c for round in rounds for c in round.completions]
    left = [c for group in module.trainer.datamodule.run.pool for c in group.completions]
    replied = sum(m["role"] == "tool" for c in (*completions, *left) for m in c.messages)
    too_long = sum("tool_calls" in c.messages[-1] for c in completions)
    assert len(made.read_text()) <= replied + too_long + len(left)
    outlived = 0
    for c in completions:
        replies = [m["content"] for m in c.messages if m["role"] == "tool"]
        if "environment_factory" in given:
            assert [reply[: len(str(k))] for k, reply in enumerate(replies, 1)] == [
                str(k) for k in range(1, len(replies) + 1)
            ]
        roles = turns_in(c)[1:] if "environment_factory" in given else turns_in(c)
        assert [m["role"] for m in c.messages] == roles
        outlived += len(replies) > 1 and len({a for a, _ in c.segments if a != ENVIRONMENT}) > 1
    assert outlived > 3
    assert not any(m.startswith("dropped") for round in rounds for m in round.metrics)


@pytest.mark.mostly_slow("0")
@pytest.mark.parametrize(
    "window", [RolloutWindow(), RolloutWindow(10, overtake=1), AsyncRollout(1, 10)], ids=range(3)
)
def test_a_reply_is_a_part_of_a_draft(run, window):
    """What verification keeps has the newest policy's log-probs, and its calls are made again."""
    seen, beside = Policies(), isinstance(window, AsyncRollout)
    engine = ProcessEngine(TransformersEngine())
    slots = MicroGroupSampling(slots=12)
    _, rounds = run(seen, window, slots, environment_factory=notes(), max_epochs=6, engine=engine)
    kept = drafted = 0
    for round in rounds:
        assert len(round.groups) == 4
        assert not any(name.startswith("dropped") for name in round.metrics)
        for group, c in ((g, c) for g in round.groups for c in g.completions):
            assert max(seen.gaps(group, c)) < 1e-9
            ages = {round.version - a for a, _ in c.segments if a != ENVIRONMENT}
            assert ages <= {0, int(beside)}
            replies = [m["content"] for m in c.messages if m["role"] == "tool"]
            numbers = [reply[: len(str(k))] for k, reply in enumerate(replies, 1)]
            assert numbers == [str(k) for k in range(1, len(replies) + 1)]
            if "tool_calls" not in c.messages[-1]:  # whose replies did not fit
                assert c.scores == [len(replies) % 3]
        kept += round.metrics.get("drafts/accepted_tokens", 0)
        drafted += round.metrics.get("drafts/tokens", 0)
    assert 0 < kept < drafted


@pytest.mark.mostly_slow("64-2")
@pytest.mark.parametrize(("most", "tool_steps"), [(96, None), (64, 2)])
def test_an_environment_with_a_state_gets_it_back(run, most, tool_steps):
    """No call is made twice, although its answers depend on more than the calls."""

    class Kept(notes()):
        def reset(self, prompt, seed, **columns) -> str:
            self.begun = time.monotonic_ns() % 10**9
            return super().reset(prompt, seed, **columns)

        def look(self, key: str) -> str:
            """Look something up.

            Args:
                key: What to look up.
            """
            return f"{super().look(key)}{self.begun % 100:02d}"

        def get_reward(self) -> float:
            time.sleep(0.01)
            return float(self.begun * 100 + len(self.keys))

        def state_dict(self):
            return dict(vars(self))

        async def load_state_dict(self, state):
            vars(self).clear()
            vars(self).update(state)

    sorted_rounds = SortedBatching(mode="partial", pool_rounds=2)
    _, rounds = run(
        sorted_rounds,
        MicroGroupSampling(slots=5),
        max_epochs=8,
        environment_factory=Kept,
        max_completion_length=most,
        tool_steps=tool_steps,
    )
    outlived = 0
    for c in (c for round in rounds for c in round.completions):
        replies = [m["content"] for m in c.messages if m["role"] == "tool"]
        begun, calls = divmod(int(c.scores[0]), 100)
        assert {int(reply[-2:]) for reply in replies} <= {begun % 100}
        assert [reply[: len(str(k))] for k, reply in enumerate(replies, 1)] == [
            str(k) for k in range(1, len(replies) + 1)
        ]
        last = c.messages[-1] if c.finish_reason == "stop" else {}
        assert calls == len(replies) + len(last.get("tool_calls") or ())  # which did not fit
        outlived += len(replies) > 0 and len({a for a, _ in c.segments if a != ENVIRONMENT}) > 1
    assert outlived > 3
    assert not any(m.startswith("dropped") for round in rounds for m in round.metrics)


@pytest.mark.slow
def test_a_completion_begins_anew_if_its_environment_answers_otherwise(run):
    class Moody(notes()):
        def look(self, key: str) -> str:
            """Look something up.

            Args:
                key: What to look up.
            """
            return str(time.monotonic_ns() % 1000)

    sorted_rounds = SortedBatching(mode="partial", pool_rounds=2)
    with pytest.warns(UserWarning, match="has answered otherwise"):
        _, rounds = run(
            sorted_rounds,
            MicroGroupSampling(slots=5),
            environment_factory=Moody,
            val_data=ROWS[:1],  # which ends the sessions of what goes on
            val_greedy=True,
            max_epochs=8,
        )
    assert sum(len(round.completions) for round in rounds) == 128
    assert rounds[-1].metrics["dropped/environment_diverged"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", killed_tools.HOW)
def test_killed_at_any_point_of_a_turn_and_resumed_equals_never_stopped(
    how, exact_model, tools_tokenizer, tmp_path
):
    process = forked.run(
        killed_tools.runs,
        str(tmp_path),
        exact_model,
        tools_tokenizer,
        how,
        *(f"{name} {number}" for name, (*_, number) in killed_tools.PLACES.items()),
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    whole, resumed = (json.loads(x) for x in process.stdout.splitlines() if x.startswith('{"compl'))
    assert whole["calls"] > 40
    if how == "partial":  # which completions are in time depends on how long tools take
        for of in (whole, resumed):  # prompts that are decoded in the same step are in one round
            assert of["number"] >= 144 and of["number"] % 4 == 0
    else:
        assert resumed == whole and whole["number"] == 144
        assert_same(*(torch.load(tmp_path / name / "weights.pt") for name in ("killed", "whole")))
    workers = [p for p in psutil.process_iter(["cmdline"]) if "workers/sessions.py" in str(p.info)]
    assert [p for p in workers if p.ppid() == 1] == []


EARLY = {
    "on policy": lambda: [SortedBatching(pool_rounds=2), MicroGroupSampling(slots=5)],
    "partial": lambda: [SortedBatching(mode="partial", pool_rounds=2), MicroGroupSampling(slots=5)],
    "races": lambda: [TailBatching(1.5), MicroGroupSampling(slots=6)],
    "stopped": lambda: [DownSampling(keep=2, early_stop=True), MicroGroupSampling(slots=5)],
    "pilot": lambda: [PromptBudget(2), MicroGroupSampling(slots=5)],
    "beside": lambda: [AsyncRollout(), MicroGroupSampling(slots=5)],
}


@pytest.mark.slow
@pytest.mark.parametrize("early", EARLY.values(), ids=EARLY)
def test_rounds_that_end_early_are_the_same_if_replies_come_after_so_many_steps(run, early):
    runs = []
    for delay in DELAYS.values():
        made, engine = notes(delay), ProcessEngine(TransformersEngine())
        _, rounds = run(
            *early(),
            environment_factory=made,
            tool_steps=4,
            max_sessions=9,
            max_epochs=4,
            engine=engine,
        )
        runs.append(drawn(rounds))
        steps = [round.metrics["rollout/decode_steps"] for round in rounds]
        runs[-1].append(steps)
    assert runs[1] == runs[0] and runs[2] == runs[0]


def test_prompts_of_both_sets_are_told_apart_where_reset_may_add_to_them(tools_tokenizer):
    """Their shared tokens end before the place where `reset` may add something."""
    tokenizer = AutoTokenizer.from_pretrained(tools_tokenizer)
    sets = {"train": load_rows(ROWS[:8]), "val": load_rows(ROWS[6:])}
    settings = {"context": 109, "max_completion_length": 10, "chat_template_kwargs": None}
    with pytest.warns(UserWarning, match=r"2 prompts of `val_data` are in `train_data` too"):
        made = tokenize(sets, tokenizer, environments=Environments(None, notes()), **settings)
    assert len({prompt.token_ids for prompt in made.train}) < 8


class Marked:
    """Its texts hold control tokens of the tests' tokenizer."""

    def reset(self, **columns) -> str:
        return " <eos><bos>"

    def look(self, key: str) -> list:
        """Look something up.

        Args:
            key: What to look up.
        """
        return [{"page": "<bos>"}]

    def get_reward(self) -> float:
        return 1.0


def test_control_tokens_from_outside_are_counted_and_told(run):
    rows = [{"prompt": [{"role": "user", "content": f"{i}<eos>"}]} for i in range(16)]
    with pytest.warns(UserWarning) as told:
        _, rounds = run(rows=rows, environment_factory=Marked, max_epochs=1)
    said = " ".join(str(warning.message) for warning in told)
    assert all(source in said for source in ("The tool `look`", "`reset` returned", "The row `"))
    assert said.count("control tokens") == 3
    metrics, completions = rounds[0].metrics, rounds[0].completions
    replies = sum(m["role"] == "tool" for c in completions for m in c.messages)
    assert replies and metrics["tools/control_tokens"] >= 2 * len(completions) + replies
    assert metrics["rollout/control_tokens"] == len(rounds[0].groups)


class Hanging(notes(owns_reward=False)):
    async def get_reward(self) -> float:
        import asyncio

        await asyncio.sleep(1000 if self.seed % 2 else 0)
        return 1.0


@pytest.mark.parametrize("adaptive", [False, True])
def test_rewards_of_environments_have_the_time_out_of_rewards(run, adaptive):
    """As other reward functions do: the completion has no reward, and its environment no fault."""
    callbacks = [AdaptiveTimeouts(minimum=0.1, maximum=0.5)] if adaptive else []
    given = {} if adaptive else {"reward_timeout": 0.5}
    module, rounds = run(
        *callbacks, environment_factory=Hanging, tool_timeout=60.0, max_epochs=1, **given
    )
    late = [c for c in rounds[0].completions if c.scores == [None]]
    assert 0 < len(late) < len(rounds[0].completions)
    assert all("timeout: no score within" in c.failure for c in late)
    logged = module.trainer.callback_metrics
    assert logged["rewards/Hanging/timeouts"] == len(late)
    assert not any(value for name, value in logged.items() if "dropped/environment" in name)


@pytest.mark.mostly_slow("plain")
@pytest.mark.parametrize(
    "how",
    [dict, lambda: {"callback": AsyncRollout(), "tool_steps": 4, "max_sessions": 9}],
    ids=["plain", "beside"],
)
def test_a_cache_of_replies_changes_nothing_that_is_drawn(run, how):
    class Cached(notes(DELAYS["by chance"])):
        cacheable = True

    runs = {}
    for made in (notes(), Cached):
        callback = how().pop("callback", DownSampling(keep=3))
        settings = {"engine": ProcessEngine(TransformersEngine()), **how()}
        settings.pop("callback", None)
        rows = [{**row, "answer": ""} for row in ROWS[:4]] * 4  # each prompt comes again
        _, rounds = run(callback, environment_factory=made, rows=rows, max_epochs=4, **settings)
        runs[made] = drawn(rounds)
        rates = [round.metrics["tools/cache_hit_rate"] for round in rounds]
        assert (max(rates) > 0) == (made is Cached)
    first, cached = runs.values()
    assert cached == first


def test_a_cacheable_class_with_a_state_of_chance_is_told_once(run):
    class Moody(notes()):
        cacheable = True

        def reset(self, prompt, seed, **columns) -> str:
            """Siblings get the first one's text, and their own objects return another one."""
            super().reset(prompt, seed, **columns)
            return f" ({time.monotonic_ns() % 10**6})"

    with pytest.warns(UserWarning, match="classes with `cacheable`, need answers") as told:
        _, rounds = run(environment_factory=Moody, max_epochs=4)
    assert sum("answered otherwise" in str(warning.message) for warning in told) == 1
    assert [len(round.completions) for round in rounds] == [16] * 4
