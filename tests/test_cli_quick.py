"""What the command line answers before it imports torch: help, version, names that do not exist."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import capture_parser

from lit_rlsched import __version__, callbacks, engines
from lit_rlsched.cli import main as cli
from lit_rlsched.cli.errors import OnlyInFiles
from lit_rlsched.cli.help import GROUPS
from lit_rlsched.cli.quick import FLAGS, Check, KeyTwice, Unclear, UniqueKeys, answer
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.settings import RemembersInit, trl_names

ROOT = Path(__file__).parents[1]
COMMANDS = [
    *("fit", "validate", "test", "predict", "estimate"),
    *("export", "simulate", "report"),
]
BLOCKS = [
    block
    for page in [ROOT / "README.md", *ROOT.glob("docs/*/*.md")]
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)
]


def said(*args: str) -> str:
    (message, *_) = [*Check(args[0]).mistakes([*args[1:]]), ""]
    return message


@pytest.fixture
def answered(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # a terminal's width

    def answered(*args: str) -> tuple[str, str, int]:
        with pytest.raises(SystemExit) as stop:
            answer([*args])
        shown = capsys.readouterr()
        return shown.out, shown.err, stop.value.code

    return answered


@pytest.fixture(scope="module")
def parsers():
    listed = capture_parser(cli.main)._subcommands_action
    return listed._name_parser_map


def test_the_bare_command_and_a_wrong_one_list_all_commands(answered) -> None:
    listed = ", ".join(COMMANDS)
    assert answered() == (
        "",
        f"error: A command is missing: use {listed}.\n"
        "tip: `lit-rlsched --help` lists the commands.\n",
        2,
    )
    for typo in ("fitt", "fti"):
        assert f"`{typo}`: use {listed}. Did you mean `fit`?" in answered(typo)[1]


@pytest.mark.parametrize("args", [["--version"], ["fit", "--version"]])
def test_version(answered, args: list[str]) -> None:
    assert answered(*args) == (f"lit-rlsched {__version__}\n", "", 0)


def test_help_is_short_and_names_what_has_more(answered) -> None:
    out, _, code = answered("--help")
    assert code == 0 and re.findall(r"^  (\w+) +\S.*\.$", out, re.M) == COMMANDS
    for command in COMMANDS:
        out, _, code = answered(command, "-h")
        assert code == 0 and 7 < len(out.splitlines()) < 60
        assert max(map(len, out.splitlines())) <= 100
    out, _, _ = answered("fit", "--help")
    for name in (
        *GROUPS,
        "SortedBatching",
        "VLLMEngine",
        "Countdown",
        "WandbLogger",
        "--ckpt_path",
    ):
        assert re.search(rf"(^|\s){name}\b", out), name
    assert "--memory" not in out and "--memory" in answered("estimate", "--help")[0]
    assert "--push_to_hub" in answered("export", "--help")[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_all_has_every_option_of_the_parser_and_no_text_is_cut(
    answered, parsers, command: str
) -> None:
    shown, _, _ = answered(command, "--help=all")
    flat = " ".join(shown.replace("`", "").split())
    for action in parsers[command]._actions:
        names = [n for n in action.option_strings if n.startswith("--")]
        if not names or names[0].endswith(".help") or names[0][2:] in ("help", *GROUPS):
            continue
        if isinstance(action, OnlyInFiles):
            continue
        assert re.search(rf"^  (-\w, )?{re.escape(names[0])}\b", shown, re.M), names
        if "." in names[0] and action.help:
            text = " ".join(action.help.replace("`", "").split())
            assert text.partition(" (type: ")[0] in flat


def test_help_on_a_topic(answered) -> None:
    assert (
        "--data.num_generations (whole number, default 8)" in answered("fit", "--help", "data")[0]
    )
    assert "\n  mode (" in answered("fit", "--help=SortedBatching")[0]
    model = answered("validate", "--help", "model")[0]
    assert "--model.scale_rewards" in model and "Other with `--model=RLOOModule`:" in model
    assert "--model.normalize_advantages" in model.partition("RLOOModule`:")[2]
    assert "Did you mean `data`?" in answered("fit", "--help", "dat")[1]
    assert "Did you mean `VLLMEngine`?" in answered("fit", "--help", "VLLEngine")[1]
    assert answered("export", "--help", "data")[2] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.lora_rnk=8"], "no option `--model.lora_rnk`. Did you mean `--model.lora_rank`?"),
        (["--ckpt_pth", "x"], "There is no option `--ckpt_pth`. Did you mean `--ckpt_path`?"),
        (["--memory=1GiB"], "There is no option `--memory`."),
        (
            ["--trainer.callbacks+=TailBatchin"],
            "`trainer.callbacks=TailBatchin`: there is no such ",
        ),
        (
            ["--trainer.callbacks+=TailBatching", "--trainer.callbacks.completion_rato=2"],
            "`trainer.callbacks.completion_rato` of `TailBatching`. Did you mean `trainer.",
        ),
        (
            ["--trainer.callbacks=[{class_path: RNGState, init_args: {a: 1}}]"],
            "There is no setting `trainer.callbacks.a` of `RNGState`.",
        ),
        (
            ["--data.engine=VLLMEngine", "--data.engine.slots=8"],
            "`data.engine.slots` of `VLLMEngine`",
        ),
        (["--config=nowhere.yaml"], "`--config nowhere.yaml`: there is no such file."),
        (["README.md"], "`README.md` is not an option. Did you mean `--config README.md`?"),
        (["data"], "`data` is not an option."),
        (["-x", "3"], "There is no option `-x`."),
        (["--data.num_generations=lots"], "`data.num_generations=lots`: must be a whole number."),
        (["--trainer.max_epochs", "x"], "`trainer.max_epochs=x`: must be a whole number or null."),
        (["--model.learning_rate=fast"], "`model.learning_rate=fast`: must be a number."),
        (["--data.val_greedy=maybe"], "`data.val_greedy=maybe`: must be true or false."),
        (["--model.loss_type=gpro"], "`model.loss_type=gpro`: use 'grpo', 'bnpo', "),
        (["--model.loss_type=3"], "`model.loss_type=3`: use 'grpo'"),
        (["--model.scale_rewards=grop"], "Did you mean `group`?"),
        (["--trainer.precision=bf16-mixd"], "Did you mean `bf16-mixed`?"),
        (
            ["--data.engine=VLLMEngine", "--data.engine.kv_cache_gib=all"],
            "`data.engine.kv_cache_gi",
        ),
    ],
)
def test_a_mistake_is_named(monkeypatch, args: list[str], message: str) -> None:
    monkeypatch.chdir(ROOT)
    assert message in said("fit", *args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modell: {}", "There is no setting `modell` (given in `a.yaml`). Did you mean `model`?"),
        ("data: {seeed: 1}", "setting `data.seeed` (given in `a.yaml`). Did you mean `data.seed`?"),
        ("data:\n  seed: [4\n", "`a.yaml`, line 3 is not valid YAML: "),
        (
            "model: {class_path: lit_rlsched.GRPOModule, init_args: {normalize_advantage: true}}",
            "There is no setting `model.normalize_advantage` of `GRPOModule`.",
        ),
        (
            "model: {class_path: GRPOModul}",
            "`model=GRPOModul`: there is no such class. Did you mean",
        ),
        (
            "trainer: {callbacks+: [{class_path: RolloutLoger}]}",
            "`trainer.callbacks=RolloutLoger`: there is n",
        ),
        (
            "trainer: {callbacks: [RolloutLogger, {class_path: LengthPrediction, init_args: "
            "{predictor: {class_path: PromptHistory, init_args: {x: 3}}}}]}",
            "There is no setting `trainer.callbacks.predictor.x` of `PromptHistory`.",
        ),
        ("data: {max_grad_norm: 1}", "TRL's `max_grad_norm` is `model.gradient_clip_val` here."),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, monkeypatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    assert message in said("fit", "-c", "a.yaml")


NAMES = [name for row in chain(*trl_names().values()) for name in row[0].split(", ")]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_trl_is_answered(name: str) -> None:
    for option in (f"--{name}", f"--data.{name}", f"--model.{name}", f"--trainer.{name}"):
        message = said("fit", f"{option}=null")
        assert not message or f"TRL's `{name}` " in message, message
    assert said("export", f"--{name}=1") or name in ("model", "push_to_hub", "debug")


def test_names_of_trl_are_options_here() -> None:
    message = (
        "There is no option `--train_dataset`. TRL's `train_dataset` is `--data.train_data` here"
    )
    assert message in said("fit", "--train_dataset", "x.jsonl")
    assert "is `VLLMEngine.tensor_parallel_size` here." in said(
        "fit", "--vllm_tensor_parallel_size=2"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_parser_is_right(parsers, command: str) -> None:
    actions = [a for a in parsers[command]._actions if not isinstance(a, OnlyInFiles)]
    options = [option for action in actions for option in action.option_strings]
    assert len(options) >= 3
    for option in options:
        if option in ("-h", "--help", "-c", "--config") or option.endswith(".help"):
            continue
        assert not said(command, f"{option}=null"), option
        assert not said(command, *([option] if option in FLAGS else [option, "null"])), option


@pytest.mark.parametrize("text", [*BLOCKS, *(p.read_text() for p in ROOT.glob("configs/*.yaml"))])
def test_every_configuration_that_is_shown_is_right(tmp_path, text: str) -> None:
    if "command" in (yaml.safe_load(text) or {}):
        pytest.skip("a sweep of W&B")
    (tmp_path / "run.yaml").write_text(text)
    assert not said("fit", "-c", f"{tmp_path}/run.yaml")


@pytest.mark.parametrize(
    "args",
    [
        ["--model=mine.Module", "--model.anything=3"],
        ["--model=Mine", "--model.anything=3"],
        ["--data.engine=mine.Engine", "--data.engine.anything=3"],
        ["--trainer.callbacks=[mine.Callback]", "--trainer.callbacks.anything=3"],
        ["--trainer.callbacks=[{class_path: mine.Callback, init_args: {anything: {a: 1}}}]"],
        ["--data.train_data", "own.Task", "--data.train_data.anything=3"],
        ["--data.train_data=Countdow", "--trainer.strategy=fsdp3"],
        ["--data.chat_template_kwargs.enable_thinking=false", "--trainer.max_time.hours=3"],
        ["--data.engine.init_args.kv_cache_gib=3", "--data.engine.class_path=VLLMEngine"],
        ["--data.reward_funcs=[{class_path: mine.Judge, init_args: {anything: 3}}]"],
        ["--model={class_path: GRPOModule, init_args: {model: x}, dict_kwargs: {anything: 3}}"],
        ["--trainer.max_steps", "-1", "--debug", "--print_config"],
        ["--model.learning_rate=1e-6", "--data.top_p=1", "--data.seed=null", "--model.delta=.5"],
        ["--data.val_greedy=no", "--data.shuffle=True", "--model.scale_rewards=false"],
        ["--trainer.precision=16", "--trainer.precision=bf16", "--trainer.deterministic=warn"],
        ["--data.num_generations=${oc.env:N}", "--trainer.limit_val_batches=0.5"],
        ["--model.importance_sampling_mode=null", "--trainer.gradient_clip_val=1e2"],
        ["--trainer.logger=false", "--trainer.callbacks=null", "--trainer.plugins=[mine.Plugin]"],
    ],
)
def test_what_only_the_parser_can_tell_is_left_to_it(args: list[str]) -> None:
    assert not said("fit", *args)


def test_an_earlier_class_does_not_count(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: {class_path: mine.Module, init_args: {mine: 3}}")
    file = f"--config={tmp_path}/a.yaml"
    assert not said("fit", "--model=GRPOModule", file, "--model.mine=4")
    assert "`model.mine` of `GRPOModule`" in said(
        "fit", file, "--model=GRPOModule", "--model.mine=4"
    )


@pytest.mark.parametrize(
    "args", [["--model.help"], ["--data.engine.help=VLLMEngine"], ["-crun.yaml"]]
)
def test_what_the_parser_answers(args: list[str]) -> None:
    with pytest.raises(Unclear):
        said("fit", *args)
    answer(["fit", *args])
    answer(["--config", "all.yaml", "fit"])


KNOWN = sorted({name for command in COMMANDS for name, _ in Check(command).options()})


@given(st.sampled_from(KNOWN), st.data())
def test_a_letter_too_few_or_too_many_is_a_mistake(name: str, data) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    wrong = data.draw(st.sampled_from([name[:at] + name[at + 1 :], name[:at] + "q" + name[at:]]))
    if wrong not in KNOWN and "." in name and wrong.count(".") == 1:
        assert f"There is no option `--{wrong}`." in said("fit", f"--{wrong}=1")


LIGHT = """
import sys
from lit_rlsched.cli.quick import answer
for args in {calls}:
    try:
        answer(args)
    except SystemExit:
        pass
