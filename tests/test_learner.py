"""Which modules take part in a round, and which are told that they do not."""

import warnings

import pytest
from plain_module import Plain

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.training.learner import Learner, PlainLearner, half_learner

MEMBERS = {name for name in dir(PlainLearner) if not name.startswith("_")}


class Half(Plain):
    """Scores, and forgets the rest."""

    needs_reference = False

    def score(self, batch):
        raise AssertionError("not called")


class All(Half):
    """Lacks nothing."""


for name in MEMBERS - vars(Half).keys():
    setattr(All, name, getattr(PlainLearner, name))


def test_modules_with_all_members_or_none_are_silent(tiny_model):
    assert half_learner(Plain(tiny_model)) is None
    for module in (GRPOModule(tiny_model), RLOOModule(tiny_model), All(tiny_model)):
        assert isinstance(module, Learner) and half_learner(module) is None


def test_what_a_module_lacks_is_named(tiny_model):
    said = half_learner(Half(tiny_model))
    found, _, missing = said.partition(", so it is ")[0].partition(", but not ")
    assert found == "`Half` defines `needs_reference`, `score`"
    names = set(missing.replace("`", "").split(", "))
    assert names == MEMBERS - {"needs_reference", "score"} and "compute_advantages" in names


def test_a_run_says_so_at_its_start(fit, tiny_model):
    with pytest.warns(UserWarning, match="`Half` defines .* but not .*`compute_advantages`"):
        fit(Half(tiny_model), trainer={"max_epochs": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Plain(tiny_model), trainer={"max_epochs": 1})
    assert not [w for w in caught if "defines" in str(w.message)]
