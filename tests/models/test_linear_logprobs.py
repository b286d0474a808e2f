"""Log-probs, entropy and gradients computed tile by tile equal those from the matrix of all logits in float64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bandpo_cli.models import logprobs as module
from bandpo_cli.models.logprobs import linear_logprobs

N, H, V = 13, 12, 29


@pytest.fixture(params=[None, 4 * 40, 4 * 3], ids=["one-tile", "tiles", "threes"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set tile sizes of which neither the number of tokens nor the vocabulary is a multiple: 4 × 10 and 1 × 3."""
    if request.param:
        monkeypatch.setitem(module.TILE_BYTES, "cpu", request.param)


def inputs(bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(N, H, generator=generator)).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    offset = torch.randn(V, generator=generator).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, V, (N,), generator=generator)


def reference(
    hidden: Any, weight: Any, bias: Any, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs and both entropies from the matrix of all logits in float64."""
    offset = None if bias is None else bias.double()
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), offset)
    chosen = torch.log_softmax(logits / temperature, dim=-1)[range(len(targets)), targets]
    entropies = (torch.distributions.Categorical(logits=logits / t).entropy() for t in (1.0, temperature))
    return chosen, *entropies


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("temperature", "bias", "entropies"),
    [
        (1.0, True, (True, False)),
        (1.0, False, (False, False)),
        (0.6, True, (False, False)),
        (1.7, False, (True, False)),
        (1.0, True, (False, True)),
        (0.3, True, (False, True)),
        (1.7, False, (True, True)),
    ],
)
def test_values_and_gradients_equal_the_reference(temperature, bias, entropies):
    arguments = inputs(bias)
    found, expected = linear_logprobs(*arguments, temperature, *entropies), reference(*arguments, temperature)
    assert [entropy is not None for entropy in found[1:]] == [*entropies]
    for values, others in zip(found, expected, strict=True):
        if values is not None:
            torch.testing.assert_close(values.double(), others, atol=1e-5, rtol=1e-5)
    upstream, for_entropy = torch.linspace(-1, 2, N).double(), torch.linspace(3, -1, N).double()
    upstream[5:8] = 0  # the backward pass skips tokens without a gradient
    for_entropy[7:9] = 0
    totals = [(values[0] * upstream).sum() for values in (found, expected)]
    if entropies[1]:
        bonuses = [(values[2] * for_entropy).sum() for values in (found, expected)]
        totals = [*map(torch.add, totals, bonuses)]
    parameters = [tensor for tensor in arguments[:3] if tensor is not None]
    gradients, references = (torch.autograd.grad(total, parameters) for total in totals)
    for gradient, other in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5 * other.abs().max().item(), rtol=1e-4)


@pytest.mark.usefixtures("_tiles")
def test_gradient_of_one_input_when_the_other_is_frozen():
    hidden, weight, _, targets = inputs(bias=False)
    for frozen, trained in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        logprobs = linear_logprobs(hidden, weight, None, targets).logprobs
        expected, *_ = reference(hidden, weight, None, targets, 1.0)
        (gradient,) = torch.autograd.grad(logprobs.sum(), trained)
        (other,) = torch.autograd.grad(expected.sum(), trained)
        torch.testing.assert_close(gradient, other, atol=2e-5, rtol=1e-4)
        frozen.requires_grad_(True)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_large_logits_and_certain_tokens(size):
    """A certain token has log-prob 0 and entropy 0; large shifts of all logits do not overflow."""
    hidden = torch.tensor([[1.0, size], [1.0, -size]])
    weight = torch.zeros(V, 2)
    weight[:, 1] = 1.0  # the same large logit for all tokens
    weight[17, 0] = 200.0  # and a higher one for token 17
    targets = torch.tensor([17, 3])
    for temperature in (1.0, 0.5):
        logprobs, *entropies = linear_logprobs(hidden, weight, None, targets, temperature, True, True)
        expected = torch.tensor([0.0, -200.0 / temperature])
        torch.testing.assert_close(logprobs, expected, atol=size * 1e-6, rtol=1e-5)
        for entropy in entropies:
            torch.testing.assert_close(entropy, torch.zeros(2), atol=1e-5, rtol=0)


class LargestFloat32(TorchDispatchMode):
    """Record the bytes of the largest float32 tensor that an operator returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("tokens", "active"), [(5, 5), (300, 300), (300, 5), (300, 0)])
def test_no_pass_holds_all_logits_or_a_float32_copy_of_the_output_layer(monkeypatch, tokens, active):
    """The proportions of a 7B model on a GPU, all dimensions by 32: V = 152,064, H = 3,584, tiles of 8,192 rows."""
    vocabulary, width, tile = 4752, 112, 2**18
    monkeypatch.setitem(module.TILE_BYTES, "cpu", tile)  # 256 rows at most
    generator = torch.Generator().manual_seed(0)
    weight = (0.3 * torch.randn(vocabulary, width, generator=generator)).bfloat16().requires_grad_()
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.zeros(tokens)
    upstream[:active] = torch.linspace(-1, 2, active)
    with LargestFloat32() as largest:
        logprobs, _, entropy = linear_logprobs(hidden, weight, None, targets, 0.8, True, True)
        gradients = torch.autograd.grad(((logprobs + entropy) * upstream).sum(), (hidden, weight))
    assert 0 < largest.nbytes <= tile < 4 * vocabulary * width / 8
    assert tokens < 10 or tile < 4 * vocabulary * tokens / 8
    # The reference has the same rounded weights; only the gradients are rounded, once.
    expected, _, other_entropy = reference(hidden, weight, None, targets, 0.8)
    assert (logprobs.dtype, gradients[0].dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=1e-5)
    references = torch.autograd.grad(((expected + other_entropy) * upstream).sum(), (hidden, weight))
    for gradient, other in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-2, rtol=1e-2)
