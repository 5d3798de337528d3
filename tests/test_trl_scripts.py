"""A script of TRL runs here with other imports, with the same batches and the same settings."""

import re
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
import trl
from datasets import DatasetDict
from golden_trl import Dataset
from lightning.pytorch.callbacks import LambdaCallback
from peft import LoraConfig
from tool_families import small_model, tokenizer_of
from transformers import AutoModelForCausalLM, HfArgumentParser, SchedulerType
from transformers.trainer_callback import ProgressCallback, TrainerState
from trl.experimental import async_grpo
from trl.trainer.utils import RepeatSampler
from trl_worlds import Words

from lit_rlsched import trl as ours
from lit_rlsched.callbacks import AsyncRollout, RoundCheckpoint
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.saving import export
from lit_rlsched.run.trl_config import by_our_names
from lit_rlsched.settings import UsageError, trl_names

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorials/from_trl.md").read_text()
COUNTDOWN = str(ROOT / "examples/countdown/model")
CONFIGS = (ours.GRPOConfig, ours.RLOOConfig)
TRAINERS = (ours.GRPOTrainer, ours.RLOOTrainer)
ASYNC = (ours.AsyncGRPOConfig, ours.AsyncGRPOTrainer)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 6},
        {"generation_batch_size": 32},
        {"generation_batch_size": 64, "gradient_accumulation_steps": 4, "num_iterations": 2},
    ],
)
def test_a_rollout_and_a_step_have_as_many_completions_as_in_trl(given, tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_steps": 3}
    theirs = trl.GRPOConfig(**common, **given)
    trainer = ours.GRPOTrainer(
        COUNTDOWN, lambda **_: [0.0], ours.GRPOConfig(**common, **given), [{"prompt": "1"}] * 99
    )
    settings = trainer.datamodule.run.settings
    drawn = settings.prompts_per_round * settings.num_generations
    assert drawn == theirs.generation_batch_size
    a_step = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert drawn / settings.steps_per_round == a_step
    assert settings.num_iterations == theirs.num_iterations and trainer.trainer.max_steps == 3


def defaults(config):
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(config)
    }


@pytest.mark.parametrize("config", [*CONFIGS, ASYNC[0]])
def test_every_setting_of_trl_is_a_field_whose_default_changes_nothing(config, recwarn):
    of_trl = getattr(trl, config.__name__, async_grpo.AsyncGRPOConfig)
    theirs = defaults(of_trl)
    assert defaults(config) == theirs
    assert vars(config()) == vars(config(**theirs)) == {**theirs, "output_dir": "trainer_output"}
    assert not [one for one in recwarn if "without effect" in str(one.message)]
    derived = vars(of_trl(use_cpu=True, bf16=False))
    if config is ASYNC[0]:
        del theirs["accelerator_config"]  # TRL sets entries of its own
    for setting in theirs:
        setattr(config(), setting, derived[setting])


