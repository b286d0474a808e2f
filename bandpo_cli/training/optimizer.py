"""AdamW with warm-up and a schedule over updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from bandpo_cli.config.run import OptimConfig
from bandpo_cli.errors import RunError


def constant(progress: float) -> float:
    """Keep the rate."""
    return 1.0


def linear(progress: float) -> float:
    """Fall in a line to 0."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Fall along half a cosine to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def lr_factor(update: int, total_updates: int, config: OptimConfig) -> float:
    """Return the factor on `lr` for the update with this index (from 0): linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    left = max(1, total_updates - config.warmup_steps)
    return SCHEDULES[config.schedule](min(1.0, (update - config.warmup_steps) / left))


class Optimizer:
    """AdamW over a model's parameters.

    A parameter in a narrower type than float32 has a float32 master: its gradient is accumulated there and AdamW
    works on it, so that no small step and no small gradient is rounded away; the model gets the rounded result.

    Attributes:
        update: updates tried so far, skipped ones too: the schedule's place, and the version of the weights.
        skipped_in_a_row: how many of the latest updates were skipped.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, total_updates: int) -> None:
        self._config = config
        self._total = total_updates
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._names = list(trained)
        self._pairs = [(each, _master(each)) for each in trained.values()]
        self._parameters = [master for _, master in self._pairs]
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.update = 0
        self.skipped_in_a_row = 0

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._config.lr * lr_factor(self.update, self._total, self._config)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps beside the weights: AdamW's moments and masters of narrower parameters.

        The keys are `<parameter>.<moment>` and `<parameter>.master`; a parameter that never had a gradient has no
        moments. The tensors are the optimizer's own, not copies.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (parameter, master) in zip(self._names, self._pairs, strict=True):
            found |= {f"{name}.{moment}": each for moment, each in self._adamw.state[master].items()}
            if parameter is not master:
                found[f"{name}.master"] = master.detach()
        return found

    def load_state(self, state: Mapping[str, torch.Tensor], update: int, skipped_in_a_row: int) -> None:
        """Go on from the `state` after `update` updates; the model has the weights of then already.

        Raises:
            ValueError: the state is of another model.
        """
        masters = dict(zip(self._names, self._parameters, strict=True))
        narrow = {
            name for name, (each, master) in zip(self._names, self._pairs, strict=True) if each is not master
        }
        keys = [(key, *key.rpartition(".")[::2]) for key in state]
        strange = {name for _, name, _ in keys} - set(masters)
        strange |= narrow ^ {name for _, name, kind in keys if kind == "master"}
        if strange:
            raise ValueError(f"it is the state of other parameters or types ({min(strange)} among them)")
        for key, name, kind in keys:
            master, tensor = masters[name], state[key]
            if kind == "master":
                with torch.no_grad():
                    master.copy_(tensor)
            else:
                # AdamW counts its steps in a scalar that stays on the CPU, as in a run that was never stopped.
                self._adamw.state[master][kind] = tensor.to(master.device) if tensor.ndim else tensor
        self.update, self.skipped_in_a_row = update, skipped_in_a_row

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip the gradient, apply one update and return the gradient's norm before clipping.

        Raises:
            NonFiniteError: the norm is NaN or infinite; the weights are left as they were.
        """
        limit = self._config.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self._parameters, math.inf if limit is None else limit).item()
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}")
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                if parameter is not master:
                    parameter.copy_(master)
        self.update += 1
        self.skipped_in_a_row = 0
        return norm

    def skip(self) -> None:
        """Pass over an update: weights, masters and moments stay, the schedule goes on."""
        self.update += 1
        self.skipped_in_a_row += 1


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself, or for a narrower type its float32 copy, which takes over each gradient."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_over(narrow: torch.Tensor) -> None:
        assert narrow.grad is not None
        wide = narrow.grad.float()
        master.grad = wide if master.grad is None else master.grad.add_(wide)
        narrow.grad = None

    parameter.register_post_accumulate_grad_hook(take_over)  # type: ignore[no-untyped-call]
    return master


class NonFiniteError(RunError):
    """A loss, gradient or log-prob stopped being a number; raised before the weights are touched."""
