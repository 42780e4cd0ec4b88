"""Optimizer steps of one phase of training: megatron's AdamW and schedule; each gradient is checked first."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ctpo_megatron.base.host_copies import to_device
from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import summarize
from ctpo_megatron.policy import device
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.reports import Clock, StepOutcome, Update

if TYPE_CHECKING:  # the model is built with a loss scale
    from ctpo_megatron.policy.model import BuiltModel
    from ctpo_megatron.policy.passes import Collected, LossFunction, Passes

log = logging.getLogger(__name__)

_RATES = ("max_lr", "min_lr")
_CONFIGURED = (*_RATES, "betas", "eps", "fused", "foreach")
SMALLEST = 1.0
WINDOW = 1000
HYSTERESIS = 2


class LossScale(DynamicGradScaler):  # type: ignore[misc] # megatron-core has no types
    """megatron-core's dynamic loss scale, one for all of its optimizers.

    The second optimizer step whose gradient overflows (`HYSTERESIS`) halves it, and so does each later one, until
    `WINDOW` steps in a row without any double it. Powers of two: only exponents change, so float32 gradients keep
    their bits.

    megatron-core gives dense and expert parameters an optimizer with a scale each, and multiplies the loss by the
    first. They would part when only one of them overflows. Optimizers therefore share this one, and `note` alone
    changes it, once a step, when all ranks agree.
    """

    def __init__(self, initial: float) -> None:
        self._initial = initial
        self.restart()

    def restart(self) -> None:
        """Forget everything, for a new phase of training."""
        super().__init__(
            initial_scale=self._initial,
            min_scale=SMALLEST,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=WINDOW,
            hysteresis=HYSTERESIS,
        )
        self.value = self._initial

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the backward pass begins with: megatron-core's `grad_scale_func`."""
        return cast(torch.Tensor, self._scale * loss)

    def update(self, found_inf: bool) -> None:
        """megatron-core's optimizers report what each of them found, of their own parameters: `note` decides."""

    def note(self, *, overflow: bool) -> None:
        """Follow an optimizer step: whether the gradient overflowed on any rank."""
        super().update(overflow)
        if overflow or self._growth_tracker == 0:  # otherwise it is the same, and reading it waits for the device
            self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the initial scale of the configuration no longer matters."""
        super().load_state_dict(state_dict)
        self._read()

    def _read(self) -> None:
        """Keep the number on the host: reading it back for every micro-batch would wait for the device."""
        self.value = float(self._scale)


def build_optimizer(
    model: BuiltModel, policy: PolicyConfig, config: OptimizerConfig, total_steps: int
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Optimizer and loss scale with fresh state, and the schedule over `total_steps` optimizer steps.

    By default megatron excludes one-dimensional parameters and biases from weight decay.
    """
    dtype = model.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=policy.use_distributed_optimizer,
        ),
        list(model.wrapped),
        config_overrides=None if config.weight_decay_of == "matrices" else {},
    )
    if (scale := model.loss_scale) is not None:
        scale.restart()
        for part in optimizer.chained_optimizers:
            part.grad_scaler = scale
    for group in optimizer.param_groups:
        if "fused" in group:  # torch's AdamW
            group["fused"] = True
    steps = max(total_steps, config.warmup_steps + 1)
    decaying = max(1, round(steps * config.decay_fraction))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style="WSD" if config.schedule == "wsd" else config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # A resumed run follows its own configuration, not the values stored in the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=decaying,
        lr_wsd_decay_style="linear",
    )
    return optimizer, scheduler


@dataclass(frozen=True)
class Gradient:
    """The gradient of a mini-batch, in the gradient buffers of all ranks, before clipping.

    norm: L2, over all ranks, as this one knows it; without the loss scale of float16. inf where a gradient is not
    finite with it.
    """

    mini_batch: MiniBatch
    collected: list[Collected]
    norm: float
    clock: Clock


