import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lit_rlsched.callbacks import (
    MicroGroupSampling,
    RolloutLogger,
    SortedBatching,
)
from lit_rlsched.cli import summary as cli_summary
from lit_rlsched.cli.main import main
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.pool import EnginePool

ROOT = Path(__file__).parents[1]
CONFIGS = sorted({*(ROOT / "configs").glob("**/*.yaml")} - {ROOT / "configs/sweep.yaml"})


def printed(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main([*args, "--print_config=skip_default"])
    output = capsys.readouterr()
    assert stop.value.code == 0, output.err
    return yaml.safe_load(output.out)


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # what the CLI sets is unset after the test


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_parses(path, capsys):
    overlay = "class_path" not in yaml.safe_load(path.read_text()).get("model", {})
    base = ["-c", "configs/quickstart.yaml"] if overlay else []
    config = printed(capsys, "fit", *base, "-c", str(path))
    assert config["model"]["class_path"].startswith("lit_rlsched.")
    for line in path.read_text().splitlines()[:1]:
        assert line.startswith("# "), "a config says in its first line what it is"


@pytest.mark.slow
def test_the_config_for_gsm8k_trains_on_its_rows(tmp_path, monkeypatch, capsys):
    """With a small model in place of Qwen3 and two rows in place of the hub's, on a CPU."""
    import datasets

    solution = "She sold 48/2 = <<48/2=24>>24 for $2.\n#### 24"
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        questions = [f"{split}: how many of {n}?" for n in (48, 50)]
        return datasets.Dataset.from_list([{"question": q, "answer": solution} for q in questions])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    small = "data.engine=TransformersEngine data.prompts_per_round=2 data.num_generations=2"
    small += " data.max_completion_length=16 trainer.max_epochs=1 trainer.accelerator=cpu"
    small += f" model.model=examples/countdown/model trainer.default_root_dir={tmp_path}"
    main(["fit", "-c", "configs/qwen3_gsm8k.yaml", *(f"--{option}" for option in small.split())])
    assert asked == [("openai/gsm8k", "main", split) for split in ("train", "test[:256]")]
    assert "1 round, 4 completions" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").open()]
    assert len(rows) == 4
    assert all("Put the final number into" in row["prompt"][-1]["content"] for row in rows)
    assert {row["math_verify_reward"] for row in rows} <= {0.0, 1.0}  # None: a gold is unreadable


def test_what_is_printed_parses_again(capsys, tmp_path):
    config = printed(capsys, "fit", "-c", "configs/quickstart.yaml")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config))
    assert printed(capsys, "fit", "-c", str(tmp_path / "again.yaml")) == config
    assert config["data"]["val_data"]["init_args"]["size"] == 128


