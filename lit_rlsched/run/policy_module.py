"""The policy-gradient module that GRPO and RLOO specialise."""

import warnings
from abc import abstractmethod
from inspect import signature
from typing import Any, Literal

import torch
from lightning import Callback
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lit_rlsched.ranks import Team
from lit_rlsched.run.checks import check_given_to
from lit_rlsched.run.evaluation import EvaluationSteps
from lit_rlsched.run.fsdp2 import gradient_sync, is_sharded, shard
from lit_rlsched.run.interrupts import check_interrupt
from lit_rlsched.run.same_ranks import await_ranks
from lit_rlsched.run.saving.module_state import PolicyCheckpoints, without_base
from lit_rlsched.run.saving.resuming import origin
from lit_rlsched.run.trainer import StepMetrics
from lit_rlsched.settings import KnownArguments, UsageError, arguments_checked, check_name
from lit_rlsched.training.advantages import mean_kl
from lit_rlsched.training.learner import RoundLogprobs
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.lora import (
    adapter_config,
    add_lora,
    add_reference,
    as_reference,
    base_model,
    lora_settings,
)
from lit_rlsched.training.losses import (
    ImportanceSamplingMode,
    LossOutput,
    LossType,
    check_loss_settings,
    divides_by,
    policy_loss,
    rollout_correction,
)
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep, RowCost
from lit_rlsched.training.optimizers import (
    Optim,
    check_gradient,
    check_optimizers,
    due_schedulers,
    is_fused,
    make_adamw,
    with_schedule,
)
from lit_rlsched.training.policy import load_policy, whole
from lit_rlsched.training.precision import KeepsFloat32, load_dtype, to_like
from lit_rlsched.training.shared_prefix import obstacle, row_cost

# Expected here: the policy stays in eval mode, because with dropout it differs from the engine's;
# a checkpoint holds the weights after the step; validation is optional; predictions have a uid.
for _expected in (
    r"Found \d+ module\(s\) in eval mode",
    "Using ModelCheckpoint with manual optimization",
    r"Total length of `list` across ranks is zero",
    "Couldn't infer the batch indices",
):
    warnings.filterwarnings("ignore", _expected)


LOSS_SETTINGS = tuple(signature(check_loss_settings).parameters)