class OptimizerSteps:
    """AdamW with fresh state and a schedule over `total_steps` optimizer steps; every method is collective.

    bad_in_a_row: consecutive steps that were not finite, in the phase of training before this one too.
    """

    def __init__(
        self,
        model: BuiltModel,
        policy: PolicyConfig,
        config: OptimizerConfig,
        total_steps: int,
        passes: Passes,
        bad_in_a_row: int,
    ) -> None:
        self.optimizer, self.scheduler = build_optimizer(model, policy, config, total_steps)
        self.weight_decay_of = config.weight_decay_of
        self._model = model
        self._total_steps = total_steps
        self._passes = passes
        self._most_bad_steps, self.bad_in_a_row = policy.max_bad_steps, bad_in_a_row

    def gradient(
        self, mini_batch: MiniBatch, loss_function: LossFunction, temperature: float | None = None
    ) -> Gradient:
        """Run the passes of a step. Neither weights nor optimizer state change."""
        clock = Clock(mini_batch.work.packing_s)
        with self._passes.memory.on_device():
            with device.scope():
                self.optimizer.zero_grad()
            with clock.busy():
                collected = self._passes.accumulate(mini_batch, loss_function, temperature)
                with device.scope():
                    # Megatron's `ChainedOptimizer.step` in two parts, as it does not check the norm before it steps.
                    overflow = self.optimizer.prepare_grads()
                    norm = math.inf if overflow else float(self.optimizer.get_grad_norm())
        return Gradient(mini_batch, collected, norm, clock)

    def apply(self, gradient: Gradient) -> Update:
        """Clip the gradient and step. A gradient that is not finite on any rank is dropped; see `Trainer.update`."""
        clock, scale = gradient.clock, self._model.loss_scale
        factor = None if scale is None else scale.value
        with self._passes.memory.in_use():
            stats, ranks, norms = self._passes.over_ranks(gradient.collected, gradient.mini_batch, gradient.norm)
            rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
            losses = {name: value for name, value in summarize(stats).items() if name.endswith("loss")}
            outcome = self._outcome(losses.values(), norms)
            if outcome is StepOutcome.APPLIED:
                with clock.busy():
                    self._step(gradient.norm)
            else:
                self.optimizer.zero_grad()
                self._model.zero_gradients()
            self._note(outcome, f"loss {losses}, gradient norm {gradient.norm}")
            # A skipped step counts as well: the schedule follows the batches, not the updates.
            self.scheduler.step(increment=1)
        work, tokens = gradient.mini_batch.work, gradient.mini_batch.denominators.tokens
        return Update(stats, gradient.norm, rate, work, *clock.read(), ranks, tokens, outcome, factor)

    def _outcome(self, losses: Collection[float], norms: Iterable[float]) -> StepOutcome:
        """Return what becomes of a step with these losses and norms of all ranks, so that all ranks agree."""
        if all(map(math.isfinite, [*losses, *norms])):
            return StepOutcome.APPLIED
        scale = self._model.loss_scale
        # The scale is to blame where the loss is finite, and a smaller scale exists.
        blamed = scale is not None and scale.value > SMALLEST and all(map(math.isfinite, losses))
        return StepOutcome.OVERFLOW if blamed else StepOutcome.BAD

    def _step(self, norm: float) -> None:
        """Clip the gradients by their global norm and step."""
        for part in self.optimizer.chained_optimizers:
            if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
        if not self.optimizer.step_with_ready_grads():
            raise RuntimeError("megatron's optimizer refused to step")

    def _note(self, outcome: StepOutcome, found: str) -> None:
        """Have the loss scale and the count of bad steps follow. Raises FloatingPointError at the limit of these."""
        if outcome is StepOutcome.BAD:
            self.bad_in_a_row += 1
            if (limit := self._most_bad_steps) <= self.bad_in_a_row:
                raise FloatingPointError(
                    f"an optimizer step is not finite ({found}), as {limit} in a row now (policy.max_bad_steps)"
                )
            log.warning("optimizer step skipped: not finite (%s); %d in a row now", found, self.bad_in_a_row)
            return
        if (scale := self._model.loss_scale) is not None:
            scale.note(overflow=outcome is StepOutcome.OVERFLOW)
        if outcome is StepOutcome.APPLIED:
            self.bad_in_a_row = 0
        else:
            log.info("optimizer step skipped: its gradient overflows; loss scale now %.0f", self._model.gradient_scale)

    def skip(self, steps: int) -> None:
        """Advance the schedule over optimizer steps that a short batch lacks."""
        if steps:
            self.scheduler.step(increment=steps)

    def set_schedule(self, fraction: float) -> None:
        """Move the learning-rate schedule to where `fraction` of its optimizer steps are done.

        After a load it is at the step count of the checkpoint's run, whose total may differ from this run's.
        """
        steps = round(fraction * self._total_steps)
        if steps != self.scheduler.num_steps:
            log.warning(
                "the schedule continues at optimizer step %d of %d, where the checkpoint's run had made %d",
                steps,
                self._total_steps,
                self.scheduler.num_steps,
            )
            self.scheduler.num_steps = steps
            self.scheduler.step(increment=0)

    def sharded_state(self, weights: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Return the state of the optimizer as megatron's sharded tensors. weights: of the model, in the same form."""
        # So that a checkpoint before the first step has the same tensors as any other.
        _fill_state(self.optimizer)
        state: dict[str, Any] = self.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        return state

    def load_state(self, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """Copy in what was loaded for `sharded_state`, and the state of the schedule."""
        rates = {name: self.optimizer.param_groups[0][name] for name in _RATES}
        for part in _parts(optimizer):
            # Megatron omits a step of 0 from a checkpoint (`if step:`), but AdamW cannot be loaded without it.
            if _inner_adamw(self.optimizer) and isinstance(part.get("state"), dict) and "param_groups" in part:
                part["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
            # All groups have the same rates, by which megatron-core 0.19 finds the group of a checkpoint, too.
            for group in part.get("param_groups", ()):
                group.update(rates)
        # megatron-core restores whole groups from a checkpoint, and its scheduler prefers their rates to its own.
        groups = self.optimizer.param_groups
        configured = [{name: group[name] for name in _CONFIGURED if name in group} for group in groups]
        self.optimizer.load_state_dict(optimizer)
        for group, values in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(values)
        # Loading makes all parameters share one `step` tensor on the host. It would advance once per parameter.
        for inner in _inner_adamw(self.optimizer):
            for parameter, state in inner.state.items():
                state["step"] = to_device(torch.as_tensor(state["step"]).clone(), parameter.device)
        self.scheduler.load_state_dict(scheduler)


def _inner_adamw(optimizer: ChainedOptimizer) -> list[torch.optim.AdamW]:
    return [each.optimizer for each in optimizer.chained_optimizers if isinstance(each.optimizer, torch.optim.AdamW)]


def _fill_state(optimizer: ChainedOptimizer) -> None:
    """Create the optimizer state that the first step would create, to save it or to load into it."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # a rank may have no dense, or no expert parameters
            part.init_state_fn(part.optimizer, part.config)
    for inner in _inner_adamw(optimizer):
        for parameter, state in inner.state.items():
            # Megatron's own function omits the per-parameter `step` of torch's AdamW, which counts on the device.
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))


def _parts(saved: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """The saved state and every dictionary within."""
    yield saved
    for inner in saved.values():
        if isinstance(inner, dict):
            yield from _parts(inner)