@pytest.mark.slow
def test_every_command_takes_the_configuration_that_a_run_wrote(capsys, tmp_path):
    """Also one of another command, and one with a setting of `fit` alone."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    more = f"--trainer.default_root_dir={tmp_path / 'run'}", f"--data.predict_data={rows}"
    main([*SMALL, *more])
    written = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(written.read_text())
    assert config["ckpt_path"] is None and "memory" not in config and "verbose" not in config
    capsys.readouterr()
    for command in ("validate", "test", "predict", "estimate"):
        again = (
            [] if command == "estimate" else [f"--trainer.default_root_dir={tmp_path / command}"]
        )
        main([command, "-c", str(written), *again])
        assert capsys.readouterr().out
    with_settings = {"ckpt_path": "last", "verbose": False, "memory": "1GiB"}
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump({**config, **with_settings}))
    for written in (both, tmp_path / "validate" / "config.yaml"):
        for command in ("validate", "estimate", "predict"):
            assert "data" in printed(capsys, command, "-c", str(written))
    said = refused(capsys, "estimate", "-c", str(both), "--ckpt_path=last")
    assert "There is no option `--ckpt_path`." in said


@pytest.mark.slow
def test_a_module_of_ones_own_starts_from_the_command_line(capsys, tmp_path):
    """`examples/drop_in.py`, by an option and by a class path in a file."""
    model = {"class_path": "examples.drop_in.Policy"}
    overlay = tmp_path / "own.yaml"
    overlay.write_text(
        yaml.safe_dump({"model": {**model, "init_args": {"model": "examples/countdown/model"}}})
    )
    data = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({name: data[name] for name in ("data", "trainer")}))
    by_option = "--model=examples.drop_in.Policy", "--model.model=examples/countdown/model"
    for name, given in (("file", ("-c", str(overlay))), ("option", by_option)):
        folder = f"--trainer.default_root_dir={tmp_path / name}"
        main(["fit", "-c", str(base), *given, *SMALL[3:], folder])
        assert "1 round, 4 completions" in capsys.readouterr().out
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert config["model"]["class_path"] == "examples.drop_in.Policy"
    said = refused(capsys, "estimate", "-c", str(base), *by_option)
    assert "`model=Policy`: the passes of your own module are not known" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--model=examples.drop_in.Polcy"],
            "`model=examples.drop_in.Polcy`: module 'examples.drop_in' has no attribute 'Polcy'. "
            "Did you mean `examples.drop_in.Policy`?",
        ),
        (["--model=nowhere.Policy"], "`model=nowhere.Policy`: No module named 'nowhere'."),
        (["--model=torch.nn.Linear"], "`model=torch.nn.Linear`: must be a subclass of `Lightning"),
        (["--model=examples.drop_in.main"], "must be a subclass of `LightningModule`."),
        (["--model=examples.drop_in.Policy"], "`model.model` must be given: in a file"),
        (["--model=GRPOModule"], "`model.model` must be given: in a file"),
        (["--model.learning_rate=1"], "`model.learning_rate`: no class is named. Add it in front"),
        (
            ["--model=examples.drop_in.Policy", "--model.model=.", "--model.rate=1"],
            "There is no setting `model.rate` of `Policy`.",
        ),
    ],
)
def test_what_is_wrong_with_a_module_is_one_sentence(capsys, tmp_path, given, said):
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({name: config[name] for name in ("data", "trainer")}))
    error = refused(capsys, "fit", "-c", str(base), *given)
    assert said in error and "Union" not in error


def test_one_device_by_default(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "-c", "configs/quickstart.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["devices"] == 1


def test_short_names_and_flags(capsys):
    config = printed(
        capsys,
        "fit",
        "-c",
        "configs/quickstart.yaml",
        "--data.engine=TransformersEngine",
        "--model.loss_type=grpo",
        "--trainer.callbacks+=MicroGroupSampling",
        "--trainer.callbacks.slots=64",
    )
    assert config["data"]["engine"]["class_path"] == "lit_rlsched.engines.TransformersEngine"
    assert config["model"]["init_args"]["loss_type"] == "grpo"
    assert config["trainer"]["callbacks"][-1]["init_args"]["slots"] == 64


@pytest.fixture
def estimated(capsys):
    def estimated(*args):
        base = ["estimate", "-c", "configs/quickstart.yaml", "--data.engine=TransformersEngine"]
        main([*base, "--data.train_data.size=40", *args])
        return capsys.readouterr().out

    return estimated


@pytest.mark.slow
def test_what_a_run_will_hold(estimated, tmp_path):
    said = estimated("--memory=24GiB", f"--trainer.default_root_dir={tmp_path}/run")
    assert said.startswith("in main memory") and "of 24.00 GiB" in said
    for item in ("weights", "optimizer state", "key-value cache", "activations"):
        assert f"\n{item} " in said
    assert "The run fits: the update needs the most and leaves 23." in said
    assert not list(tmp_path.iterdir()), "nothing is run, so nothing is written"


@pytest.mark.slow
def test_a_gpu_run_is_estimated_without_one(estimated):
    overlay = "--data.engine=VLLMEngine"
    said = estimated(overlay, "--trainer.accelerator=gpu", "--memory=8GB")
    assert said.startswith("in GPU memory") and "vLLM sleeps in the update" in said


@pytest.mark.slow
def test_the_command_is_installed():
    command = Path(sys.executable).with_name("lit-rlsched")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=120)
    assert "usage: lit-rlsched" in shown.stdout


def test_a_run_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "short"
    small = f"""
data:
  train_data: {{class_path: Countdown, init_args: {{split: train, size: 16}}}}
  val_data: {{class_path: Countdown, init_args: {{split: heldout, size: 4}}}}
  engine: TransformersEngine
  prompts_per_round: 4
  max_completion_length: 64
trainer:
  max_epochs: 2
  check_val_every_n_epoch: 1
  default_root_dir: {folder}
  logger:
    - class_path: CSVLogger
      init_args: {{save_dir: {folder}, name: metrics}}
    - class_path: WandbLogger
      init_args: {{save_dir: {folder}, offline: true}}
  callbacks:
    - class_path: RolloutLogger
    - class_path: ModelCheckpoint
      init_args: {{dirpath: {folder}/checkpoints, save_last: true, monitor: val/accuracy}}
"""
    (tmp_path / "small.yaml").write_text(small)
    main(["fit", "-c", "configs/quickstart.yaml", "-c", str(tmp_path / "small.yaml")])
    out = capsys.readouterr().out
    assert (
        """short
  model     examples/countdown/model, 0.45 M parameters, precision 32-true; GRPOModule with
            loss_type dapo
  data      Countdown, 16 prompts to train on, 4 held out
  round     4 prompts x 8 completions of at most 64 tokens, then 1 optimizer step
  run       2 rounds, 2 optimizer steps; validated after every round
  engine    TransformersEngine, decodes up to 32 completions at once
  schedule  every completion is decoded to its end, then the round is trained on