class PolicyModule(KeepsFloat32, PolicyCheckpoints, EvaluationSteps, KnownArguments):
    """Trains a causal language model on scored completions; base of `GRPOModule` and `RLOOModule`.

    One item of the loader is one optimizer step, an iterator of micro-batches. Optimization is
    manual, so gradient clipping is set here and not in the Trainer.

    Args:
        model: Folder or hub name of the initial checkpoint. If it is a LoRA adapter, this adapter
            is trained further, and the `lora_*` settings follow from it.
        learning_rate: Peak learning rate of AdamW.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay, which leaves biases and norms alone.
        optim: `adamw_torch` or `adamw_torch_fused`, the default on a GPU, where `adamw_torch` needs
            a temporary as large as the trained weights.
        warmup_steps: Optimizer steps of linear learning-rate warm-up; it does not begin at zero.
        lr_scheduler_type: Schedule after the warm-up.
        gradient_clip_val: Maximum gradient norm; `None` or 0 switches clipping off.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        lora_rank: Rank of LoRA adapters; 0 trains every weight. The engine gets merged weights, or
            the adapters alone with `VLLMEngine(enable_lora=True)`. Checkpoints hold only the
            adapters. Adapters are float32; in `bf16-mixed` and `bf16-true` the base is bfloat16
            (`docs/explanation/precision.md`).
        lora_alpha: LoRA's scale, by default 32.
        lora_target_modules: Layers that get adapters, as in peft: their names, a regular
            expression, or `all-linear`, the default.
        reference_model: Reference model of the KL: `initial`, the model at the start of training,
            or, if `model` is an adapter, `base`, the model under it.
        loss_type: Ratio and normalisation of the loss; see `losses.policy_loss`.
        epsilon: Clip distance of the ratio.
        epsilon_high: Upper clip distance if it differs (clip-higher); the cap of CISPO.
        delta: Upper bound of the ratio for negative advantages (two-sided clipping).
        beta: Weight of the KL to the reference model. With 0 no reference model is loaded.
        importance_sampling_mode: How the ratio of the trainer's to the engine's log-probs corrects
            the loss; `None` switches the correction off.
        importance_sampling_clip_max: Maximum of that ratio.
        old_logprobs: Denominator of the clipped ratio: log-probs by the `trainer` under the weights
            at the start of the round, or by the `engine` under the version that drew the token. The
            default is `engine` if a round has tokens of several versions
            (`SortedBatching(mode="partial")`) and `loss_type` is not `rloo`, else `trainer`. With
            `engine` the clipped ratio itself is the correction, unbounded for negative advantages
            unless `delta` is set, and `importance_sampling_mode` has no effect.
        shared_prefix: Whether the update encodes a prompt once for several of its completions, with
            the same loss and gradients up to rounding. The default does so where it saves time and
            the model supports it; `True` refuses a model that does not
            (`docs/explanation/repetition.md`).
    """

    hparams: Any
    kl_in_loss = True
    """Whether the KL is a term of the loss (GRPO) or subtracted from the reward (RLOO)."""

    def __init__(
        self,
        model: str,
        *,
        learning_rate: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        optim: Optim | None = None,
        warmup_steps: int = 0,
        lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant",
        gradient_clip_val: float | None = 1.0,
        gradient_checkpointing: bool = False,
        lora_rank: int = 0,
        lora_alpha: int | None = None,
        lora_target_modules: list[str] | str | None = None,
        reference_model: Literal["initial", "base"] = "initial",
        loss_type: LossType = "dapo",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        beta: float = 0.0,
        importance_sampling_mode: ImportanceSamplingMode | None = "sequence_mask",
        importance_sampling_clip_max: float = 3.0,
        old_logprobs: Literal["trainer", "engine"] | None = None,
        shared_prefix: bool | None = None,
    ) -> None:
        check_name(
            type(self).__name__,
            "model",
            model,
            "The engine, the reference model and a resumed run load the model by its name: save it "
            "and its tokenizer with `save_pretrained(folder)`, and give the folder.",
        )
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.model: nn.Module | None = None
        self._reference: list[nn.Module] = []  # a list, so not a submodule
        self._skipped = False  # whether the optimizer step has nothing to train on
        self._total: Tensor | float = 0.0  # loss of the optimizer step so far
        self._figures = StepMetrics()
        self._origin: dict[str, Any] = {}
        ours = [cls for cls in type(self).__mro__ if issubclass(cls, PolicyModule)]
        with arguments_checked(type(self).__name__, ours, self.hparams):
            check_loss_settings(**self._loss_settings)
            if old_logprobs == "engine" and loss_type == "rloo":
                raise UsageError(
                    "`old_logprobs='engine'` with `loss_type='rloo'`: the importance ratio of a "
                    "whole sequence to the engine's log-probs is unbounded. Use "
                    "`old_logprobs='trainer'`, which `importance_sampling_mode` corrects, or "
                    "another loss type."
                )

    def configure_callbacks(self) -> list[Callback]:
        """Refuse Trainer arguments that our settings replace, and wait for ranks on other hosts."""
        check_given_to(self.trainer, self)
        await_ranks(self.trainer)
        return []

    def configure_model(self) -> None:
        """Load the policy and, if the loss needs one, the reference model, unless already loaded.

        Raises:
            UsageError: If the model cannot be trained, differs from the `lora_*` settings, or does
                not support `shared_prefix=True`.
        """
        if self.model is not None:
            return
        hp = self.hparams
        sharded = is_sharded(self._trainer)
        if hp.shared_prefix and sharded and self.trainer.world_size > 1:
            raise UsageError(
                "`shared_prefix=True`: completions cannot share a prompt while the weights are "
                "sharded. Leave `shared_prefix` out, or use `strategy='ddp'`."
            )
        adapter = adapter_config(hp.model)
        hp.update(lora_settings(hp, adapter))
        precision = None if self._trainer is None else self.trainer.precision
        dtype = load_dtype(precision, lora=hp.lora_rank > 0)
        policy = load_policy(hp.model, dtype=dtype)
        model = base_model(policy)
        if hp.shared_prefix and (why := obstacle(model)) is not None:
            raise UsageError(
                f"`shared_prefix=True`: completions of `{type(model).__name__}` cannot share "
                f"a prompt: {why}. Leave `shared_prefix` out."
            )
        if hp.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            for part in model.modules():  # only what asks for train mode: some routers sample in it
                part.training = hasattr(part, "gradient_checkpointing")
        if hp.lora_rank:
            self._origin = origin(policy, hp.reference_model)
            if adapter is None:
                policy = add_lora(policy, hp.lora_rank, hp.lora_alpha, hp.lora_target_modules)
            elif self.needs_reference and hp.reference_model == "initial":
                add_reference(policy)
            self.register_load_state_dict_post_hook(without_base)  # type: ignore[no-untyped-call]
        elif self.needs_reference:
            self._reference.append(load_policy(hp.model, dtype=dtype).requires_grad_(False))
            self._origin = origin(self._reference[0])
        self.model = policy
        if sharded and self.device_mesh is not None:  # an estimate has no mesh
            for reference in self._reference:  # not a submodule, so nothing else casts it
                self.trainer.precision_plugin.convert_module(reference)
            for part in (self.model, *self._reference):
                shard(part, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        """Check what `configure_optimizers`, which a subclass may have, has returned."""
        check_optimizers(
            self.trainer.optimizers,
            self.trainer.lr_scheduler_configs,
            [p for p in self.parameters() if p.requires_grad],
        )
        super().on_fit_start()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hp = self.hparams
        optimizer = make_adamw(
            self,
            is_fused(hp.optim, self.device.type),
            lr=hp.learning_rate,
            betas=tuple(hp.betas),
            weight_decay=hp.weight_decay,
        )
        steps = self.trainer.estimated_stepping_batches
        scheduler = with_schedule(optimizer, hp.lr_scheduler_type, hp.warmup_steps, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]  # type: ignore[return-value]

    @property
    def _loss_settings(self) -> dict[str, Any]:
        """The hyperparameters that `policy_loss` takes."""
        settings = {name: self.hparams[name] for name in LOSS_SETTINGS}
        return settings if self.kl_in_loss else {**settings, "beta": 0.0}

    # The methods of `training.learner.Learner`, which documents them.

    @property
    def needs_reference(self) -> bool:
        return self.hparams.beta > 0

    @property
    def skip_zero_advantage(self) -> bool:
        return self.hparams.beta == 0

    @property
    def needs_group(self) -> bool:
        return True

    @property
    def tracks_rewards(self) -> bool:
        return False

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        if self.hparams.old_logprobs is None:
            return off_policy and self.hparams.loss_type != "rloo"
        return bool(self.hparams.old_logprobs == "engine")

    @abstractmethod
    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Compute advantages `[P, G]` from rewards `[P, G]`, NaN where there is none."""

    def row_cost(self) -> RowCost | None:
        assert self.model is not None, "configure_model has not run"
        if self.hparams.shared_prefix is False or is_sharded(self._trainer) or obstacle(self.model):
            return None
        return row_cost(self.model)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        batch = batch.to(self.device)
        scores = {"old_logprobs": self._logprobs(self.model, batch)[0]}
        if self.needs_reference and self.hparams.lora_rank:
            with as_reference(self.model):
                scores["ref_logprobs"] = self._logprobs(self.model, batch)[0]
        elif self.needs_reference:
            reference = to_like(self._reference[0], next(self.parameters()))
            scores["ref_logprobs"] = self._logprobs(reference, batch)[0]
        return scores

    def _logprobs(
        self, model: nn.Module | None, batch: MicroBatch, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        assert model is not None, "configure_model has not run"
        return completion_logprobs(model, **batch.logprob_inputs, entropy=entropy)

    # Training.

    def loss(self, batch: MicroBatch) -> LossOutput:
        """Compute the micro-batch's share of the optimizer step's loss."""
        logp, entropy = self._logprobs(self.model, batch, entropy=True)
        inputs = batch.loss_inputs
        if self.hparams.loss_type == "bnpo":
            inputs["step_tokens"] = batch.own_tokens
        drawn = None
        if self.needs_engine_logprobs(batch.off_policy):
            drawn = inputs["rollout_logp"]
            inputs |= {"old_logp": drawn, "rollout_logp": None}
        output = policy_loss(logp, **inputs, **self._loss_settings)
        assert entropy is not None
        mask = batch.completion_mask
        if drawn is not None:  # metrics of how far the policy has moved
            cap = self.hparams.importance_sampling_clip_max
            _, moved = rollout_correction(logp.detach(), drawn, mask.bool(), "token_mask", cap)
            output.metrics.update(moved)
        output.metrics["entropy"] = (entropy * mask).sum() / mask.sum().clamp(min=1)
        if not self.kl_in_loss and batch.old_logp is not None and batch.ref_logp is not None:
            output.metrics["kl"] = mean_kl(batch.old_logp, batch.ref_logp, mask)
        return output

    def on_train_epoch_end(self) -> None:
        """Free the gradients' memory for the next rollout."""
        self._begin_step()

    def _begin_step(self) -> None:
        self.zero_grad(set_to_none=True)
        self._total, self._figures = 0.0, StepMetrics()

    def streaming_obstacle(self) -> str | None:
        return None

    def accumulate(self, step: OptimizerStep, first: bool) -> None:
        if first:
            self._begin_step()
        self._accumulate(step, sync=False)

    def _accumulate(self, step: OptimizerStep, sync: bool) -> None:
        """Add gradients; with `sync`, the last backward pass averages them over the ranks."""
        with self.trainer.precision_plugin.train_step_context():
            for batch in step:
                if self._team.size == 1:
                    check_interrupt(self.trainer)  # several ranks stop together, between two steps
                batch = batch.to(self.device)
                with gradient_sync(self.trainer, sync and batch.is_last):
                    output = self.loss(batch)
                    self.manual_backward(output.loss * batch.scale)
                if batch.scale:
                    self._total += output.loss.detach()
                    self._figures.update(output.metrics, weight=float(batch.completion_mask.sum()))

    def training_step(self, step: OptimizerStep, batch_idx: int) -> None:
        """Accumulate the step's micro-batches and take one optimizer step, even if it is empty."""
        optimizer = self.optimizers()
        if not step.accumulated:
            self._begin_step()
        self._skipped = not step.samples
        if not len(step):
            self._add_nothing(step)
        self._accumulate(step, sync=True)
        if self._team.size > 1:
            sums = {name: value.cpu() for name, value in self._figures.sums.items()}
            ours = float(self._total), sums, self._figures.weight
            self._total, self._figures = 0.0, StepMetrics()
            for loss, sums, weight in self._team.all_gather(ours):
                self._total += loss
                self._figures.add(sums, weight)
        if step.accumulated:  # parts that were divided by a provisional divisor
            by = divides_by(self.hparams.loss_type)
            ratio = getattr(step.divisor, by) / max(1, getattr(step.totals, by))
            self._total *= ratio
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(ratio)
        metrics = self._figures.compute()
        learning_rate = optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        optimizer.step()  # type: ignore[union-attr]
        for scheduler in due_schedulers(self.trainer):
            self.lr_scheduler_step(scheduler, None)
        # Lightning discards what was logged before the optimizer's hooks.
        self.log("learning_rate", learning_rate, batch_size=1)
        self.log("loss", self._total, prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)

    def _add_nothing(self, step: OptimizerStep) -> None:
        """Take the gradient of a step in which every advantage is zero or every group streamed."""
        if self._team.size == 1:
            accumulated = any(p.grad is not None for p in self.parameters())
        else:  # all ranks know the same
            accumulated = any(map(len, step.accumulated))
        trained = [p for p in self.parameters() if p.requires_grad]
        if is_sharded(self.trainer):
            if not accumulated:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter)
        elif not accumulated or self._team.size > 1:
            self.manual_backward(torch.stack([p.sum() * 0.0 for p in trained]).sum())

    @property
    def _team(self) -> Team:
        run = getattr(getattr(self._trainer, "datamodule", None), "run", None)
        return getattr(run, "team", None) or Team()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check and clip the gradients, which are unscaled at this point in every precision."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(grads)) if grads else torch.zeros(())
        check_gradient(self.trainer, norm, self._total)
        self.log("grad_norm", norm, batch_size=1)
        if self.hparams.gradient_clip_val is not None:
            self.clip_gradients(optimizer, self.hparams.gradient_clip_val, "norm")
        if self._skipped:  # with a gradient, even zero, momentum would move the weights
            self.zero_grad(set_to_none=True)
