"""Custom methods: a user's policy loss, or a user's function from log π_old to the bounds of the ratio.

`bounds.method` is `module:name`, and `bounds.options` has the fields of the class `Options` of the loss, or the
function's arguments after the first. Every mistake is a ConfigError of one line with file and line of the user's code.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ValidationError, create_model
from pydantic_core import PydanticCustomError
from torch import Tensor

from bandpo_cli.bounds.arrays import Array, RatioBounds, as_array, cast, output_dtype
from bandpo_cli.bounds.intervals import BoundsFunction
from bandpo_cli.config.layers import validation_message
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, user_code
from bandpo_cli.methods.loss import IntervalLoss, LossBatch, PolicyLoss
from bandpo_cli.methods.settings import CustomSettings
from bandpo_cli.settings_validation import check_keys

_PROBABILITIES = (1e-9, 1e-6, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0)
"""Probabilities at which the bounds of a function are tried before a run."""


def custom_loss(settings: CustomSettings, objective: ObjectiveConfig) -> PolicyLoss:
    """Return the policy loss of a custom method; raise ConfigError if it cannot be created."""
    target, options = _load(settings)
    if not isinstance(target, type):
        return IntervalLoss(settings, objective)
    with user_code(_setting(settings), target):
        loss: PolicyLoss = target(settings.model_copy(update={"options": options}), objective)
    return loss


def custom_bounds(settings: CustomSettings) -> BoundsFunction:
    """Return the bounds of a custom function, which receives log π_old in float64 and returns (lower, upper).

    Each of the two is a tensor of the shape of log π_old, or a number. Types and devices are handled as in
    `band_bounds`; a log-prob that is NaN has the bounds at probability 1.

    Raises:
        ConfigError: the method is a class, or cannot be used; and, when the bounds are computed, the function raises an
            exception, or does not return 0 ≤ lower ≤ 1 ≤ upper.
    """
    function, options = _load(settings)
    if isinstance(function, type):
        raise ConfigError(f"{settings.method} has no interval of ratios: it is a class with its own loss")

    @torch.no_grad()
    def bounds(old_logprobs: Array) -> RatioBounds:
        x = as_array(old_logprobs)
        logprobs = torch.as_tensor(x).double().nan_to_num(nan=0.0).clamp(max=0.0)
        with user_code(_setting(settings), function):
            pair = _checked_bounds(function(logprobs, **dict(options)), logprobs)
        ends = pair if isinstance(x, Tensor) else [bound.numpy() for bound in pair]
        return RatioBounds(*(cast(end, output_dtype(x)) for end in ends))

    return bounds


def check_method(settings: CustomSettings, objective: ObjectiveConfig) -> CustomSettings:
    """Return the settings with all options, after a trial on a few tokens; raise ConfigError if it fails."""
    target, options = _load(settings)
    if isinstance(target, type):
        loss = custom_loss(settings, objective)
        with user_code(_setting(settings), target):
            _try_loss(loss)
    else:
        custom_bounds(settings)(torch.tensor(_PROBABILITIES, dtype=torch.float64).log())
    return settings.model_copy(update={"options": options.model_dump(mode="json")})


def _setting(settings: CustomSettings) -> str:
    return f"bounds.method = '{settings.method}'"


def _load(settings: CustomSettings) -> tuple[Callable[..., Any], BaseModel]:
    """Return the user's class or function, and its validated options."""
    target = load_setting("bounds.method", settings.method)
    with user_code(_setting(settings), target):
        if not isinstance(target, type):
            fields = _options_of(target)
        elif issubclass(target, PolicyLoss):
            fields = target.Options
        else:
            advice = "derive it from bandpo_cli.methods.loss.PolicyLoss, or name a function of the bounds"
            raise ValueError(f"the class is no PolicyLoss; {advice}")
        if not issubclass(fields, BaseModel):
            raise ValueError("its Options must be a subclass of pydantic.BaseModel")
    try:
        check_keys(fields, settings.options, f" of '{settings.method}'")
        return target, fields.model_validate(settings.options)
    except PydanticCustomError as error:
        raise ConfigError(f"bounds.options.{error}") from None
    except ValidationError as error:
        raise ConfigError(validation_message(error, within=("bounds", "options"))) from None


def _options_of(function: Callable[..., Any]) -> type[BaseModel]:
    """Return a class with a field for each argument after the first, of the type of its default."""
    _, *others = inspect.signature(function).parameters.values()
    fields: dict[str, Any] = {
        item.name: (Any, ...) if item.default is item.empty else (type(item.default), item.default)
        for item in others
    }
    return create_model("Options", **fields)


def _checked_bounds(returned: Any, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's bounds as tensors of the shape of `logprobs`; raise ValueError for other results."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(f"it must return (lower, upper), not a {type(returned).__name__}")
    pair, shape = [torch.as_tensor(bound).to(logprobs) for bound in returned], logprobs.shape
    if wrong := [[*bound.shape] for bound in pair if bound.shape not in ((), shape)]:
        raise ValueError(f"it must return bounds of the shape of log π_old, {[*shape]}, not {wrong[0]}")
    lower, upper = (bound.expand(shape) for bound in pair)
    valid = (lower >= 0) & (lower <= 1) & (upper >= 1)
    if not valid.all():
        low, high, p = (values[~valid][0].item() for values in (lower, upper, logprobs.exp()))
        returns = f"it returned lower = {low:g} and upper = {high:g} for a token of probability {p:g}"
        raise ValueError(f"{returns}; 0 ≤ lower ≤ 1 ≤ upper is required")
    return lower, upper


def _try_loss(loss: PolicyLoss) -> None:
    """Compute the loss of five tokens of two completions, and its gradient; raise ValueError for no loss."""
    advantages, lengths = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]), torch.tensor([2, 3])
    old_logprobs = torch.tensor([-0.1, -2.0, -0.5, -5.0, -1.0])
    logprobs = (old_logprobs + torch.tensor([0.05, 0.5, -0.4, 1.0, -0.7])).requires_grad_()
    columns = loss.prepare(old_logprobs, advantages)
    losses = loss.token_losses(logprobs, LossBatch(lengths, advantages, old_logprobs, columns))
    for name, values in {"token_losses": losses, **columns}.items():
        shape = [*values.shape] if isinstance(values, Tensor) else type(values).__name__
        if shape != [5]:
            raise ValueError(f"{name} must have a value per token, shape [5] for 5 tokens, not {shape}")
    if not losses.requires_grad:
        raise ValueError("token_losses has no gradient: compute it from the argument logprobs")
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    if not (losses.isfinite() & gradient.isfinite()).all():
        raise ValueError(f"the losses {losses.tolist()} or their gradients are not finite")
