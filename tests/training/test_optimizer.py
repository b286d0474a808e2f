"""AdamW with masters: its definition, its memory, and the place of its state."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.training import optimizer as optimizer_module
from bandpo_cli.training.optimizer import FUSED_DEVICES, NonFiniteError, Optimizer
from tests.conftest import random_model
from tests.models.allocations import peak_bytes

CONFIG = OptimConfig(
    lr=1e-2, warmup_steps=0, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=None
)


def with_gradients(
    model: nn.Module, seed: int, scaler: GradScaler | None = None, factor: float = 1.0
) -> None:
    """Backpropagate a random gradient, times the scale and `factor`, to every parameter."""
    torch.manual_seed(seed)
    total: Any = sum((parameter * torch.randn_like(parameter)).sum() for parameter in model.parameters())
    (total if scaler is None else scaler.scale(total.float()) * factor).backward()


def finite(norm: torch.Tensor) -> float:
    """Return the norm; raise NonFiniteError if it is not finite."""
    if not torch.isfinite(norm):
        raise NonFiniteError("the norm is infinite")
    return norm.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_follow_the_definition_of_adamw(dtype):
    """Loshchilov and Hutter 2019, in float64 from the same gradients; those of float16 are too large by a scale."""
    model = random_model().to(dtype)
    optimizer = Optimizer(model, CONFIG, total_updates=10)
    assert optimizer.scaler.get_scale() == (65536 if dtype == torch.float16 else 1)
    optimizer.scaler.load_state_dict(optimizer.scaler.state_dict() | {"scale": 4.0})
    (beta1, beta2), weights = CONFIG.betas, [item.detach().double() for item in model.parameters()]
    means, squares = ([torch.zeros_like(item) for item in weights] for _ in range(2))
    for number in range(1, 4):
        optimizer.zero_grad()
        with_gradients(model, number, optimizer.scaler)
        gradients = [item.grad.double() for item in optimizer._parameters if item.grad is not None]
        gradients = [gradient / optimizer.scaler.get_scale() for gradient in gradients]
        optimizer.step()
        for weight, mean, square, gradient in zip(weights, means, squares, gradients, strict=True):
            mean.mul_(beta1).add_((1 - beta1) * gradient)
            square.mul_(beta2).add_((1 - beta2) * gradient**2)
            unbiased, scale = mean / (1 - beta1**number), (square / (1 - beta2**number)).sqrt() + CONFIG.eps
            weight.mul_(1 - CONFIG.lr * CONFIG.weight_decay).sub_(CONFIG.lr * unbiased / scale)
    for parameter, master, weight in zip(model.parameters(), optimizer._parameters, weights, strict=True):
        torch.testing.assert_close(master.double(), weight, atol=1e-6, rtol=1e-5)
        assert torch.equal(parameter, master.to(dtype))


def test_the_loss_scale_doubles_after_updates_without_overflow(monkeypatch):
    """And is halved by an overflow, from which the count starts again, down to 1."""
    monkeypatch.setattr(optimizer_module, "GROWTH_UPDATES", 3)
    model = random_model().half()
    optimizer = Optimizer(model, CONFIG, total_updates=10)
    scales = []
    for factor in (0.01, 0.01, math.inf, 0.01, 0.01, 0.01):
        optimizer.zero_grad()
        with_gradients(model, 0, optimizer.scaler, factor)
        try:
            optimizer.step(finite)
        except NonFiniteError:
            optimizer.skip(overflow=True)
        scales.append(optimizer.scaler.get_scale() / 65536)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1]
    assert (optimizer.update, optimizer.skipped_in_a_row) == (6, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_allocates_no_copy_of_the_parameters(dtype):
    """The memory estimate has no term for it; torch's other implementations take up to 4 bytes per parameter."""
    model = random_model().to(dtype)
    optimizer = Optimizer(model, CONFIG, total_updates=10)
    with_gradients(model, 1)
    optimizer.step()  # allocates the moments
    optimizer.zero_grad()
    with_gradients(model, 2)
    assert peak_bytes(optimizer.step) < 0.02 * 4 * sum(parameter.numel() for parameter in model.parameters())


def test_gradients_of_micro_batches_add_up_in_float32_without_a_copy():
    """1 + 2⁻⁹ has no bfloat16 number; the sum of the float32 values of both gradients is exact."""
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model, CONFIG, total_updates=1)
    for value in (1.0, 2.0**-9):
        (model.weight * value).sum().backward()
    (master,) = optimizer._parameters
    assert master.grad.dtype == torch.float32
    assert torch.equal(master.grad, torch.full((4, 4), 1 + 2.0**-9))
    assert model.weight.grad is None


@pytest.mark.parametrize(("devices", "expected"), [(FUSED_DEVICES, "cpu"), (("meta",), "meta"), ((), "cpu")])
def test_the_step_count_is_loaded_to_where_the_kernel_reads_it(monkeypatch, devices, expected):
    """The fused kernel takes the step count from the device of the parameters, the other ones from the CPU."""
    monkeypatch.setattr(optimizer_module, "FUSED_DEVICES", devices)
    on = "cpu" if devices == FUSED_DEVICES else "meta"
    model = nn.Linear(3, 3, bias=False, device=on)
    optimizer = Optimizer(model, CONFIG, total_updates=1)
    moments = {f"weight.{name}": torch.zeros(3, 3) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.load_state({"weight.step": torch.tensor(5.0), **moments}, update=5, skipped_in_a_row=0)
    state = optimizer.state()
    assert state["weight.step"].device.type == expected
    assert state["weight.exp_avg"].device.type == on