@pytest.mark.parametrize("kind", [trl.TrlParser, HfArgumentParser])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_parsers_of_scripts_know_the_settings(kind, config, tmp_path):
    """As TRL's own config, which the same command line and file give the same values."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "learning_rate: 1e-5\nreward_weights: [1.0, 0.5]\nlr_scheduler_type: cosine\n"
        "chat_template_kwargs: {enable_thinking: false}\nnum_generations: 4\n"
        "model_name_or_path: org/model\ndataset_name: org/rows\n"
    )
    line = (
        f"--output_dir {tmp_path} --max_steps 7 --warmup-steps 0.1 --use_cpu --bf16 false "
        "--no_gradient_checkpointing --min_p 0.1 --seed 3 --report_to none --eval_strategy steps"
    ).split()
    if kind is trl.TrlParser:
        line += ["--config", str(file)]
    else:
        line += ["--learning_rate", "1e-5", "--reward_weights", "1.0", "0.5"]
        line += ["--lr_scheduler_type", "cosine", "--num_generations", "4"]
        line += ["--chat_template_kwargs", '{"enable_thinking": false}']
    parsed = []
    for one in (config, getattr(trl, config.__name__)):
        parser = kind((trl.ScriptArguments, one, trl.ModelConfig))
        parse = getattr(parser, "parse_args_and_config", parser.parse_args_into_dataclasses)
        _, args, _ = parse([*line])
        parsed.append(args)
    mine, theirs = parsed
    asked = ("output_dir", "learning_rate", "reward_weights", "lr_scheduler_type", "max_steps")
    asked += ("chat_template_kwargs", "num_generations", "warmup_steps", "use_cpu", "bf16")
    asked += ("gradient_checkpointing", "min_p", "seed", "eval_strategy")
    for name in asked:
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.chat_template_kwargs == {"enable_thinking": False} and mine.warmup_steps == 0.1
    with pytest.raises(UsageError, match=r"adam_epsilon=0.1\).*override `configure_optimizers`"):
        kind((config,)).parse_args_into_dataclasses(["--adam_epsilon", "0.1"])


@pytest.mark.parametrize(("config", "trainer"), [*zip(CONFIGS, TRAINERS, strict=True), ASYNC])
def test_each_setting_reaches_what_it_is_for(config, trainer, tmp_path):
    given = {
        "learning_rate": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.25,
        "max_grad_norm": 2.0,
        "gradient_checkpointing": False,
        "beta": 0.125,
        "epsilon": 0.3,
        "epsilon_high": 0.4,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 33,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "reward_weights": [2.0],
        "mask_truncated_completions": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "shuffle_dataset": False,
        "seed": 7,
    }
    trainers = {"logging_steps": 0.5, "full_determinism": "warn", "save_total_limit": 5}
    others = {"min_p": 0.1, "num_generations_eval": 3, **trainers}
    more = {"loss_type": "grpo", "delta": 1.5, "scale_rewards": "none"}
    if config is ours.RLOOConfig:
        more = {"normalize_advantages": True}
    if config is ASYNC[0]:
        given = {name: given[name] for name in defaults(config) if name in given}
        more = {"token_budget": 4096, "weight_sync_steps": 2, "max_tool_calling_iterations": 3}
        others = {"min_p": 0.1, "max_staleness": 5, "max_inflight_tasks": 19, **trainers}
    args = config(str(tmp_path), use_cpu=True, bf16=False, max_steps=6, adam_beta2=0.5)
    for name, value in {**given, **more, **others}.items():
        setattr(args, name, value)
    made = trainer(COUNTDOWN, lambda **_: [0.0], args, [{"prompt": "1"}] * 9, tool_timeout=3.0)
    found = {**made.datamodule.hparams, **made.module.hparams}
    renamed = {"max_grad_norm": "gradient_clip_val", "shuffle_dataset": "shuffle"}
    renamed |= {"token_budget": "micro_batch_tokens", "weight_sync_steps": "steps_per_round"}
    for name, value in {**given, **more}.items():
        assert found[renamed.get(name, name)] == value, name
    passed_on = {name for owner in ("data", "model") for name in by_our_names(args, owner)}
    elsewhere = {"min_p", "val_num_generations", "prompts_per_round", "steps_per_round"}
    elsewhere |= {"importance_sampling_clip_max", "max_tool_calling_iterations"}
    assert passed_on - elsewhere <= {renamed.get(name, name) for name in (*given, *more)}
    assert found["betas"] == (0.9, 0.5) and found["importance_sampling_mode"] is None
    assert found["val_num_generations"] == others.get("num_generations_eval", 0)
    assert found["min_p"] == 0.1 and found["tool_timeout"] == 3.0
    assert made.trainer.max_steps == 6 and made.trainer.precision == "32-true"
    assert made.trainer.log_every_n_steps == 3
    (saves,) = (c for c in made.trainer.callbacks if isinstance(c, RoundCheckpoint))
    assert saves.keep == 5
    if config is ASYNC[0]:
        (rollout,) = (c for c in made.trainer.callbacks if isinstance(c, AsyncRollout))
        assert (rollout.max_staleness, rollout.prompts_in_flight) == (5, 4)
        assert not found["shuffle"] and found["prompts_per_round"] == 4


@pytest.mark.parametrize("warmup", [0, 0.1, 0.26, 0.999, 1, 1.0, 2.5, 3])
@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_a_warmup_is_as_in_transformers(kind, warmup, tmp_path):
    given = {"lr_scheduler_type": SchedulerType(kind), "warmup_steps": warmup, "use_cpu": True}
    args = ours.GRPOConfig(str(tmp_path), max_steps=7, **given)
    made = ours.GRPOTrainer(COUNTDOWN, len, args, [{"prompt": "1"}] * 9).module.hparams
    theirs = trl.GRPOConfig(str(tmp_path), bf16=False, **given).get_warmup_steps(7)
    assert made.warmup_steps == (0 if kind == "constant" else theirs)
    assert made.lr_scheduler_type == kind.removesuffix("_with_warmup")


def test_every_setting_of_trl_is_used_or_answered():
    every = {name for config in (*CONFIGS, ASYNC[0]) for name in defaults(config)}
    for config, name in product((*CONFIGS, ASYNC[0]), every):
        try:
            config(**{name: 1})
            assert name in defaults(config)
        except UsageError as error:
            assert f"TRL's `{name}`" in str(error)
    known = {name for rows in trl_names().values() for row in rows for name in row[0].split(", ")}
    assert every <= known
    with pytest.raises(UsageError, match="Did you mean `learning_rate`"):
        ours.GRPOConfig(learning_rat=1)
    args = ours.GRPOConfig(optim="adamw_torch", push_to_hub=False, model_init_kwargs=None)
    with pytest.raises(UsageError, match="always on"):
        args.use_bias_correction_kl = False
    with pytest.raises(UsageError, match="AdamW only"):
        args.optim = "adafactor"
    with pytest.warns(UserWarning, match="`torch_compile` is without effect here"):
        args.torch_compile = True


def test_a_script_may_add_settings_of_its_own():
    @dataclass
    class Mine(ours.GRPOConfig):
        benchmarks: list[str] = field(default_factory=list)

        def __post_init__(self):
            super().__post_init__()
            self.benchmarks.append("all")

    (args,) = trl.TrlParser((Mine,)).parse_args_and_config(["--benchmarks", "one", "--seed", "3"])
    assert (args.benchmarks, args.seed, args.output_dir) == (["one", "all"], 3, "trainer_output")
    with pytest.raises(UsageError, match=r"`Mine\(adam_epsilon=1.0\)`"):
        Mine(adam_epsilon=1.0)


def test_entries_of_a_setting_are_used_or_answered():
    """What TRL's scripts make of `ModelConfig()`, and what would be another model."""
    plain = {"revision": "main", "trust_remote_code": False, "attn_implementation": None}
    args = ours.GRPOConfig(model_init_kwargs={**plain, "dtype": torch.float32})
    args.model_init_kwargs = {**plain, "dtype": "float32"}
    args.accelerator_config = trl.GRPOConfig(use_cpu=True, bf16=False).accelerator_config
    with pytest.raises(UsageError, match=r"model_init_kwargs={'dtype': torch.bfloat16}.*`bf16`"):
        args.model_init_kwargs = {**plain, "dtype": torch.bfloat16}
    with pytest.raises(UsageError, match="'split_batches': True"):
        args.accelerator_config = {"split_batches": True, "even_batches": True}
    with pytest.raises(UsageError, match=r"chat_template_kwargs='{no'"):
        args.chat_template_kwargs = "{no"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rollout_func": print}, "`GRPOTrainer\\(rollout_func\\).*no rollouts of your own"),
        ({"reward_funcs": "org/model"}, "Reward models of the Hub are not run"),
        ({"args": trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False)}, "too"),
        ({"args": ours.RLOOConfig()}, "Import `GRPOConfig`"),
        ({"train_dataset": None}, "Give prompts, or an `environment_factory` and `max_steps`"),
        ({"callbacks": [object()]}, "`object` is not Lightning's"),
        ({"args": {"report_to": "mlflow"}}, "Use `none`, `wandb` or `tensorboard`"),
        ({"args": {"use_vllm": True, "vllm_mode": "server"}}, "no vLLM server"),
        ({"args": {"num_generations": 7}}, "8 completions, 7 for each prompt"),
        ({"args": {"num_generations": 1}}, "at least two"),
        ({"args": {"per_device_train_batch_size": 4, "steps_per_generation": 4}}, "whole prompts"),
        ({"args": {"generation_batch_size": 24, "per_device_train_batch_size": 16}}, "1.5 optim"),
        ({"args": {"generation_batch_size": 8, "steps_per_generation": 1}}, " or `steps_per_gen"),
        ({"args": {"importance_sampling_level": "sequence"}}, "with `loss_type='grpo'`"),
        ({"args": {"eval_strategy": "later"}}, "Use `no`, `epoch` or `steps`"),
        ({"eval_dataset": DatasetDict(train=Dataset.from_list([{"prompt": "1"}]))}, "one split"),
        ({"args": {"loss_type": "bnpo", "gradient_accumulation_steps": 2}}, "Use `dapo`, or one"),
        ({"args": {"save_strategy": "best"}}, "which saves by time"),
        ({"args": {"report_to": "trackio"}}, "Use `none`, `wandb`"),
        ({"args": {"use_vllm": True, "vllm_mode": "server"}}, "there is no vLLM server"),
        ({"args": {"fp16": True, "bf16": True}}, "`fp16` or `bf16`"),
        ({"peft_config": LoraConfig(r=4)}, "peft's default of `target_modules` depends"),
        ({"peft_config": LoraConfig(target_modules=["q_proj"], use_dora=True)}, "use_dora"),
        ({"peft_config": LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)}, "dropout"),
        ({"of": ASYNC, "args": {"max_inflight_tasks": 7}}, r"tasks=7\).*Micro.*in_flight=0"),
        ({"of": ASYNC, "args": {"max_staleness": 0}}, "max_staleness=0"),
        ({"of": ASYNC, "args": {"weight_sync_steps": 0}}, "Change .*`weight_sync_steps`"),
        ({"of": ASYNC, "args": {"vllm_server_base_url": "http://a"}}, "in a process of its own"),
        ({"of": ASYNC, "args": {"beta": 0.0}}, "TRL's `beta` is"),
        ({"of": ASYNC, "rollout_worker": object()}, "no rollouts of your own"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(given, match, tmp_path):
    wanted = {"reward_funcs": len, "train_dataset": [{"prompt": "1"}] * 9, **given}
    config, trainer = wanted.pop("of", (ours.GRPOConfig, ours.GRPOTrainer))
    with pytest.raises(UsageError, match=match):
        if isinstance(args := given.get("args"), dict):
            wanted["args"] = config(str(tmp_path), use_cpu=True, **args)
        trainer(**{"model": COUNTDOWN, **wanted})


def test_epochs_validations_and_adapters_are_those_of_the_script(tmp_path):
    args = ours.GRPOConfig(
        str(tmp_path), use_cpu=True, num_train_epochs=0.5, eval_strategy="epoch", use_vllm=True
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    rows = [{"prompt": str(i)} for i in range(9)]
    made = ours.GRPOTrainer(COUNTDOWN, len, args, rows, rows[:2], peft_config=lora)
    settings = made.module.hparams
    assert settings.lora_rank == 4 and settings.lora_alpha == 8
    assert settings.lora_target_modules == ["q_proj", "v_proj"]
    assert settings.importance_sampling_mode == "sequence_mask"
    assert made.trainer.max_steps == 5 and made.trainer.check_val_every_n_epoch == 9
    assert made.trainer.precision == "bf16-mixed" and made.trainer.limit_val_batches == 1.0
    args = ASYNC[0](str(tmp_path), use_cpu=True, num_train_epochs=2, weight_sync_steps=4)
    assert ASYNC[1](COUNTDOWN, len, args, rows).trainer.max_steps == 18, "passes go on in a round"


def moved(script: str, package: str) -> str:
    assert script.count("from trl import") == 1
    return script.replace("from trl import", f"from {package} import")


@pytest.mark.parametrize(
    ("kind", "engine"), [("GRPO", "TransformersEngine"), ("AsyncGRPO", "VLLMEngine")]
)
def test_the_script_of_the_page_needs_other_imports_alone(kind, engine, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (script,) = (block for block in blocks if "trainer.train()" in block)
    monkeypatch.syspath_prepend(ROOT)
    script = script.replace("runs/trl", str(tmp_path)).replace('"examples/', f'"{ROOT}/examples/')
    found: dict[str, object] = {}
    exec(moved(script, "lit_rlsched.trl").replace("GRPO", kind), found)
    trainer = found["trainer"]
    assert isinstance(trainer, getattr(ours, f"{kind}Trainer"))
    assert trainer.trainer.global_step == 2
    settings = trainer.datamodule.run.settings
    assert settings.prompts_per_round == 4
    assert type(getattr(settings.engine, "engine", settings.engine)).__name__ == engine
    oldest = [e.get("staleness/max", 0) for e in trainer.state.log_history if "loss" in e]
    assert oldest == [0, float(kind == "AsyncGRPO")]
    assert [*(tmp_path / "checkpoints").iterdir()]
    trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()
    with pytest.raises(UsageError, match="There is no checkpoint in"):
        ours.GRPOTrainer(
            str(tmp_path), len, ours.GRPOConfig(f"{tmp_path}/other"), [{"prompt": "1"}]
        ).train(resume_from_checkpoint=True)


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def test_a_run_is_evaluated_and_resumed(tmp_path):
    def trainer(max_steps):
        args = ours.RLOOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            max_completion_length=8,
            max_steps=max_steps,
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(COUNTDOWN)
        rows = Dataset.from_list([{"prompt": f"{i}+"} for i in range(8)])
        return ours.RLOOTrainer(model, length, args, rows, [{"prompt": "9-"}])

    first = trainer(2)
    metrics = first.evaluate()
    assert metrics["val/reward"] == metrics["eval_reward"]
    result = first.train()
    assert first.state.global_step == result.global_step == 2
    history = [*first.state.log_history]
    later = trainer(4)
    result = later.train(resume_from_checkpoint=True)
    assert later.trainer.global_step == 4 and later.trainer.limit_val_batches == 0.0
    steps = [entry["step"] for entry in later.state.log_history if "loss" in entry]
    assert steps == [1, 2, 3, 4]
    assert all(entry in later.state.log_history for entry in history if "loss" in entry)
    losses = [entry["loss"] for entry in later.state.log_history if "loss" in entry]
    assert result.training_loss == pytest.approx(sum(losses) / 4)
    assert later.state.epoch == 1.0 and later.state.max_steps == 4


def test_a_trainer_has_what_scripts_read_of_trls(tmp_path, capsys, monkeypatch):
    """Everything that the scripts of TRL, and those of open-r1, do with a trainer."""
    args = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_steps": 1}
    args |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    args |= {"eval_strategy": "steps", "eval_steps": 1, "hub_model_id": "me/mine"}
    rows = [{"prompt": f"{i}+"} for i in range(3)]
    trainer = ours.GRPOTrainer(COUNTDOWN, length, ours.GRPOConfig(**args), rows, rows)
    model, seen = trainer.model, []
    trainer.add_callback(LambdaCallback(on_train_end=lambda *_: seen.append(1)))
    with pytest.raises(UsageError, match="`ProgressCallback` is not Lightning's"):
        trainer.add_callback(ProgressCallback())

    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    assert seen == [1] and trainer.model is model
    trained, held_out, last = trainer.state.log_history
    assert {"loss", "reward", "grad_norm", "learning_rate", "rewards/length/mean"} <= {*trained}
    assert held_out["step"] == 1 and "eval_reward" in held_out
    assert last == {**result.metrics, "step": 1}
    trl_result = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert {*result.metrics} == {*trl_result, "train_loss", "epoch"}
    assert result.metrics["epoch"] == pytest.approx(1 / 3)

    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    saved = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert saved.log_history == trainer.state.log_history and saved.global_step == 1
    assert (tmp_path / "train_results.json").is_file()
    trainer.create_model_card(dataset_name="rows", tags=["mine"])
    assert "lit_rlsched" in (tmp_path / "README.md").read_text()
    accelerator = trainer.accelerator
    accelerator.print("printed", accelerator.num_processes, accelerator.device)
    accelerator.wait_for_everyone()
    assert "printed 1 cpu" in capsys.readouterr().out
    assert accelerator.is_main_process and trainer.is_world_process_zero()
    assert accelerator.unwrap_model(model) is model
    assert trainer.processing_class.eos_token and trainer.train_dataset is rows
    trainer.end()

    pushed = []
    monkeypatch.setattr(export, "_upload", lambda *to: pushed.append(to))
    trainer.push_to_hub(dataset_name="rows")
    assert pushed == [(tmp_path / "hub", "me/mine")] and trainer.hub_model_id == "me/mine"
    assert (tmp_path / "hub/model.safetensors").is_file()
    with pytest.raises(UsageError, match="Log in with `hf auth login`"):
        trainer.push_to_hub(token="secret")
    with pytest.raises(AttributeError, match=r"has no `ref_model`.*docs/tutorials/from_trl.md"):
        trainer.ref_model.eval()
    trainer.eval_dataset = None
    with pytest.raises(UsageError, match="needs held-out prompts"):
        trainer.evaluate()


@pytest.mark.parametrize(("rows", "prompts"), [(5, 2), (4, 2), (7, 3)])
def test_a_pass_ends_with_its_last_whole_rollout(rows, prompts, tmp_path, monkeypatch):
    drawn, add = [], RunRecord.add_round

    def note(record, round):
        drawn.extend(int(group.prompt.uid) for group in round.groups)
        add(record, round)

    monkeypatch.setattr(RunRecord, "add_round", note)
    args = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "num_train_epochs": 2}
    args |= {"num_generations": 2, "max_completion_length": 1, "shuffle_dataset": False}
    args |= {"per_device_train_batch_size": 2 * prompts, "save_strategy": "no"}
    data = [{"prompt": f"{i}+", "uid": str(i)} for i in range(rows)]
    trainer = ours.GRPOTrainer(COUNTDOWN, length, ours.GRPOConfig(**args), data)
    trainer.train()
    sampler = RepeatSampler(data, mini_repeat_count=1, batch_size=prompts, shuffle=False)
    assert drawn == [*sampler, *sampler]
    assert trainer.state.epoch == 2.0 and trainer.state.global_step == rows // prompts * 2


THINKS_NOT = {"chat_template_kwargs": {"enable_thinking": False}}
EXAMPLES = {
    "grpo_2048, as it is": ({"trackio_space_id": "trl-2048"}, "None is Trackio's"),
    "grpo_continuous_batching": (
        {"use_transformers_continuous_batching": True},
        "`TransformersEngine` batches continuously by itself",
    ),
    "openenv/browsergym_llm": (
        {**THINKS_NOT, "use_vllm": True, "vllm_mode": "colocate", "vllm_server_base_url": None}
        | {"vllm_gpu_memory_utilization": 0.4, "num_train_epochs": 1, "learning_rate": 5e-6}
        | {"weight_decay": 0.0, "gradient_accumulation_steps": 1, "warmup_steps": 10}
        | {"per_device_train_batch_size": 4, "num_generations": 4, "generation_batch_size": 4}
        | {"save_strategy": "steps", "save_steps": 10, "save_total_limit": None}
        | {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "logging_steps": 1, "report_to": "none"},
        None,
    ),
    "openenv/carla, pushed": ({"push_to_hub": True, "hub_model_id": "me/mine"}, "export --push_to"),
    "rloo": (
        {"learning_rate": 1e-5, "log_completions": True, "gradient_accumulation_steps": 2}
        | {"steps_per_generation": 8, "use_vllm": True, "vllm_mode": "colocate"}
        | {"vllm_gpu_memory_utilization": 0.5, "run_name": "Qwen3-0.6B-RLOO-NuminaMath-TIR"},
        None,
    ),
    "rloo, as it is": ({"model_init_kwargs": {"dtype": torch.bfloat16}}, "`bf16` and `fp16`"),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_settings_of_trls_examples_are_used_or_answered_before_the_training(example, tmp_path):
    given, said = EXAMPLES[example]
    config, trainer = CONFIGS["rloo" in example], TRAINERS["rloo" in example]
    make = lambda: trainer(  # noqa: E731
        COUNTDOWN, length, config(str(tmp_path), use_cpu=True, **given), [{"prompt": "1"}] * 99
    )
    if said is None:
        make()
        return
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_script_of_the_command_trl_runs_with_our_trainer(kind, tmp_path, monkeypatch, capsys):
    """The whole of `trl grpo` and `trl rloo`, from the YAML file to the saved model."""
    script = import_module(f"trl.scripts.{kind}")
    trainer, config = f"{kind.upper()}Trainer", f"{kind.upper()}Config"
    monkeypatch.setattr(trl, trainer, getattr(ours, trainer))
    monkeypatch.setattr(trl, config, getattr(ours, config))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scored.py").write_text(
        "def length(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(f'{{"prompt": "{i}+"}}\n' for i in range(4)))
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model_name_or_path: {COUNTDOWN}\ndataset_name: {rows}\nreward_funcs: [scored.length]\n"
        f"output_dir: {tmp_path}/out\nlearning_rate: 1e-5\nmax_steps: 1\nuse_cpu: true\n"
        "bf16: false\nnum_generations: 2\nper_device_train_batch_size: 4\n"
        "max_completion_length: 4\n"
    )
    script.main(*script.make_parser().parse_args_and_config(["--config", str(file)]))
    assert "Training completed" in capsys.readouterr().out
    assert (tmp_path / "out/model.safetensors").is_file()


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir=out,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=160,
    max_tool_calling_iterations=2,
    max_steps=2,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
)
trainer = GRPOTrainer(
    model=folder,
    args=args,
    train_dataset=rows,
    environment_factory=Words,
)
trainer.train()
"""


@pytest.mark.slow
def test_a_script_with_an_environment_needs_other_imports_alone(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.pad_token = tokenizer.eos_token
    folder = str(tmp_path / "model")
    small_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "Play."}], "secret": "stone"}
            for _ in range(8)  # equal rows, as in scripts of TRL
        ]
    )
    given = {"folder": folder, "out": str(tmp_path / "out"), "rows": rows, "Words": Words}
    exec(moved(SCRIPT, "trl"), theirs := {**given})
    exec(moved(SCRIPT, "lit_rlsched.trl"), mine := {**given})
    assert theirs["trainer"].state.global_step == mine["trainer"].trainer.global_step == 2
    logged = mine["trainer"].trainer.callback_metrics
    assert {"tools/call_frequency", "rewards/Words/mean"} <= {*logged}
