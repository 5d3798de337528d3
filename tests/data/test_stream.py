"""Training prompts of a `datasets.IterableDataset`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from seen_rounds import Rounds
from trl.trainer.utils import repeat_iterable_dataset

from lit_rlsched.callbacks import MicroGroupSampling, SortedBatching
from lit_rlsched.data.source import DomainSource, StreamSource
from lit_rlsched.data.tasks import HubDataset
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group, Prompt, Sampling


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1", "uid": f"p{i}", "answer": i} for i in range(count)]


def source_of(
    rows: Any,
    seed: int = 0,
    shuffle: bool = False,
    most: int = 9,
    check: Any = None,
    multiple: int = 1,
) -> StreamSource:
    stream = rows
    if isinstance(rows, list):
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    return StreamSource(
        stream,
        lambda row: [ord(character) for character in row["prompt"]],
        check or (lambda uid, columns: None),
        max_prompt_length=most,
        seed=seed,
        shuffle=shuffle,
        multiple=multiple,
    )


@given(size=st.integers(1, 7), each=st.integers(1, 7), passes=st.integers(1, 3))
def test_passes_of_whole_rounds_are_those_of_trl(size: int, each: int, passes: int) -> None:
    rows = rows_of(size)
    source = source_of(rows, multiple=each)
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    theirs = [
        row["uid"] for row in repeat_iterable_dataset(stream, mini_repeat_count=1, batch_size=each)
    ] * passes
    drawn = [draw for _ in range(len(theirs) // each) for draw in source.draw(each)]
    assert [draw.prompt.uid for draw in drawn] == theirs
    if not theirs:
        with pytest.raises(UsageError, match=f"`prompts_per_round={each}`"):
            source.draw(each)


@given(
    size=st.integers(2, 9), each=st.integers(1, 4), skipped=st.integers(0, 8), at=st.integers(0, 6)
)
@example(size=9, each=4, skipped=5, at=1)
def test_a_prompt_that_waits_is_not_lost_where_a_pass_ends(
    size: int, each: int, skipped: int, at: int
) -> None:
    whole = size // each * each
    assume(each < whole)
    source = source_of(rows_of(size), multiple=each)
    drawn = []
    for number in range(3 * whole // each):
        drawn += source.draw(each, [f"p{skipped % size}"] if number == at % (whole // each) else [])
    counts = Counter(draw.prompt.uid for draw in drawn)
    assert len(counts) == whole and max(counts.values()) - min(counts.values()) <= 1


@given(
    size=st.integers(1, 7),
    draws=st.lists(st.floats(0, 1), max_size=12),
    stop=st.integers(0, 12),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_draws_conserve_prompts_and_resume_where_they_stopped(
    size: int, draws: list[float], stop: int, seed: int, shuffle: bool
) -> None:
    source = source_of(rows_of(size), seed, shuffle)
    counts = [round(share * size) for share in draws]
    seen = []
    for turn, count in enumerate(counts):
        if turn == stop:
            state = json.loads(json.dumps(source.state_dict()))
            source = source_of(rows_of(size), seed, shuffle)
            source.load_state_dict(state)
            assert json.loads(json.dumps(source.state_dict())) == state
        drawn = source.draw(count)
        assert len({draw.prompt.uid for draw in drawn}) == len(drawn) == count
        seen += drawn
    never_stopped = source_of(rows_of(size), seed, shuffle)
    assert [draw for count in counts for draw in never_stopped.draw(count)] == seen
    assert len({draw.key for draw in seen}) == len(seen)
    per_pass = Counter(draw.epoch for draw in seen)
    assert all(per_pass[epoch] == size for epoch in range(source.epoch - 1))
    expected = {row["uid"]: row for row in rows_of(size)}
    for prompt, _ in seen:
        row = expected[prompt.uid]
        assert (prompt.text, prompt.columns) == (row["prompt"], {"answer": row["answer"]})
        assert prompt.token_ids == tuple(map(ord, row["prompt"]))


def test_prompts_in_hand_are_skipped_and_come_later() -> None:
    source = source_of(rows_of(4))
    assert [d.key for d in source.draw(2, ["p0", "p3"])] == ["p1@0", "p2@0"]
    assert [d.key for d in source.draw(2, ["p3"])] == ["p0@0", "p1@1"] or source.epoch == 1
    assert source.left(["p0"]) > 10**6


def test_a_shuffled_stream_has_another_order_in_each_pass_and_for_each_seed() -> None:
    source, other = (source_of(rows_of(40), seed, shuffle=True) for seed in (1, 2))
    passes = [[d.prompt.uid for d in source.draw(40)] for _ in range(2)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1])
    assert [d.prompt.uid for d in other.draw(40)] != passes[0]


def test_an_endless_stream_is_read_no_further_than_it_is_drawn() -> None:
    read = []

    def rows() -> Any:
        for i in range(10**9):
            read.append(i)
            yield {"prompt": str(i)}

    source = source_of(datasets.IterableDataset.from_generator(rows))
    assert [d.prompt.text for d in source.draw(3)] == ["0", "1", "2"]
    assert [p.text for p in source.first(2)] == ["0", "1"]
    assert [d.prompt.text for d in source.draw(2)] == ["3", "4"]
    assert max(read) < 10


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"row 1 of pass 0 .* no column `prompt`"),
        ({"prompt": " "}, r"row 1 of pass 0 .* empty `prompt`"),
        ({"prompt": "0123456789"}, r"row 1 .*\(uid .*10 tokens.* 1 to 9: .*`stream\.filter"),
        ({"prompt": "a", "seen": {1, 2}, "uid": 1}, r"row 1 .* values that JSON cannot hold"),
    ],
)
def test_unusable_rows_are_refused_when_they_are_drawn(row: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "fine"}, row]
    source = source_of(datasets.IterableDataset.from_generator(lambda: iter(rows)))
    assert source.draw(1)
    with pytest.raises(UsageError, match=message):
        source.draw(1)


def test_rows_that_a_reward_function_refuses_are_refused() -> None:
    def check(uid: str, columns: Any) -> None:
        if columns["answer"] == 2:
            raise ValueError(f"refused {uid}")

    source = source_of(rows_of(4), check=check)
    source.draw(2)
    with pytest.raises(UsageError, match="refused p2"):
        source.draw(1)


def test_more_than_a_pass_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`prompts_per_round=4`.*pass over the stream has 3 rows"):
        source_of(rows_of(3)).draw(4)


def test_a_position_in_other_data_is_refused() -> None:
    source = source_of(rows_of(5))
    source.draw(3)
    state = source.state_dict()
    changed = rows_of(5)
    changed[1]["uid"] = "other"
    for rows in (changed, rows_of(2)):
        with pytest.raises(UsageError, match="made with another stream"):
            source_of(rows).load_state_dict(state)
    with pytest.raises(UsageError, match="`seed=0`, this run has `seed=1`"):
        source_of(rows_of(5), seed=1).load_state_dict(state)
    table = DomainSource([Prompt("p0", "0", (1,))], 0, True, None)
    with pytest.raises(UsageError, match="with a data set, and `train_data` is a stream"):
        source_of(rows_of(5)).load_state_dict(table.state_dict())
    with pytest.raises(UsageError, match=r"another data set \(a stream, "):
        table.load_state_dict({"domains": [(None, state)]})


def test_prompts_of_groups_are_stored_once() -> None:
    source = source_of(rows_of(2))
    one, two = (draw.prompt for draw in source.draw(2))
    groups = [Group(key, p, Sampling(1), []) for key, p in (("a", one), ("b", two), ("c", one))]
    stored = source.unpack(json.loads(json.dumps(source.pack(groups))))
    assert stored == {one.uid: one, two.uid: two}


def test_a_hub_data_set_can_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, **settings: Any) -> Any:
        asked.append(settings)
        return datasets.IterableDataset.from_generator(lambda: iter([{"question": "1+1"}]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = HubDataset("a/b", prompt_column="question", instructions="Add.", streaming=True)
    assert [row["prompt"] for row in hub.dataset()] == [
        [{"role": "user", "content": "Add.\n\n1+1"}]
    ]
    assert asked == [{"split": "train", "streaming": True}]


class Save(Rounds):
    """Saves a checkpoint when some prompts wait in the pool."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path, self.saved = path, 0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.path is not None and len(self.rounds) > 1 and len(trainer.datamodule.run.pool):
            trainer.save_checkpoint(self.path)
            self.path, self.saved = None, len(self.rounds)


def test_a_run_on_a_stream_resumes_exactly(fit: Any, sums: list[Any], tmp_path: Path) -> None:
    """Between two rounds, with prompts in the pool that the stream gives only once."""

    def run(path: Path | None, ckpt_path: Path | None) -> Save:
        rounds = Save(path)
        fit(
            callbacks=[
                rounds,
                SortedBatching(mode="partial", pool_rounds=3),
                MicroGroupSampling(slots=4),
            ],
            trainer={"max_epochs": 5},
            ckpt_path=ckpt_path,
            prompts_per_round=2,
            num_generations=2,
            max_completion_length=64,
            train_data=datasets.Dataset.from_list(sums[:30]).to_iterable_dataset(),
        )
        return rounds

    whole = run(tmp_path / "stream.ckpt", None)
    rest = run(None, tmp_path / "stream.ckpt")
    assert 0 < whole.saved < 5 and rest.drawn == whole.drawn[whole.saved :]
