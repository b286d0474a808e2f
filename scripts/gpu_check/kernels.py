"""Checks of kernels: the Band operator against a memory copy, tiled against full log-probs, kinds of attention."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.gpu_check.results import Measured
from scripts.gpu_check.work import Work

MAX_COPIES = {"cuda": 150.0, "cpu": 1000.0}
"""Largest time of the operator in copies of the log-probs, by device type. Its tensor operations read and write 42 (kl)
and 45 (tv) times the bytes of a copy, which is the time on a GPU if memory limits them (an H100: 34 and 31); on a CPU
arithmetic limits them (docs/results/benchmarks.md)."""
MAX_LOGPROB_DIFFERENCE = 1e-2
"""Largest difference of a log-prob in nats from float32: products of bfloat16 factors are exact in it, sums round."""
MAX_GRADIENT_DIFFERENCE = 2e-2
"""Largest norm of a gradient's difference over the gradient's norm: one rounding to bfloat16 is 2^-9 = 0.002."""
MAX_ATTENTION_GAP = 0.05
"""Largest mean difference between log-probs of two attention kernels in bfloat16, nats. Not measured yet."""
MAX_TILED_TIME = 2.0
"""Largest time of tiled log-probs over that of full ones, on a GPU. The tiles take four products instead of three."""
MAX_TILED_MEMORY = 0.5
"""Largest additional peak memory of tiled log-probs over that of full ones, on a GPU."""

HEAD_MIB = (16, 32, 64, 128, 256, 512)
"""Sizes of tiles that `check_head` compares; an H100's L2 cache has 50 MB."""
SMALL_CARD_BYTES = 40 * 2**30
"""On a smaller card a quarter of the tokens is computed: full log-probs of all take 20 GiB."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def seconds_of(function: Callable[[], object], device: str, rounds: int = 5) -> float:
    """Return the median seconds of a call, after one call that is not timed."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    function()
    found = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def check_operator(work: Work) -> Measured:
    """Time the Band operator per million tokens, against a copy of the log-probs."""
    from bandpo_cli.bounds import band_bounds

    tokens = work.size.operator_tokens
    generator = torch.Generator().manual_seed(0)
    logprobs = (-40.0 * torch.rand(tokens, generator=generator) ** 6).to(work.device)
    measured = Measured({"tokens": tokens})
    copy = seconds_of(logprobs.clone, work.device)
    measured.values["copy_ms_per_million"] = 1e9 * copy / tokens
    device_type = torch.device(work.device).type
    for name in ("kl", "tv"):
        taken = seconds_of(lambda name=name: band_bounds(logprobs, name, 0.05), work.device)
        measured.values[f"{name}_ms_per_million"] = 1e9 * taken / tokens
        measured.values[f"{name}_copies"] = taken / copy
        if not work.tiny:
            measured.at_most(f"{name}_copies", MAX_COPIES[device_type])
        bounds = band_bounds(logprobs, name, 0.05)
        ordered = bool(((bounds.lower <= 1) & (bounds.upper >= 1)).all())
        measured.values[f"{name}_bounds_contain_1"] = ordered
        measured.equal(f"{name}_bounds_contain_1", True)
    return measured


def check_logprobs(work: Work, shape: str) -> Measured:
    """Compare tiled with full log-probs of the output layer: values, gradients, time and peak memory."""
    model = work.shapes[shape]
    tokens = work.size.logprob_tokens
    if work.on_gpu and torch.cuda.get_device_properties(work.device).total_memory < SMALL_CARD_BYTES:
        tokens //= 4
    inputs = _inputs(tokens, model["vocab_size"], model["hidden_size"], work.device)
    expected, found = _run(_exact, inputs), _run(_tiled, inputs)
    values, hidden, weight = (
        _difference(found[index], expected[index], relative=index > 0) for index in range(3)
    )
    del expected, found
    measured = Measured(
        {
            "tokens": tokens,
            "vocabulary": model["vocab_size"],
            "max_difference_nats": values,
            "hidden_gradient_difference": hidden,
            "weight_gradient_difference": weight,
        }
    )
    measured.at_most("max_difference_nats", MAX_LOGPROB_DIFFERENCE)
    measured.at_most("hidden_gradient_difference", MAX_GRADIENT_DIFFERENCE)
    measured.at_most("weight_gradient_difference", MAX_GRADIENT_DIFFERENCE)
    for name, function in (("full", _full), ("tiled", _tiled)):
        measured.values[f"{name}_ms"] = 1e3 * seconds_of(lambda f=function: _run(f, inputs), work.device, 3)
        if work.on_gpu:
            measured.values[f"{name}_peak_gib"] = _peak_gib(lambda f=function: _run(f, inputs))
    measured.values["tiled_over_full_time"] = measured.values["tiled_ms"] / measured.values["full_ms"]
    if work.on_gpu and not work.tiny:
        measured.at_most("tiled_over_full_time", MAX_TILED_TIME)
        ratio = measured.values["tiled_peak_gib"] / measured.values["full_peak_gib"]
        measured.values["tiled_over_full_memory"] = ratio
        measured.at_most("tiled_over_full_memory", MAX_TILED_MEMORY)
    return measured


