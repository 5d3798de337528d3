import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser
from seen_rounds import At, logged, vector
from transformers import AutoModelForCausalLM

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule
from lit_rlsched.callbacks import MicroGroupSampling, RolloutWindow
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import find_policy, named_weights


def test_the_accuracy_can_be_monitored(fit, sums, tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val/accuracy", mode="max")
    stop = EarlyStopping("val/accuracy", mode="max", patience=1, min_delta=2.0)
    trainer, _, _ = fit(
        callbacks=[best, stop],
        val_data=sums[90:],
        trainer={"enable_checkpointing": True, "max_epochs": 10},
    )
    assert best.best_model_score is not None
    assert trainer.current_epoch < 10


def test_learning_rate_warms_up_and_decays(fit, tiny_model):
    steps = At(logged, "on_train_batch_end")
    module = GRPOModule(tiny_model, learning_rate=1e-3, warmup_steps=2, lr_scheduler_type="linear")
    fit(module, [steps], trainer={"max_epochs": 6})
    rates = [row["learning_rate"] for row in steps.seen]
    assert rates == pytest.approx([5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


@pytest.mark.mostly_slow("grpo", "rloo")
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_every_loss_trains(fit, tiny_model, loss_type):
    settings = {"loss_type": loss_type, "learning_rate": 1e-3}
    if loss_type == "cispo":
        settings["epsilon_high"] = 5.0
    if loss_type == "rloo":
        module = RLOOModule(tiny_model, beta=0.0, **settings)
    else:
        module = GRPOModule(tiny_model, **settings)
    before = At(lambda trainer, pl_module: vector(pl_module), "on_train_start")
    trainer, module, _ = fit(module, [before], num_iterations=2)
    assert torch.isfinite(trainer.callback_metrics["loss"])
    assert not torch.equal(before.seen[0], vector(module))


def test_bf16_mixed(fit, tiny_model):
    trainer, module, _ = fit(
        GRPOModule(tiny_model, learning_rate=1e-3),
        callbacks=[RolloutWindow(), MicroGroupSampling(slots=10)],
        engine=VLLMEngine(),
        trainer={"precision": "bf16-mixed"},
    )
    assert next(module.parameters()).dtype == torch.float32
    assert 1e-5 < trainer.callback_metrics["sync/max_logp_diff"] < 0.5


@pytest.mark.slow
def test_an_engine_that_kept_the_old_weights_stops_the_run(fit, tiny_model):
    class Forgetful(VLLMEngine):
        def sync_weights(self, named_tensors, version):
            pass

    with pytest.raises(RuntimeError, match="does not decode with the weights that are trained"):
        fit(GRPOModule(tiny_model, learning_rate=1e-2), engine=Forgetful())
    fit(GRPOModule(tiny_model, learning_rate=1e-2), engine=Forgetful(), verify_sync=False)


def test_the_policy_is_found_and_only_one_is_trained(tiny_policy):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleDict({"policy": tiny_policy})

    two = Two()
    assert find_policy(two) is tiny_policy
    two.other = AutoModelForCausalLM.from_config(tiny_policy.config)
    with pytest.raises(UsageError, match="holds 2 trainable"):
        find_policy(two)
    two.other.requires_grad_(False)
    assert find_policy(two) is tiny_policy


def test_a_compiled_module_is_refused(tiny_model, sums, digits):
    data = RolloutDataModule(sums, [digits], engine=TransformersEngine(), prompts_per_round=1)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UsageError, match="Give the Trainer the module itself"):
        trainer.fit(torch.compile(GRPOModule(tiny_model)), data)


TIED = {
    "head": ({"lora_target_modules": ["q_proj", "lm_head"]}, "`lm_head` shares its weights"),
    "embedding": ({"lora_target_modules": ".*embed_tokens"}, "`model.embed_tokens` shares its"),
    "no such layer": ({"lora_target_modules": ["w"]}, r"`lora_target_modules=.*w.*not found"),
}


@pytest.mark.parametrize(("settings", "said"), TIED.values(), ids=TIED)
def test_layers_that_cannot_have_adapters_are_refused(settings, said, tiny_model):
    with pytest.raises(UsageError, match=said):
        GRPOModule(tiny_model, lora_rank=4, **settings).configure_model()


def test_adapters_on_head_and_embedding_that_are_not_tied(tiny_model_untied):
    targets = ["q_proj", "lm_head", "embed_tokens"]
    module = GRPOModule(tiny_model_untied, lora_rank=4, lora_target_modules=targets)
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    merged = AutoModelForCausalLM.from_pretrained(tiny_model_untied, dtype=torch.float32).eval()
    merged.load_state_dict(dict(named_weights(module.model)))
    ids = torch.tensor([[5, 9, 12, 7]])
    with torch.no_grad():
        ours, theirs = module.model.eval()(ids).logits, merged(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "targets"),
    [("[q_proj, v_proj]", ["q_proj", "v_proj"]), ("all-linear", "all-linear"), (".*_proj", None)],
)
def test_targets_of_the_command_line(text, targets, tiny_model, tmp_path):
    """A list, a regular expression and peft's own name, from a file and as an argument."""
    parser = LightningArgumentParser()
    parser.add_argument("-c", action="config")
    parser.add_lightning_class_args(GRPOModule, "model")
    path = tmp_path / "run.yaml"
    quoted = text if text[0] == "[" else repr(text)
    path.write_text(f"model: {{model: {tiny_model}, lora_target_modules: {quoted}}}\n")
    argument = [f"--model.model={tiny_model}", f"--model.lora_target_modules={text}"]
    for arguments in (["-c", str(path)], argument):
        found = parser.parse_args(arguments).model.lora_target_modules
        assert found == (targets or text)