heavy = {{"torch", "transformers", "lightning", "jsonargparse", "vllm", "pyarrow", "numpy"}}
print("imported:", *sorted(heavy & sys.modules.keys()))
"""


def test_answers_import_nothing_heavy() -> None:
    calls = [
        [],
        ["fits"],
        ["--help"],
        ["fit", "--help=all"],
        ["fit", "--data.bogus=1"],
        ["fit", "x"],
    ]
    code = LIGHT.format(calls=[*calls, ["fit", "-c", "configs/quickstart.yaml", "--x=1"]])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "imported:", run.stderr
    assert run.stderr.count("error: ") == 5


def test_every_class_of_the_package_is_a_topic(answered) -> None:
    for package in (callbacks, engines):
        for name in package.__all__:
            cls = getattr(package, name)
            if issubclass(cls, RemembersInit) and cls not in (RolloutEngine,):
                out, _, code = answered("fit", "--help", name)
                assert code == 0 and out.startswith(f"{name}: "), name


def in_file(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return said("fit", "-c", str(path))


TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1) | st.lists(inner),
    max_leaves=8,
)


def places(tree: object) -> int:
    """Number of mappings in a tree that have a key."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return isinstance(tree, dict) + sum(map(places, inner))


def doubled(tree: object, place: list[int]) -> str:
    """Flow style, with the first key of one mapping written twice."""
    if isinstance(tree, list):
        return f"[{', '.join(doubled(one, place) for one in tree)}]"
    if not isinstance(tree, dict):
        return str(tree)
    place[0] -= 1
    again = place[0] == -1
    pairs = [f"{key}: {doubled(value, place)}" for key, value in tree.items()]
    return f"{{{', '.join([*pairs, f'{next(iter(tree))}: 0'] if again else pairs)}}}"