"""
        in out
    )
    said = re.sub(r"\s+", " ", out)
    assert (
        f" output {folder}: config.yaml, checkpoints, completions and report, metrics by "
        "CSVLogger and WandbLogger before training: "
    ) in said
    for number in (1, 2):
        found = re.search(rf"^round {number}/2: reward .*, held-out accuracy .* cut, .*", out, re.M)
        assert found, out
    accuracy = r"held-out accuracy [\d.]+ -> [\d.]+ as the mean of 4 samples at temperature 1, "
    accuracy += r"[\d.]+ -> [\d.]+ of greedy decoding"
    line = rf"short: {accuracy} \(2 rounds, 64 completions, \d+ s\); report and metrics in \S+"
    *_, result, following, report, validate, predict, export, resume = out.splitlines()
    assert re.fullmatch(line, result) and following == "Next:", out
    assert report == f"  python -m webbrowser -t file://{folder}/report.html"
    run = f"-c {folder}/config.yaml --ckpt_path {folder}/checkpoints/"
    assert validate.startswith(f"  lit-rlsched validate {run}") and run in predict
    assert export.startswith(f"  lit-rlsched export --ckpt_path {folder}/checkpoints/")
    assert export.endswith(" --out my-model") and resume.startswith(f"  lit-rlsched fit {run}")
    assert resume.endswith(" --trainer.max_epochs=4")
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    for name in ("report.html", "checkpoints/last.ckpt"):
        assert (folder / name).stat().st_size > 1000
    assert len((folder / "completions.jsonl").read_text().splitlines()) == 32
    with (folder / "metrics/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["step"] for r in rows if r["val/accuracy"]] == ["0", "1", "2"]  # baseline, then each
    assert {"reward", "loss", "rollout/bubble_ratio", "batch/pad_frac"} <= rows[0].keys()
    (wandb,) = (folder / "wandb").glob("offline-run-*")
    assert list(wandb.glob("files/media/table/completions*.json"))
    assert list(wandb.glob("files/media/html/report*.html"))
    main(validate.split()[1:])
    assert "val/accuracy" in capsys.readouterr().out


SMALL = [
    *("fit", "-c", "configs/quickstart.yaml", "--data.engine=TransformersEngine"),
    *("--data.train_data.size=16", "--data.val_data.size=4", "--data.prompts_per_round=2"),
    *("--data.num_generations=2", "--data.max_completion_length=16", "--trainer.logger=false"),
    *("--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"),
]


@pytest.mark.slow
def test_a_schedule_is_told_in_words(tmp_path, capsys):
    callbacks = [
        *("--trainer.callbacks+=MicroGroupSampling", "--trainer.callbacks.slots=2"),
        *("--trainer.callbacks+=TailBatching", "--trainer.callbacks.prompt_ratio=1.5"),
    ]
    main([*SMALL, *callbacks, f"--trainer.default_root_dir={tmp_path}/run"])
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "engine TransformersEngine, decodes up to 2 completions at once" in said
    assert "MicroGroupSampling(slots=2): Decode at most slots completions at once" in said
    assert "TailBatching(prompt_ratio=1.5): " in said


def test_nothing_is_told_without_a_progress_bar(tmp_path, capsys):
    quiet = "--trainer.enable_progress_bar=false"
    main([*SMALL, quiet, f"--trainer.default_root_dir={tmp_path}/run"])
    out = capsys.readouterr().out
    assert "parameters" not in out and "round 1" not in out and "Next" not in out
    assert out.splitlines()[-1].startswith("run: ")


@pytest.mark.slow
def test_what_is_told_at_the_end_goes_on_with_the_run(tmp_path, capsys):
    folder = tmp_path / "run"
    main([*SMALL, f"--trainer.default_root_dir={folder}"])
    resume = capsys.readouterr().out.splitlines()[-1]
    main(resume.split()[1:])
    out = capsys.readouterr().out
    assert (
        "  run       2 rounds, 2 optimizer steps; validated after every round; 1 round already"
        in out
    )
    assert re.search(r"^round 2/2: ", out, re.M) and " (2 rounds, 8 completions" in out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_schedule_is_told_with_what_was_chosen():
    callbacks = [MicroGroupSampling(slots=4), RolloutLogger(every_n_rounds=2), SortedBatching()]
    assert cli_summary._schedule(SimpleNamespace(callbacks=callbacks)).splitlines() == [
        "MicroGroupSampling(slots=4): Decode at most slots completions at once, whatever "
        "num_generations is.",
        "SortedBatching(): Train as soon as an update's worth of completions is ready, short ones "
        "first.",
    ]
    assert "decoded to its end" in cli_summary._schedule(SimpleNamespace(callbacks=[]))


def test_the_number_of_engines_is_told():
    session = SimpleNamespace(spec=SimpleNamespace(slots=12))
    settings = SimpleNamespace(engine=EnginePool.of(TransformersEngine(), 3))
    run = SimpleNamespace(settings=settings, session=session)
    told = "3 engines (ProcessEngine of TransformersEngine), which decode up to 12 completions"
    assert cli_summary._engine(run) == f"{told} at once"