def check_head(work: Work, shape: str) -> Measured:
    """Time log-probs of the output layer, forward and backward: sizes of tiles, and other kernels where installed.

    The time of the best size is the reason for a value of `model.head`. The last values are the largest differences
    from log-probs in float32, which are 0 for an exact kernel but for rounding.
    """
    from bandpo_cli.models.logprobs import TILE_BYTES, linear_logprobs

    model, tokens = work.shapes[shape], work.size.logprob_tokens
    if work.on_gpu and torch.cuda.get_device_properties(work.device).total_memory < SMALL_CARD_BYTES:
        tokens //= 4
    inputs = _inputs(tokens, model["vocab_size"], model["hidden_size"], work.device)
    expected = _exact(inputs).detach()
    own = TILE_BYTES[torch.device(work.device).type] >> 20
    kernels: dict[str, Callable[[Inputs], torch.Tensor]] = {}
    for size in sorted({*((1, 2) if work.tiny else HEAD_MIB), own}):
        kernels[f"tiles_{size}_mib"] = lambda values, size=size: (
            linear_logprobs(*values[:2], None, values[2], tile_bytes=size << 20).logprobs
        )
    kernels |= {"liger": _liger, "trl": _trl}
    measured, times = Measured({"tokens": tokens, "auto_mib": own}), {}
    for name, function in kernels.items():
        try:
            found = _run(function, inputs)[0]
        except (
            ImportError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # not installed, or not for this device
            if name.startswith("tiles"):
                raise
            measured.values[f"{name}_left_out"] = f"{type(error).__name__}: {error}"[:80]
            continue
        seconds = seconds_of(lambda f=function: _run(f, inputs), work.device, 3)
        times[name] = measured.values[f"{name}_us_per_token"] = 1e6 * seconds / tokens
        measured.values[f"{name}_gap_nats"] = (found - expected).abs().max().item()
        if name.startswith("tiles"):
            measured.at_most(f"{name}_gap_nats", MAX_LOGPROB_DIFFERENCE)
    measured.values["fastest"] = min(times, key=times.__getitem__)
    return measured


def _liger(inputs: Inputs) -> torch.Tensor:
    """Return the log-probs of Liger, whose kernel for Hopper needs `liger-kernel[cutedsl]`; elsewhere logits round."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    hidden, weight, targets, _ = inputs
    nll: torch.Tensor = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)
    return -nll


def _trl(inputs: Inputs) -> torch.Tensor:
    """Return the log-probs of TRL's kernel."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, targets, _ = inputs
    options = (1.0, 32_768, None, 1.0, ("log_probs",))
    logprobs: torch.Tensor = ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)[0]
    return logprobs


def _inputs(tokens: int, vocabulary: int, width: int, device: str) -> Inputs:
    """Return hidden states and weights in bfloat16, targets, and the gradient of the log-probs."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = normal(tokens, width).to(torch.bfloat16).requires_grad_()
    weight = (0.05 * normal(vocabulary, width)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    return hidden, weight, targets, normal(tokens)


def _exact(inputs: Inputs) -> torch.Tensor:
    """Return the log-probs from the matrix of all logits, computed in float32."""
    hidden, weight, targets, _ = inputs
    logits = hidden.float() @ weight.float().t()
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def _full(inputs: Inputs) -> torch.Tensor:
    """Return the log-probs from the matrix of all logits as trainers compute it: products in 16 bits."""
    hidden, weight, targets, _ = inputs
    return torch.log_softmax((hidden @ weight.t()).float(), dim=-1).gather(1, targets[:, None]).squeeze(1)


def _tiled(inputs: Inputs) -> torch.Tensor:
    """Return the log-probs of the package."""
    from bandpo_cli.models.logprobs import linear_logprobs

    hidden, weight, targets, _ = inputs
    return linear_logprobs(hidden, weight, None, targets)[0]


def _run(
    function: Callable[[Inputs], torch.Tensor], inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probs and the gradients of hidden states and weights."""
    logprobs = function(inputs)
    hidden, weight = torch.autograd.grad(logprobs, inputs[:2], inputs[3])
    return logprobs.detach(), hidden, weight


def _difference(one: torch.Tensor, other: torch.Tensor, relative: bool) -> float:
    """Return the largest difference, or the norm of the difference over the norm."""
    gap = one.float() - other.float()
    return (gap.norm() / other.float().norm()).item() if relative else gap.abs().max().item()


def _peak_gib(function: Callable[[], object]) -> float:
    """Return the peak of the memory that a call adds, GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def check_attention(work: Work) -> Measured:
    """Compare attention kernels on packed rows: time of a forward and backward pass, and log-probs against sdpa."""
    from bandpo_cli.errors import UserError
    from bandpo_cli.models.load import load_policy
    from bandpo_cli.models.logprobs import token_logprobs
    from bandpo_cli.models.packing import Row, collate

    size = work.size
    lengths = [size.max_tokens * (index + 1) // size.samples for index in range(size.samples)]
    prompt, tokens = [5] * size.prompt_chars, [6] * size.max_tokens
    rows = [Row(prompt, [tokens[:length]]) for length in lengths]
    measured, expected = Measured({"tokens": sum(map(len, rows))}), None
    for kind in ("sdpa", "varlen", "flash_attention_2", "flash_attention_3"):
        try:
            model = load_policy(work.config("0.5b", model={"attention": kind}).model).model
        except UserError as error:  # it needs a package, or a GPU, that is not there
            measured.values[f"{kind}_left_out"] = str(error)
            continue
        batch = collate(rows, model.device)

        def run(model: Any = model, batch: Any = batch) -> torch.Tensor:
            logprobs = token_logprobs(model, batch).logprobs
            logprobs.sum().backward()
            return logprobs.detach()

        logprobs = run()
        expected = logprobs if expected is None else expected
        measured.values[f"{kind}_ms"] = 1e3 * seconds_of(run, work.device, 3)
        measured.values[f"{kind}_gap_nats"] = (logprobs - expected).abs().mean().item()
        measured.at_most(f"{kind}_gap_nats", MAX_ATTENTION_GAP)
    return measured