@given(tree=TREES.filter(places), data=st.data())
def test_a_key_that_stands_twice_is_refused_at_any_depth(tree: object, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, places(tree) - 1))
    yaml.load(doubled(tree, [-9]), Loader=UniqueKeys)
    with pytest.raises(KeyTwice, match="stands in line 1 already") as error:
        yaml.load(doubled(tree, [place]), Loader=UniqueKeys)
    assert error.value.problem_mark.line == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  slots: 1\n  slots: 1\n", "line 3 .*`slots` stands in line 2 already"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n", "holds a list"),
        ("x", "holds a single value"),
        ("trainer: 5\n", "`trainer=5`: must hold settings by name"),
        ("a: \x01\n", "cannot be read as YAML"),
        (b"\xff\xfe", "cannot be read as YAML"),
        ("a: " + "[" * 600, "cannot be read as YAML"),
        ("trainer:\n  max_epochs: 1e3\n", r"`trainer.max_epochs=1e3`: .*whole number.*`1000`"),
    ],
    ids=range(10),
)
def test_what_is_no_configuration(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert re.search(message, in_file(tmp_path / "run.yaml", text))


def test_a_key_may_be_given_over_that_of_an_anchor(tmp_path: Path) -> None:
    text = "trainer: &a {max_epochs: 1}\ndata:\n  <<: *a\n  max_epochs: 2\n"
    assert "There is no setting `data.max_epochs`" in in_file(tmp_path / "run.yaml", text)
