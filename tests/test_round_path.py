"""How far it is from `fit` to the engine, and what of the package a plain round enters."""

import ast
import gc
import re
import sys
from collections import Counter
from pathlib import Path

import lit_rlsched
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.rollout.rollout import Rollout

PACKAGE = Path(lit_rlsched.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
APART = ("engines/", "rewards/", "workers/", "processes.py", "training/weight_sync.py")
"""Of the engine, which gets its weights, and of the processes of rewards."""
OF_ENGINE = re.compile(r"lit_rlsched\.(engines|rewards|workers|scheduling\.(admission|trace))")
FOR_USERS = {
    "JudgeReward",
    "PolicyModule",
    "RolloutDataModule",
    "SimulatedEngine",
    "VLLMEngine",
    "_RolloutTrainer",  # TRL's arguments
    "completion_logprobs",
    "policy_loss",
    "simulate",
    "submit",  # of `RewardScheduler`
    "whole_logprobs",  # takes what `completion_logprobs` does
}
"""What may have more than seven parameters."""


class Walk:
    """Frames above the engine, and files that are entered from a rollout's begin to its result."""

    def __init__(self):
        self.frames, self.files, self.inside = [], {}, False

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        name = code.co_qualname
        self.inside = (self.inside or name == "Rollout.__init__") and name != "Rollout.result"
        above = self.path(frame)
        if self.inside and not any(file.startswith(APART) for file, _ in above):
            self.files.setdefault(*above[0])
        of = frame.f_locals.get("self")
        if code.co_name == "step" and isinstance(of, RolloutEngine) and not self.frames:
            self.frames = [name for _, name in above[1:]]

    def path(self, frame):
        """The file and the name of a frame and of those above it."""
        found = []
        while frame is not None:
            if (file := frame.f_code.co_filename).startswith(str(PACKAGE)):
                found.append((str(Path(file).relative_to(PACKAGE)), frame.f_code.co_qualname))
            frame = frame.f_back
        return found


def test_a_plain_round_is_a_short_walk(fit):
    walk, engine = Walk(), SimulatedEngine(lambda request: 5)
    sys.setprofile(walk)
    try:
        fit(engine=engine, trainer={"max_epochs": 1}, verify_sync=False)
    finally:
        sys.setprofile(None)
    assert len(walk.frames) <= 9, walk.frames
    assert len(walk.files) <= 12, walk.files


def states():
    """Each object of the package with the identity of what it holds."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one).__module__.startswith("lit_rlsched") and not isinstance(one, tuple):
            slots = (s for cls in type(one).__mro__ for s in getattr(cls, "__slots__", ()))
            held = getattr(one, "__dict__", {}) | {s: getattr(one, s, None) for s in slots}
            of = {n: (id(v), len(v) if hasattr(v, "__len__") else v) for n, v in held.items()}
            found[id(one)] = one, of
    return found


def test_few_classes_have_an_object_that_a_rollout_makes_or_changes(fit, monkeypatch):
    """The page names them; what a tuple names is a value, and the engine is its own matter."""
    begin, end, before, kinds = Rollout.__init__, Rollout.result, [], set()

    def begins(self, *args):
        before.append(states())
        begin(self, *args)

    def ends(self):
        result = end(self)
        old = before[-1]
        kinds.update(type(o) for i, (o, of) in states().items() if old.get(i) != (o, of))
        return result

    monkeypatch.setattr(Rollout, "__init__", begins)
    monkeypatch.setattr(Rollout, "result", ends)
    fit(engine=SimulatedEngine(lambda request: 5), trainer={"max_epochs": 2}, verify_sync=False)
    names = {kind.__name__ for kind in kinds if not OF_ENGINE.match(kind.__module__)}
    page = (PACKAGE.parent / "docs/explanation/architecture.md").read_text()
    (listed,) = re.findall(r"objects of ten classes: (.*?) `Round`,", page)
    assert sorted(names) == sorted(re.findall(r"`(\w+)`", listed)) and len(names) <= 10


def functions(tree):
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_have_few_parameters():
    long = set()
    for source in SOURCES.values():
        tree = ast.parse(source)
        made = {
            id(f): c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body
        }
        for function in functions(tree):
            args = function.args
            names = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
            if len(names - {"self", "cls"}) > 7:
                of = function.name == "__init__"
                long.add(made[id(function)] if of else function.name)
    assert long == FOR_USERS


def test_few_private_functions_are_called_once():
    words = Counter(word for source in SOURCES.values() for word in re.findall(r"\w+", source))
    private = [
        function.name
        for source in SOURCES.values()
        for function in functions(ast.parse(source))
        if re.match(r"_(?!_)", function.name)
    ]
    assert sum(words[name] <= 2 for name in private) <= 160
