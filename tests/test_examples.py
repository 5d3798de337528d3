"""The examples run, and say what is true."""

import difflib
import inspect
import json
import random
import re
import shlex
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from lightning import Trainer
from seen_rounds import Rounds
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from examples import drop_in, grpo_loop
from examples.lookup.lookup import LETTERS, Lookup, Registry, right
from examples.lookup.warm_start import demonstration, make_tokenizer
from examples.own_callback import PatternShare
from examples.own_engine import PlainEngine
from examples.own_predictor import MeanOfSize, PrintCalibration
from examples.own_task import MakeTen, can_make_ten, makes_ten
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import LengthPrediction, MicroGroupSampling
from lit_rlsched.cli.main import main
from lit_rlsched.data import Countdown
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.environments.chat import ToolChat
from lit_rlsched.rewards import countdown_reward

ROOT = Path(__file__).parents[1]
README = (ROOT / "examples/README.md").read_text()
COMMANDS = re.findall(r"`(lit-rlsched .*?|python .*?)`", README)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # what the CLI sets is unset after the test


def test_every_example_is_listed_with_its_command():
    examples = [path for path in ROOT.glob("examples/**/*.py") if path.name != "__init__.py"]
    for path in examples:
        name = str(path.relative_to(ROOT))
        assert f"]({path.relative_to(ROOT / 'examples')})" in README, name
        said = path.read_text().replace(" \\\n       ", "")
        assert any(command in said for command in COMMANDS if Path(name).stem in command), name
    assert len(COMMANDS) == len(examples) + 1  # and a config


@pytest.mark.parametrize("command", [c for c in COMMANDS if "quickstart" in c])
def test_commands_parse(command, capsys):  # the others are run below and in test_cli.py
    with pytest.raises(SystemExit) as stop:
        main([*shlex.split(command)[1:], "--print_config=skip_default"])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"].endswith("GRPOModule")


