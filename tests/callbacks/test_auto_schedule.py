import json
from itertools import pairwise

import pytest
import torch

from lit_rlsched.callbacks import (
    AheadRollout,
    AutoSchedule,
    InFlightUpdates,
    LengthPrediction,
    MicroGroupSampling,
    RolloutLogger,
    SortedBatching,
)
from lit_rlsched.callbacks.auto_schedule import NEXT
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError


class Outcome:
    """A simulated schedule of so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds


class Scripted(AutoSchedule):
    """Finds the candidate of a script fastest, one for each decision; then the last of it."""

    def __init__(self, script, **more):
        super().__init__(every_n_rounds=1, **more)
        self.script = [*script]

    def simulate(self, recent):
        fastest = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return {n: Outcome(1.0 if n == fastest else 2.0) for n in self.candidates}


class Seen(RolloutCallback):
    """Rules and completions of each round."""

    def __init__(self):
        self.rules, self.drawn, self.next = [], [], []

    def on_round_end(self, trainer, pl_module, round):
        rule = trainer.datamodule.run.schedule.rule
        self.rules.append(rule.chosen)
        self.next.append(round.metrics[NEXT])
        self.drawn.append(
            [(g.id, c.index, [*c.token_ids]) for g in round.groups for c in g.completions]
        )


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def run(fit, tmp_path, auto, rounds, ckpt_path=None, name="run", **more):
    seen = Seen()
    trainer = {"max_epochs": rounds, "default_root_dir": tmp_path / name}
    callbacks = [auto, seen, RolloutLogger(), MicroGroupSampling(slots=6)]
    _, module, data = fit(callbacks=callbacks, trainer=trainer, ckpt_path=ckpt_path, **more)
    return seen, weights(module), data


def test_it_switches_once_in_so_many_rounds_and_loses_no_prompt(fit, tmp_path):
    auto = Scripted([1, 1, 3, 3, 4, 0], rounds_between_switches=3)
    seen, *_ = run(fit, tmp_path, auto, 9)
    # the second round decides first; the switch to 3 has to wait until three rounds have passed
    assert seen.rules[:2] == [0, 0] and seen.rules[2] == 1
    changes = [n for n, (a, b) in enumerate(pairwise(seen.rules)) if a != b]
    assert len(changes) >= 2 and min(b - a for a, b in pairwise(changes)) >= 3
    trained = [name for of in seen.drawn for name, index, _ in of if not index]
    assert len(trained) == len({*trained})
    rows = Traces(tmp_path / "run").rows("rounds")
    assert [dict(row["metrics"])[NEXT] for row in rows] == seen.next
    assert [int(n) for n in seen.next[:-1]] == seen.rules[1:]


def test_a_resumed_run_repeats_the_decisions_that_came_after_its_checkpoint(fit, tmp_path):
    whole, end, _ = run(fit, tmp_path, Scripted([1, 4, 3], rounds_between_switches=1), 6)

    class Keep(RolloutCallback):
        """Saves a checkpoint after the third round."""

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    auto = Scripted([1, 4, 3], rounds_between_switches=1)
    seen = Seen()
    settings = {"max_epochs": 6, "default_root_dir": tmp_path / "again"}
    fit(
        callbacks=[auto, seen, RolloutLogger(), MicroGroupSampling(slots=6), Keep()],
        trainer=settings,
    )
    assert seen.drawn == whole.drawn
    # another script: it is not asked, as the rounds after the checkpoint are in the traces
    rest, resumed, _ = run(fit, tmp_path, Scripted([0]), 6, tmp_path / "three.ckpt", name="again")
    assert rest.rules == whole.rules[3:] and rest.drawn == whole.drawn[3:]
    assert torch.equal(resumed, end)
    replayed, same, _ = run(
        fit, tmp_path, Scripted([0], replay=str(tmp_path / "run")), 6, name="replayed"
    )
    assert replayed.drawn == whole.drawn and torch.equal(same, end)


def test_a_run_with_another_tokenizer_is_repeated_with_a_warning(fit, tmp_path):
    run(fit, tmp_path, Scripted([0]), 1)
    path = tmp_path / "run" / "traces" / "about.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": "other"}))
    again = Scripted([0], replay=str(tmp_path / "run"))
    with pytest.warns(UserWarning, match="that run had `tokenizer` 'other' and not None"):
        run(fit, tmp_path, again, 1, name="again")


def test_it_simulates_its_own_rounds(fit, tmp_path):
    auto = AutoSchedule(every_n_rounds=2, rounds_between_switches=1, gain=0.0)
    seen, *_ = run(fit, tmp_path, auto, 6)
    assert len(seen.rules) == 6
    names = [each.name for each in auto.candidates.values()]
    assert names[0] == "no callback" and not any("partial" in name for name in names)
    rows = [dict(row["metrics"]) for row in Traces(tmp_path / "run").rows("rounds")]
    assert [("auto_schedule/gain" in row) for row in rows] == [False, True] * 3


def test_tokens_of_earlier_policies_only_where_they_are_allowed(fit, tmp_path):
    auto = AutoSchedule(constraints=[])
    run(fit, tmp_path, auto, 1)
    assert any("partial" in each.name for each in auto.candidates.values())
    with pytest.raises(UsageError, match="none of on_policy, unbiased"):
        AutoSchedule(constraints=["fast"])


def test_a_checkpoint_of_other_candidates_is_refused(fit, tmp_path):
    trainer = {"max_epochs": 3, "default_root_dir": tmp_path / "run"}
    auto = Scripted([2], constraints=[])  # `partial`
    of, *_ = fit(callbacks=[auto, RolloutLogger(), MicroGroupSampling(slots=6)], trainer=trainer)
    of.save_checkpoint(tmp_path / "three.ckpt")
    with pytest.raises(UsageError, match=r"chosen SortedBatching\(mode='partial'\), which is not"):
        run(fit, tmp_path, Scripted([0]), 4, tmp_path / "three.ckpt")
    again, *_ = run(fit, tmp_path, Scripted([2], constraints=[]), 4, tmp_path / "three.ckpt")
    assert again.rules == [2]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (SortedBatching, "callbacks that decide when a round ends"),
        (InFlightUpdates, "nothing to choose from"),
        (AheadRollout, "nothing to choose from"),
        (LengthPrediction, "order='longest_first'"),
    ],
)
def test_what_it_does_not_go_with(fit, other, why):
    with pytest.raises(UsageError, match=why):
        fit(
            callbacks=[AutoSchedule(), other()],
            engine=ProcessEngine(TransformersEngine()),
        )
