"""What a model writes is data: calls of any depth, size and characters."""

import json
import pickle

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lightning import Trainer
from said_turns import SaidTurns, chat_model
from seen_rounds import Rounds
from tool_families import tokenizer_of
from worlds import look, wait_and_look

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RolloutLogger
from lit_rlsched.environments.chat import ToolChat
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.text import as_text
from lit_rlsched.types import Completion, Group, Prompt, Sampling
from lit_rlsched.workers.messages import packed_row


def nested(levels, begin="[", end="]"):
    return begin * levels + ("1" if begin == '{"a": ' else "") + end * levels


ODD = {
    "nan": "NaN",
    "infinity": "-Infinity",
    "beyond floats": "1e999",
    "many digits": "1" * 4000,
    "too many digits": "1" * 5000,
    "half a pair": '"\\ud800"',
    "lists, 90 deep": nested(90),
    "lists, 101 deep": nested(101),
    "lists, 900 deep": nested(900),
    "dicts, 300 deep": nested(300, '{"a": ', "}"),
    "brackets": "[" * 5000,
    "wide": "[" + ", ".join(["1"] * 3000) + "]",
    "long": json.dumps("x" * 10_000),
}
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).map(json.dumps)
names = st.sampled_from(["look", "wait_and_look", "sing", "self", "", "\ud800", "<|im_end|>"])
keys = st.sampled_from(["key", "self", "name", "function", "timeout", "\ud800", "a b", ""])
calls = st.tuples(names, keys, st.sampled_from([*ODD.values()]) | json_values)


def written(call):
    name, key, value = call
    start = f'{{"name": {json.dumps(name)}, "arguments": {{{json.dumps(key)}: {value}}}}}'
    return f"<tool_call>\n{start}\n</tool_call>"


@pytest.fixture(scope="module")
def scheduler():
    scheduler = EnvironmentScheduler(Environments([look, wait_and_look]))
    yield scheduler
    scheduler.shut_down()


TOKENIZER = tokenizer_of("qwen2_5")


@given(st.lists(calls, min_size=1, max_size=3))
@example([("look", "key", value) for value in ODD.values()])
@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
def test_any_call_is_answered_and_kept(scheduler, written_calls):
    chat = ToolChat(TOKENIZER, None, [TOKENIZER.eos_token_id])
    schemas = scheduler.environments.of({}).schemas
    messages = []
    for call in written_calls:
        turn = TOKENIZER(written(call) + TOKENIZER.eos_token)["input_ids"]
        message, read = chat.calls([], turn, schemas)
        messages.append(message)
        if read:
            scheduler.open("a", None, {})
            scheduler.call("a", read) if _answer(scheduler).failure is None else None
            answer = _answer(scheduler)
            assert answer.failure is None and len(answer.result) == len(read)
            replies = [{"role": "tool", "name": n, "content": c} for n, c, _ in answer.result]
            assert chat.reply(replies, 10**6)
            messages += replies
            scheduler.close("a")
    prompt = Prompt("p", [{"role": "user", "content": "?"}], (1,))
    completion = Completion(0, messages=messages)
    group = Group("p@0", prompt, Sampling(9), [completion])
    (again,) = unpack(pack([group]), lambda uid: prompt)[0].completions
    assert json.dumps(again.messages) == json.dumps(messages)
    row = pickle.loads(packed_row("?", messages, [1], {}, None))
    assert json.dumps(row["completions"]) == json.dumps(messages)
    as_text(messages).encode()


def _answer(scheduler):
    while not (answers := scheduler.poll()):
        scheduler.wait(1.0)
    return answers[0]


def parsed(completions, log_extra, **columns):
    """As rewards do that read what a model wrote."""
    depth = 500 if "sing" in str(completions[0]) else 50
    log_extra("read", [json.loads("[" * depth + "]" * depth)])
    return [float(len(str(completions[0])) % 7)]


@pytest.mark.slow
def test_a_run_goes_on_whatever_is_written(tmp_path):
    """Its table, its page, its checkpoint and the run that is resumed from it too."""
    odd = ("nan", "beyond floats", "half a pair", "lists, 900 deep")
    texts = [written(("look", "key", ODD[name])) for name in odd]
    texts += [written(("\ud800", "self", '"<|im_end|>"')), written(("sing", "key", "1"))]
    model = chat_model(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i} "}]} for i in range(len(texts) // 2)]

    def script(prompt, index):
        number = int(prompt.rpartition("user\n")[2].split()[0])
        return [texts[2 * number + index], "end"]

    def run(max_epochs, **given):
        seen = Rounds()
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path / "run",
            callbacks=[RolloutLogger(num_completions=99), seen],
        )
        data = RolloutDataModule(
            rows,
            [parsed],
            tools=[look],
            engine=SaidTurns(TOKENIZER, script),
            prompts_per_round=len(rows),
            num_generations=2,
            max_completion_length=2000,
            micro_batch_tokens=8000,
            verify_sync=False,
        )
        trainer.fit(GRPOModule(model), datamodule=data, **given)
        return trainer, seen.rounds[-1]

    trainer, first = run(1)
    assert {c.dropped for c in first.completions} == {None}
    assert first.metrics["tools/call_frequency"] > 0.5
    assert first.metrics["tools/failure_frequency"] > 0.5
    assert 0 < first.metrics["tools/unparsed_frequency"] < 0.5
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, second = run(2, ckpt_path=tmp_path / "one.ckpt")
    assert len(second.completions) == len(first.completions)
    lines = (tmp_path / "run/completions.jsonl").read_text().splitlines()
    assert len(lines) == 2 * len(first.completions)
    assert (tmp_path / "run/report.html").exists()