@pytest.mark.slow
def test_the_loop_is_short_and_learns(capsys):
    source = inspect.getsource(grpo_loop)
    assert len(source.splitlines()) <= 100
    places = re.findall(r"^from (lit_rlsched\S*) import", source, re.MULTILINE)
    assert len(places) <= 6 and all(place.count(".") <= 1 for place in places), places
    grpo_loop.main(["--engine=transformers", "--rounds=12", "--prompts=8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"round {i}" for i in range(12)]
    rewards = [float(line.rpartition(" ")[2]) for line in lines]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1


def test_the_loop_does_what_fit_does(tmp_path, capsys):
    sizes = {"prompts": 2, "generations": 4}
    given = [f"--{name}={size}" for name, size in sizes.items()]
    policy = grpo_loop.main(["--engine=transformers", "--rounds=2", *given])
    printed = capsys.readouterr().out.splitlines()
    module = GRPOModule("examples/countdown/model", learning_rate=3e-4, betas=(0.9, 0.95))
    data = RolloutDataModule(
        *(Countdown(size=1000), [countdown_reward]),
        engine=TransformersEngine(),
        **{"prompts_per_round": 2, "num_generations": 4, "micro_batch_tokens": 4096},
        seed=0,
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, datamodule=data)
    rewards = [row["reward"] for row in data.run.record.rounds]
    assert printed == [f"round {i}: reward {reward:.3f}" for i, reward in enumerate(rewards)]
    ours = dict(module.model.named_parameters())
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter, ours[name], atol=1e-5, rtol=0)


def test_a_foreign_module_changes_in_few_lines():
    said = re.search(r"(\d+) of its lines are replaced by (\d+)", drop_in.__doc__)
    changes = []
    for name in ("training_step", "validation_step"):
        before, after = (
            re.sub(r'""".*?"""', "", inspect.getsource(getattr(of, name)))
            for of in (drop_in.Supervised, drop_in.Policy)
        )
        changes += difflib.ndiff(before.splitlines(), after.splitlines())
    counted = [sum(line.startswith(sign) for line in changes) for sign in "-+"]
    assert counted == [int(number) for number in said.groups()]
    ours = {n for n in vars(drop_in.Policy) if not n.startswith("_")}
    assert ours == {"training_step", "validation_step"}


@pytest.mark.logs("val/loss")
def test_the_foreign_module_trains_without_rollouts_too(tiny_model, tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    ids = torch.arange(4, 24)[None]
    batches = DataLoader([{"input_ids": ids, "labels": ids}] * 4, batch_size=None)
    module = drop_in.Supervised(tiny_model)
    before = module.lm(input_ids=ids, labels=ids).loss
    trainer.fit(module, batches, batches)
    assert trainer.callback_metrics["val/loss"] < before


def test_the_batch_has_what_its_loss_needs(fit, tiny_model):
    trainer, _, _ = fit(drop_in.Policy(tiny_model), temperature=0.7, trainer={"max_epochs": 1})
    assert trainer.callback_metrics["sampling/sampling_logp_difference/max"] < 1e-4
    with pytest.warns(UserWarning, match="importance sampling is off"):
        trainer, _, _ = fit(drop_in.Policy(tiny_model), top_p=0.5, trainer={"max_epochs": 1})
    assert not any(name.startswith("sampling/") for name in trainer.callback_metrics)


@pytest.mark.slow
def test_drop_in(capsys):
    drop_in.main(["--rounds", "1", "--engine", "transformers"])
    line = capsys.readouterr().out.splitlines()[-1]
    pattern = r"drop_in: reward ([\d.]+), held-out accuracy ([\d.]+) after 1 optimizer steps"
    reward, accuracy = map(float, re.fullmatch(pattern, line).groups())
    assert 0.2 < reward < 0.6 and 0.2 < accuracy < 0.6


def test_the_rows_of_the_own_task():
    train, heldout = (
        [tuple(row["digits"]) for row in MakeTen(split).rows()] for split in ("train", "heldout")
    )
    assert not {*train} & {*heldout} and len(train) == 136 and len(heldout) == 34
    assert can_make_ten((9, 2, 1)) and (1, 1, 2) not in train + heldout


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<answer>9+2-1</answer>", 1.0),
        ("2+9=11-1=10 10 y\n<answer>2+9-1</answer>", 1.0),
        ("<answer>9+1</answer>", 0.0),
        ("<answer>9+2+1</answer>", 0.0),
        ("<answer>9-1+2", 0.0),
        ("<answer>9+2-1+5-5</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "9+" * 100_000, 0.0),
    ],
)
def test_the_reward_of_the_own_task(answer, score):
    assert makes_ten([[{"role": "assistant", "content": answer}]], [[1, 2, 9]]) == [score]


@pytest.mark.slow
def test_the_own_task_trains(tmp_path, capsys):
    small = "data.engine=TransformersEngine data.prompts_per_round=4 trainer.max_epochs=1"
    small += " trainer.limit_val_batches=0 trainer.accelerator=cpu"
    small += f" trainer.default_root_dir={tmp_path}/run"
    main(["fit", "-c", "examples/own_task.yaml", *(f"--{option}" for option in small.split())])
    assert "1 round, 32 completions" in capsys.readouterr().out


def test_lookup_cannot_be_solved_without_its_tool():
    train, heldout = (Lookup(split).rows() for split in ("train", "heldout"))
    chains = [tuple(row["chain"]) for row in train]
    prompts = [row["prompt"][0]["content"] for row in train]
    assert len({row["prompt"][0]["content"] for row in heldout}.union(prompts)) == 4000
    assert {*map(len, chains)} == {1, 2, 3, 4}
    assert {prompt[-1] for prompt in prompts} == {chain[0] for chain in chains} == {*LETTERS}
    row, registry = next(row for row in train if len(row["chain"]) == 4), Registry()
    registry.reset(**row)
    assert [registry.get(key) for key in row["chain"]] == [*row["chain"][1:], row["answer"]]
    assert registry.get("9") == "none"
    told = {"role": "tool", "content": row["answer"]}
    said = {"role": "assistant", "content": row["answer"]}
    assert right([[told, said], [said, told, {**said, "content": "x"}]], [row["answer"]] * 2) == [
        1.0,
        0.0,
    ]


def test_the_model_of_lookup_is_that_of_its_script():
    """And its template has tools, which are read as they are written."""
    made, kept = make_tokenizer(), AutoTokenizer.from_pretrained("examples/lookup/model")
    rng = random.Random(0)
    for _ in range(20):
        chat = demonstration(rng)
        ids = kept.apply_chat_template(chat, return_dict=False)
        assert ids == made.apply_chat_template(chat, return_dict=False)
        tools = ToolChat(kept, None, [kept.eos_token_id])
        for i, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before, upto = (
                kept.apply_chat_template(chat[:n], return_dict=False, add_generation_prompt=n == i)
                for n in (i, i + 1)
            )
            parsed, calls = tools.calls(before, upto[len(before) :], ())
            wanted = [call["function"] for call in message.get("tool_calls", ())]
            assert [call._asdict() for call in calls] == wanted
            assert parsed["content"] == message["content"]


@pytest.mark.slow
def test_lookup_is_learned(tmp_path, capsys):
    """Greedily, on chains that it has not seen: nothing before, nearly all after 12 rounds."""
    small = f"data.engine=TransformersEngine trainer.default_root_dir={tmp_path}/run"
    small += " trainer.max_epochs=12 trainer.check_val_every_n_epoch=12"
    main(["fit", "-c", "configs/lookup.yaml", *(f"--{option}" for option in small.split())])
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"accuracy ([0-9.]+) -> ([0-9.]+) of", said)[0])
    assert before < 0.1 and after >= 0.95
    rows = Path(tmp_path, "run/completions.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert {m["role"] for m in rows[-1]["completion"]} == {"assistant", "tool"}


@pytest.mark.logs("completions/pattern_share")
def test_own_callback(fit):
    rounds = Rounds()
    trainer, _, _ = fit(callbacks=[rounds, PatternShare("[0-9]")], trainer={"max_epochs": 1})
    (round,) = rounds.rounds
    starts = [c.text[:1] in tuple("0123456789") for c in round.completions]
    assert 0 < sum(starts) < len(starts)
    assert trainer.callback_metrics["completions/pattern_share"] == pytest.approx(fmean(starts))
    with pytest.raises(ValueError, match=r"`PatternShare\(pattern='\('\)` is not"):
        PatternShare("(")


@pytest.mark.slow
def test_own_engine(fit):
    """It passes the check after a weight sync, and draws what TransformersEngine draws."""
    ours, theirs = Rounds(), Rounds()
    fit(callbacks=[ours, MicroGroupSampling(slots=3)], engine=PlainEngine())
    fit(callbacks=[theirs])
    for a, b in zip(ours.rounds, theirs.rounds, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]


def test_own_predictor(fit, sums, capsys):
    rows = [row | {"size": len(row["answer"])} for row in sums]
    predictor, rounds = MeanOfSize(first_guess=8), Rounds()
    slots = MicroGroupSampling(slots=3, order="longest_first")
    prediction = LengthPrediction(predictor, probe_tokens=0)
    fit(callbacks=[slots, prediction, PrintCalibration(), rounds], train_data=rows)
    printed = capsys.readouterr().out.splitlines()
    line = r"round \d: error \d+ tokens \(history \d+\), rank correlation -?\d\.\d\d \(history .*\)"
    assert len([text for text in printed if re.fullmatch(line, text)]) == 2
    lengths = {1: [], 2: []}
    for round in rounds.rounds:
        for sample in round.samples:
            lengths[sample.group.prompt.columns["size"]].append(len(sample.completion.token_ids))
    assert predictor.totals == {size: [len(n), sum(n)] for size, n in lengths.items()}
