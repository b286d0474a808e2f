"""AdamW with float32 master weights, warm-up and a learning-rate schedule over updates."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.profiler import record_function
from transformers import PreTrainedModel

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.errors import RunError
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.models.weights import forward_dtype, full_tensor, is_sharded

FUSED_DEVICES = ("cpu", "cuda")  # Device types for which torch's AdamW has a fused kernel


UNCLIPPED = 0.999  # Share of `optim.max_grad_norm` up to which torch would multiply the gradient by exactly 1


class NonFiniteError(RunError):
    """A loss, gradient, log-prob or weight is NaN or infinite; raised before the weights change."""


class GradientNormError(NonFiniteError):
    """The norm of the gradient is NaN or infinite, although log-probs and loss are finite."""


GROWTH_UPDATES = 400
"""Updates without an overflow after which the factor on the loss of a model in float16 doubles, as in verl 0.9.1."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Factors on the learning rate by `optim.schedule`; the progress after the warm-up runs from 0 to 1."""


def lr_factor(update: int, total_updates: int, config: OptimConfig) -> float:
    """Return the factor on `optim.lr` for update number `update` (from 0): linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    left = max(1, total_updates - config.warmup_steps)
    return SCHEDULES[config.schedule](min(1.0, (update - config.warmup_steps) / left))


class Optimizer:
    """AdamW over a model's parameters that require a gradient.

    A parameter of a narrower type than float32 has a float32 master copy: the gradient is accumulated in the master
    and AdamW updates it, so that small gradients and steps are not lost to rounding. The model receives the rounded
    result.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, total_updates: int) -> None:
        """Create the optimizer; the learning-rate schedule is `total_updates` long."""
        self._config, self._total = config, total_updates
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._masters = {name: _master(parameter) for name, parameter in trained.items()}
        self._parameters = [*self._masters.values()]
        pairs = zip(trained.values(), self._parameters, strict=True)
        self._narrow = [(parameter, master) for parameter, master in pairs if parameter is not master]
        # The weights of a sharded model are rounded in a checkpoint.
        saved = forward_dtype(cast(PreTrainedModel, model)) if is_sharded(model) else None
        self._with_master = {
            name for name, master in self._masters.items() if master.dtype != (saved or trained[name].dtype)
        }
        is_float16 = torch.float16 in {saved, *(parameter.dtype for parameter in trained.values())}
        device = self._parameters[0].device.type
        # The factor on the loss of a model in float16, whose smallest gradients would become 0 without it.
        self.scaler = GradScaler(device, growth_interval=GROWTH_UPDATES, enabled=is_float16)
        self._fused = all(parameter.device.type in FUSED_DEVICES for parameter in self._parameters)
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            # One kernel over all parameters, without temporary copies: the other implementations allocate up to 4 more
            # bytes per parameter.
            fused=self._fused,
        )
        self.update = 0  # with skipped ones: the position in the schedule, and the version of the weights
        self.skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update."""
        return self._config.lr * lr_factor(self.update, self._total, self._config)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer state of a checkpoint, not copied: AdamW's moments and the masters of narrower weights.

        The keys are `<parameter>.<moment>` and `<parameter>.master`, for any number of ranks; a parameter that never
        had a gradient has no moments. Those of a sharded model are DTensors, except the scalars.
        """
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state |= {f"{name}.{moment}": value for moment, value in self._adamw.state[master].items()}
            if name in self._with_master:
                state[f"{name}.master"] = master.detach()
        return state

    def empty_state(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return tensors for `load_state` to read a saved state of these shapes into: masters, and new moments.

        Raises:
            ValueError: the state belongs to a model with other parameters or types.
        """
        self._check_keys(shapes)
        state: dict[str, Tensor] = {}
        for key, shape in shapes.items():
            name, _, kind = key.rpartition(".")
            master = self._masters[name].detach()
            moment = torch.empty_like(master) if shape else torch.zeros(())
            state[key] = master if kind == "master" else moment
        return state

    def load_state(self, state: Mapping[str, Tensor], update: int, skipped_in_a_row: int) -> None:
        """Load the state saved after `update` updates; the model must have the weights of that checkpoint.

        Raises:
            ValueError: the state belongs to a model with other parameters or types.
        """
        self._check_keys(state)
        for key, tensor in state.items():
            name, _, kind = key.rpartition(".")
            master = self._masters[name]
            if kind == "master":
                master.detach().copy_(tensor)
            else:
                # AdamW keeps its step count on the CPU, unless the fused kernel reads it.
                stays = tensor.ndim == 0 and not self._fused
                self._adamw.state[master][kind] = tensor if stays else tensor.to(master.device)
        self.update, self.skipped_in_a_row = update, skipped_in_a_row

    def _check_keys(self, keys: Iterable[str]) -> None:
        """Raise ValueError if the keys of a saved state belong to a model with other parameters or types."""
        parts = [key.rpartition(".") for key in keys]
        mismatched = {name for name, _, _ in parts} - self._masters.keys()
        mismatched |= self._with_master ^ {name for name, _, kind in parts if kind == "master"}
        if mismatched:
            others = f"other parameters or types ({min(mismatched)} among them)"
            raise ValueError(f"the optimizer state belongs to {others}")

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self._adamw.zero_grad(set_to_none=True)

    @record_function(f"{PROFILER_PREFIX}optimizer")
    def step(self, check: Callable[[Tensor], float] = float) -> float:
        """Clip the gradient to `optim.max_grad_norm`, apply one update and return the norm before clipping.

        It is that of the complete gradient, also for a sharded model. `check` is called with it before the weights
        change, returns its value, and may raise NonFiniteError.
        """
        limit = math.inf if self._config.max_grad_norm is None else self._config.max_grad_norm
        gradients = [item.grad for item in self._parameters if item.grad is not None]
        self.scaler.unscale_(self._adamw)
        total = nn.utils.get_total_norm(gradients)
        norm = check(full_tensor(total))
        if norm > UNCLIPPED * limit:
            nn.utils.clip_grads_with_norm_(self._parameters, limit, total)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.scaler.update()
        if self._narrow:
            with torch.no_grad():
                parameters, masters = zip(*self._narrow, strict=True)
                torch._foreach_copy_([*parameters], [*masters])
        self.update += 1
        self.skipped_in_a_row = 0
        return norm

    def skip(self, overflow: bool = False) -> None:
        """Skip an update: weights, masters and moments stay, the learning-rate schedule advances.

        After an overflow in float16 the factor on the loss is halved, and the update is not a part of
        `skipped_in_a_row`.
        """
        self.scaler.update(None if overflow else self.scaler.get_scale())
        self.update += 1
        self.skipped_in_a_row += not overflow


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself, or for a type narrower than float32 a float32 copy that accumulates its gradient."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def accumulate_in_master(narrow: Tensor) -> None:
        assert narrow.grad is not None
        # Added without a float32 copy of it, which would take 4 bytes per element of the largest parameter.
        master.grad = narrow.grad.float() if master.grad is None else master.grad.add_(narrow.grad)
        narrow.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate_in_master)  # type: ignore[no-untyped-call]
    return master
