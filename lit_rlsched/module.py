"""GRPO and RLOO as LightningModules: two presets of one policy-gradient module."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_rlsched.advice import restored_settings
from lit_rlsched.checkpoints import check_resumable
from lit_rlsched.evaluation import Evaluated
from lit_rlsched.finite import check_gradient
from lit_rlsched.interrupts import heed
from lit_rlsched.logs import StepMetrics, is_partial_check, log_now
from lit_rlsched.policy import add_lora, base_model, load_policy
from lit_rlsched.precision import KeepsFloat32, load_dtype, to_like
from lit_rlsched.predictions import prediction_rows
from lit_rlsched.settings import check_finite
from lit_rlsched.training import shared_prefix as sharing
from lit_rlsched.training.advantages import (
    batch_normalized,
    group_relative,
    kl_in_reward,
    leave_one_out,
)
from lit_rlsched.training.learner import RoundLogprobs
from lit_rlsched.training.lm_head import tolerance
from lit_rlsched.training.logprobs import completion_logprobs
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
    check_optim,
    is_fused,
    keep_step,
    make_adamw,
    with_schedule,
)
from lit_rlsched.types import Group, Sample

# Ours on purpose: the policy stays in eval mode, for dropout would make it another one than the
# engine's; a checkpoint is of the weights after the step; there may be no validation; predictions
# have a uid.
for _expected in (
    r"Found \d+ module\(s\) in eval mode",
    "Using ModelCheckpoint with manual optimization",
    r"Total length of `list` across ranks is zero",
    "Couldn't infer the batch indices",
):
    warnings.filterwarnings("ignore", _expected)


class PolicyModule(KeepsFloat32, LightningModule):
    """Trains a causal language model on scored rollouts; `GRPOModule` and `RLOOModule` preset it.

    One item of the loader is one optimizer step: an iterator of micro-batches. Optimization is
    manual, so gradient clipping is set here and not in the Trainer.

    Args:
        model: Folder or hub name of the checkpoint to start from.
        learning_rate: Peak learning rate of AdamW.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        optim: `adamw_torch_fused` takes no memory beside its state, `adamw_torch` on a GPU a
            temporary as large as what is trained. By default the fused one on a GPU.
        warmup_steps: Optimizer steps over which the learning rate rises linearly.
        lr_scheduler_type: What it does after them.
        gradient_clip_val: Largest norm of the gradient; `None` leaves it as it is.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        lora_rank: Rank of LoRA adapters; 0 trains every weight. The engine gets the merged weights,
            checkpoints hold the adapters alone, and the base is the reference model. Adapters are
            float32; in `bf16-mixed` and `bf16-true` the base is bfloat16 (`docs/precision.md`).
        lora_alpha: LoRA's scale.
        lora_target_modules: Which layers get adapters, as in peft.
        loss_type: How the policy term is formed and normalised; see `losses.policy_loss`.
        epsilon: How far the ratio may move before it is clipped.
        epsilon_high: Upper side of the clip, if it differs (clip-higher); CISPO's cap.
        delta: Upper bound of the ratio for negative advantages (two-sided clip).
        beta: Weight of the KL to the reference model. Zero: no reference model is held.
        importance_sampling_mode: How the ratio of the trainer's and the engine's log-probs corrects
            the loss; `None` leaves it out.
        importance_sampling_clip_max: Largest such ratio that is trusted.
        old_logprobs: What the clipped ratio is relative to: the `trainer`'s log-probs under the
            weights at the start of the round, or those that the `engine` recorded as it drew each
            token, under whatever version it had then. By default `engine` where a round has tokens
            of several policies (`SortedBatching(mode="partial")`), else `trainer`; and always
            `trainer` with `loss_type="rloo"`, whose ratio is a product over the sequence. With
            `engine` the ratio itself corrects for who drew a token, and `importance_sampling_mode`
            has no part in it (its metrics are logged). That ratio has no upper bound where the
            advantage is negative unless `delta` is set.
        shared_prefix: Whether the update encodes a prompt once for several of its completions: the
            same loss and gradients but for rounding, in fewer positions. By default, where the
            model takes it (sdpa or eager attention, over the whole context in every layer, with
            `position_ids`) and where it saves time, which it does for long prompts. The first
            completions that share a prompt are encoded both ways; if log-probs or gradients differ,
            the run goes on without, with a warning. `True` refuses a model that does not take it.
    """

    kl_in_loss = True
    """Whether `beta` weighs a KL term in the loss (GRPO) or charges it to the reward (RLOO)."""

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
        lora_alpha: int = 32,
        lora_target_modules: str = "all-linear",
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
        check_finite(locals())
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.model: nn.Module | None = None
        self._reference: list[nn.Module] = []  # a list hides it from state_dict and the optimizer
        self._evaluation: dict[str, MeanMetric] = {}
        self._skipped = False  # a step without anything to train on
        self._total: Tensor | float = 0.0  # of the optimizer step's loss, so far
        self._figures = StepMetrics()
        self._shares: bool | None = None  # not before some completions were encoded both ways
        self._loss_settings: dict[str, Any] = {
            "loss_type": loss_type,
            "epsilon": epsilon,
            "epsilon_high": epsilon_high,
            "delta": delta,
            "beta": beta if self.kl_in_loss else 0.0,
            "importance_sampling_mode": importance_sampling_mode,
            "importance_sampling_clip_max": importance_sampling_clip_max,
        }
        check_loss_settings(**self._loss_settings)
        check_optim(optim)
        if self.kl_in_loss and loss_type == "rloo" and beta > 0:
            raise ValueError(
                f"`loss_type='rloo'` has no KL term for `beta={beta}` to weigh. Use `RLOOModule`, "
                "which charges the KL to the reward, or `beta=0`."
            )
        if old_logprobs not in ("trainer", "engine", None):
            raise ValueError(f"`{old_logprobs=}` is unknown. Use 'trainer' or 'engine'.")
        if old_logprobs == "engine" and loss_type == "rloo":
            raise ValueError(
                "`old_logprobs='engine'` with `loss_type='rloo'`: the product of a sequence's "
                "ratios to what drew its tokens is unbounded. Use `old_logprobs='trainer'`, which "
                "`importance_sampling_mode` corrects, or another loss type."
            )
        for name, value, low in (
            ("learning_rate", learning_rate, 0.0),
            ("beta", beta, 0.0),
            ("lora_rank", lora_rank, 0),
            ("warmup_steps", warmup_steps, 0),
        ):
            if value < low:
                raise ValueError(f"`{name}={value}` must be {low} or more.")

    @property
    def _hp(self) -> Any:
        return self.hparams

    def configure_model(self) -> None:
        """Load the policy, and the reference model where the loss needs one; safe to call twice.

        Raises:
            ValueError: the model does not take the `shared_prefix` that was asked for.
        """
        if self.model is not None:
            return
        hp = self._hp
        precision = None if self._trainer is None else self.trainer.precision
        dtype = load_dtype(precision, lora=hp.lora_rank > 0)
        self.model = load_policy(hp.model, dtype=dtype)
        if hp.shared_prefix and (why := sharing.obstacle(self.model)) is not None:
            raise ValueError(
                f"`shared_prefix=True`: completions of `{type(self.model).__name__}` cannot share "
                f"a prompt: {why}. Leave `shared_prefix` out."
            )
        if hp.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.train()  # checkpointing asks for it; dropout is off all the same
        if hp.lora_rank:
            self.model = add_lora(self.model, hp.lora_rank, hp.lora_alpha, hp.lora_target_modules)
        elif self.needs_reference:
            self._reference.append(load_policy(hp.model, dtype=dtype).requires_grad_(False))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on what is trainable, stepped once per optimizer step."""
        hp = self._hp
        optimizer = make_adamw(
            [p for p in self.parameters() if p.requires_grad],
            is_fused(hp.optim, self.device.type),
            lr=hp.learning_rate,
            betas=tuple(hp.betas),
            weight_decay=hp.weight_decay,
        )
        steps = self.trainer.estimated_stepping_batches
        scheduler = with_schedule(optimizer, hp.lr_scheduler_type, hp.warmup_steps, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]  # type: ignore[return-value]

    # What the data module asks of the module between rollout and update.

    @property
    def needs_reference(self) -> bool:
        """Whether completions must be scored by the reference model."""
        return self._hp.beta > 0

    @property
    def skip_zero_advantage(self) -> bool:
        """Whether a completion without advantage adds nothing to the gradient."""
        return self._hp.beta == 0

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        """Whether the clipped ratio is relative to what the engine recorded."""
        if self._hp.old_logprobs is None:
            return off_policy and self._hp.loss_type != "rloo"
        return bool(self._hp.old_logprobs == "engine")

    @property
    def needs_group(self) -> bool:
        """Whether a completion's advantage is relative to its siblings."""
        return True

    @abstractmethod
    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Advantages `[P, G]` of a round's rewards `[P, G]`, NaN where there is none."""

    def row_cost(self, rows: Sequence[Sample], micro_batch_tokens: int) -> RowCost | None:
        """By what cost completions share a prompt; tries it once, on the first that would."""
        model = self.model
        if self._hp.shared_prefix is False or self._shares is False:
            return None
        assert model is not None, "configure_model has not run"
        if sharing.obstacle(model) is not None:
            return None
        cost = sharing.row_cost(model)
        if self._shares is None:
            tried = sharing.first_shared(rows, cost, micro_batch_tokens)
            if tried is not None:
                self._shares = self._try_sharing(model, tried)
        return None if self._shares is False else cost

    def _try_sharing(self, model: nn.Module, rows: Sequence[Sample]) -> bool:
        try:
            with self.trainer.precision_plugin.forward_context():
                logprobs, gradients = sharing.difference(model, rows)
                allowed = tolerance(model)
            if logprobs <= allowed and gradients <= allowed:  # NaN is not
                return True
            wrong = (
                f"log-probs are off by {logprobs:.1e}, gradients by {gradients:.1e} of their norm "
                f"({allowed:.0e} would be rounding)"
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model makes of a mask it does not expect
            wrong = f"{type(error).__name__}: {error}"
        rank_zero_warn(
            f"`{type(base_model(model)).__name__}` does not get a prompt right that completions "
            f"share: {wrong}. Each completion is encoded with its own prompt; "
            "`shared_prefix=False` saves trying."
        )
        return False

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Log-probs `[B, C]` under the current and, where needed, the reference weights."""
        batch = batch.to(self.device)
        scores = {"old_logprobs": self._logprobs(self.model, batch)[0]}
        if self.needs_reference:
            with self._reference_model() as reference:
                scores["ref_logprobs"] = self._logprobs(reference, batch)[0]
        return scores

    @contextmanager
    def _reference_model(self) -> Iterator[nn.Module]:
        if self._hp.lora_rank:
            with self.model.disable_adapter():  # type: ignore[union-attr, operator]
                yield self.model  # type: ignore[misc]
        else:
            yield to_like(self._reference[0], next(self.parameters()))

    def _logprobs(
        self, model: nn.Module | None, batch: MicroBatch, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        assert model is not None, "configure_model has not run"
        return completion_logprobs(
            model,
            batch.input_ids,
            batch.prompt_lengths,
            batch.completion_lengths,
            completion_rows=batch.completion_rows,
            temperature=batch.temperature,
            entropy=entropy,
        )

    # Training.

    def loss(self, batch: MicroBatch) -> LossOutput:
        """The micro-batch's share of its optimizer step's loss."""
        logp, entropy = self._logprobs(self.model, batch, entropy=True)
        old_logp: Tensor | None = batch.old_logp
        rollout_logp: Tensor | None = None if batch.truncated_sampling else batch.rollout_logp
        engine = self.needs_engine_logprobs(batch.off_policy)
        if engine:
            old_logp, rollout_logp = rollout_logp, None
        output = policy_loss(
            logp,
            batch.advantages,
            batch.completion_mask,
            old_logp=old_logp,
            ref_logp=batch.ref_logp,
            rollout_logp=rollout_logp,
            step_sequences=batch.step_sequences,
            step_tokens=batch.step_tokens,
            max_completion_length=batch.max_completion_length,
            **self._loss_settings,
        )
        assert entropy is not None
        mask = batch.completion_mask
        if engine and old_logp is not None:  # for the figures: how far the policy has moved on
            cap = self._hp.importance_sampling_clip_max
            _, moved = rollout_correction(logp.detach(), old_logp, mask.bool(), "token_mask", cap)
            output.metrics.update(moved)
        output.metrics["entropy"] = (entropy * mask).sum() / mask.sum().clamp(min=1)
        return output

    def on_round_start(self, plan: list[Group]) -> None:
        """Free the gradients: the rollout needs the memory."""
        self.zero_grad(set_to_none=True)
        self._total, self._figures = 0.0, StepMetrics()

    def streaming_obstacle(self) -> str | None:
        """Why gradients cannot be computed before all of an update is drawn; `None`: they can."""
        if self._hp.loss_type == "bnpo":
            return (
                "`loss_type='bnpo'` is a mean over each micro-batch, and who shares one would "
                "follow from who ends first. Use 'dapo', the mean over the update's tokens"
            )
        return None

    def accumulate(self, step: OptimizerStep) -> None:
        """Add the gradient of these micro-batches to that of the coming optimizer step."""
        with self.trainer.precision_plugin.train_step_context():
            for batch in step:
                heed(self.trainer)
                batch = batch.to(self.device)
                output = self.loss(batch)
                self.manual_backward(output.loss)
                self._total += output.loss.detach()
                self._figures.update(output.metrics, weight=float(batch.completion_mask.sum()))

    def training_step(self, step: OptimizerStep, batch_idx: int) -> None:
        """Accumulate the step's micro-batches and take one optimizer step, even on none."""
        optimizer = self.optimizers()
        if not step.accumulated:
            optimizer.zero_grad()  # type: ignore[union-attr]
            self._total, self._figures = 0.0, StepMetrics()
        self._skipped = not step.rows
        if not len(step) and not any(map(len, step.accumulated)):
            # as a step in which every advantage is zero
            nothing = [p.sum() * 0.0 for p in self.parameters() if p.requires_grad]
            self.manual_backward(torch.stack(nothing).sum())
        self.accumulate(step)
        self._divide_by_totals(step)
        total, metrics = self._total, self._figures.compute()
        learning_rate = optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        optimizer.step()  # type: ignore[union-attr]
        self.lr_schedulers().step()  # type: ignore[union-attr]
        # not earlier: Lightning forgets what was logged before the optimizer's hooks
        self.log("learning_rate", learning_rate, batch_size=1)
        self.log("loss", total, prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)

    def _divide_by_totals(self, step: OptimizerStep) -> None:
        """Of a step that was begun before its totals were known."""
        if not step.accumulated:
            return
        by = divides_by(self._hp.loss_type)
        ratio = getattr(step.divisor, by) / max(1, getattr(step.totals, by))
        self._total *= ratio
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(ratio)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here: the gradients are unscaled by now, whatever the precision."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        check_gradient(self.trainer, norm, self._total)
        self.log("grad_norm", norm, batch_size=1)
        if self._hp.gradient_clip_val is not None:
            self.clip_gradients(optimizer, self._hp.gradient_clip_val, "norm")
        if self._skipped:  # where there is a gradient, even of zero, momentum moves the weights
            self.zero_grad(set_to_none=True)

    # Validation and test.

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._evaluation = {}

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, item: Evaluated, batch_idx: int) -> None:
        """Take in the figures of one held-out prompt."""
        for name, value in item.metrics().items():
            metric = self._evaluation.setdefault(name, MeanMetric().to(self.device))
            metric.update(value)

    test_step = validation_step

    def predict_step(self, item: Evaluated, batch_idx: int) -> list[dict[str, Any]]:
        """A row for each completion of a prompt; see `predictions.prediction_rows`."""
        names = self.trainer.datamodule.rewards.names  # type: ignore[attr-defined]
        return prediction_rows(item, names)

    def on_validation_epoch_end(self) -> None:
        """Log the evaluation under `val/`: what `monitor="val/accuracy"` watches."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log the evaluation under `test/`."""
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        figures = {f"{stage}/{name}": m.compute() for name, m in self._evaluation.items()}
        trainer = self.trainer
        training = trainer.state.fn == "fit"
        if training and not is_partial_check(trainer):
            # at the steps that were taken: Lightning would put what the first step has made beside
            # the baseline, and drops the baseline
            log_now(trainer, figures, step=trainer.global_step)
        if not trainer.sanity_checking:
            headline = f"{stage}/accuracy"
            rest = {k: v for k, v in figures.items() if k != headline}
            also: Any = {"batch_size": 1, "sync_dist": True, "logger": not training}
            self.log_dict(rest, **also)
            self.log(headline, figures[headline], prog_bar=True, **also)

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the adapters alone where there are adapters: the base never changes."""
        checkpoint["shared_prefix"] = self._shares
        keys = self._saved_keys()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in keys}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model or adapter configuration.

        Raises:
            ValueError: names or shapes of the weights differ, or there is nothing but weights and
                the run is to be gone on with.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_resumable(checkpoint)
            if (text := restored_settings(self._hp, checkpoint)) is not None:
                rank_zero_warn(text)
            device = self.trainer.strategy.root_device.type
            keep_step(checkpoint, is_fused(self._hp.optim, device))
        keys = self._saved_keys()
        ours = {k: v.shape for k, v in self.state_dict().items() if k in keys}
        theirs = {k: v.shape for k, v in checkpoint["state_dict"].items()}
        if ours != theirs:
            different = sorted(
                k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)
            )
            raise ValueError(
                f"The checkpoint is of another configuration: {len(different)} weights differ, the "
                f"first is {different[0]}: {theirs.get(different[0])} in the checkpoint, "
                f"{ours.get(different[0])} here. Resume with the `model` and the `lora_*` settings "
                "it was made with, or start a new run in another folder."
            )
        self.strict_loading = not self._hp.lora_rank
        self._shares = checkpoint.get("shared_prefix")

    def _saved_keys(self) -> set[str]:
        if self._hp.lora_rank:
            return {name for name, p in self.named_parameters() if p.requires_grad}
        return set(self.state_dict())


class GRPOModule(PolicyModule):
    """Group Relative Policy Optimization (arXiv 2402.03300) and its relatives.

    Args:
        model: See `PolicyModule`, which takes all further arguments too.
        advantage: What a reward is compared with: `group`, those of the prompt's other completions
            (GRPO); `reinforce++`, those of all completions of the update, by mean and standard
            deviation (REINFORCE++, arXiv 2501.03262). That needs no siblings: `num_generations` may
            be 1, and `SortedBatching` trains on single completions.
        scale_rewards: What advantages are divided by: the `group`'s standard deviation, that of
            the whole `batch`, or `none` (Dr. GRPO).
        **kwargs: See `PolicyModule`.

    Raises:
        ValueError: an argument is out of range, or two contradict each other.

    Example::

        module = GRPOModule("Qwen/Qwen3-0.6B", learning_rate=1e-6, loss_type="dapo")
    """

    def __init__(
        self,
        model: str,
        *,
        advantage: Literal["group", "reinforce++"] = "group",
        scale_rewards: Literal["group", "batch", "none"] = "group",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        if advantage not in ("group", "reinforce++"):
            raise ValueError(f"`{advantage=}` is unknown. Use 'group' or 'reinforce++'.")
        if advantage == "reinforce++" and scale_rewards != "group":
            raise ValueError(
                f"`{scale_rewards=}` has no effect on `advantage='reinforce++'`, which divides by "
                "the standard deviation of the update. Leave it out."
            )

    def streaming_obstacle(self) -> str | None:
        """Advantages that are compared with the whole update are known when it is."""
        if not self.needs_group:
            return (
                "`advantage='reinforce++'` compares rewards with those of all the update, which "
                "are known at its end. Use `advantage='group'`"
            )
        if self._hp.scale_rewards == "batch":
            return (
                "`scale_rewards='batch'` divides by the standard deviation of all the update, "
                "which is known at its end. Use 'group' or 'none'"
            )
        return super().streaming_obstacle()

    @property
    def needs_group(self) -> bool:
        """Whether a completion's advantage is relative to its siblings."""
        return self._hp.advantage == "group"

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Relative to the group or to the update; the KL stands in the loss."""
        if not self.needs_group:
            return batch_normalized(rewards)
        return group_relative(rewards, self._hp.scale_rewards)


class RLOOModule(PolicyModule):
    """REINFORCE Leave-One-Out (arXiv 2402.14740).

    Args:
        model: See `PolicyModule`, which takes all further arguments too.
        beta: Weight of the KL to the reference model, as a penalty in the reward.
        loss_type: See `losses.policy_loss`.
        normalize_advantages: Whether advantages are normalised over the round.
        **kwargs: See `PolicyModule`.
    """

    def __init__(
        self,
        model: str,
        *,
        beta: float = 0.05,
        loss_type: LossType = "rloo",
        normalize_advantages: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, beta=beta, loss_type=loss_type, **kwargs)

    kl_in_loss = False

    def streaming_obstacle(self) -> str | None:
        """Advantages that are normalised over the round are known when it is over."""
        if self._hp.normalize_advantages:
            return (
                "`normalize_advantages=True` needs the advantages of all the update, which are "
                "known at its end. Leave it out"
            )
        return super().streaming_obstacle()

    @property
    def skip_zero_advantage(self) -> bool:
        """Nothing but the advantage carries gradient."""
        return True

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Leave-one-out, of rewards less `beta` times the k1 estimate of the KL."""
        if logprobs is not None:
            penalised = kl_in_reward(
                rewards.flatten(), logprobs.old, logprobs.ref, logprobs.mask, beta=self._hp.beta
            )
            rewards = penalised.view_as(rewards)
        return leave_one_out(rewards, self._hp.normalize_advantages)
