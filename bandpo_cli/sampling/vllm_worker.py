"""An engine in the trainer's process, without leaving its marks there."""

# MERGED: The part of the weight sync that runs inside vLLM's worker, beside the weights, and what both sides compute alike.
from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

_INHERITED_VARIABLES = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. What the user has set stays, the engine's process apart."""
    # The weights are handed over as tensors, so the engine has to live in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Undo what the start of an engine changes for the whole process.

    vLLM replaces torch.set_num_threads on a CPU and sets the number to 1 on a GPU, may bind the process to cores,
    seeds torch's generators, and preloads libraries into every process started later (the graders, for one).
    """
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    environment = {name: os.environ.get(name) for name in _INHERITED_VARIABLES}
    try:
        with torch.random.fork_rng(
            devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []
        ):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        if cores is not None and os.sched_getaffinity(0) != cores:
            os.sched_setaffinity(0, cores)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def engine_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads, and put torch's CPU dice back as they were.

    What was compiled under one number of threads would be compiled again under another. On a CPU the engine throws
    torch's own dice even where every request has a seed.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@contextmanager
def stderr_on_failure() -> Iterator[None]:
    """Hold back what compiled code writes to standard error, and print it only when the block fails.

    A logging level of the user's own (VLLM_LOGGING_LEVEL below ERROR) says that the engine's words are wanted.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") not in ("ERROR", "CRITICAL"):
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(original, held.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


Weights = list[tuple[str, torch.Tensor]]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMBEDDING_ROWS = 1024


class PolicyWorker:
    """What vLLM's worker class is extended by (`worker_extension_cls`), so that it is there on every GPU.

    The names start with `policy_` since vLLM refuses an extension that hides anything of its own.
    """

    policy_version: int | None = None

    if TYPE_CHECKING:
        model_runner: Any

        def reload_weights(self, **kwargs: Any) -> None: ...

    def policy_load(self, weights: Weights, version: int) -> list[str]:
        """Load a whole set of weights through vLLM's own loader and stamp `version` when it is done.

        Returns:
            What was left out, one line each: tensors that the loader did not ask for, parameters of the engine that
            it did not fill. Then there is no stamp.
        """
        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        given, loaded = {name for name, _ in weights}, set[str]()
        self.policy_version = None
        load_weights = model.load_weights

        def recorded(iterator: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            names: set[str] | None = load_weights(iterator)
            # A few architectures do not say what they loaded: nothing can be missed there.
            loaded.update(wanted if names is None else names)
            return names

        def asked_for() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                given.discard(name)
                yield name, tensor

        model.load_weights = recorded  # vLLM only logs a warning of what it did not load
        try:
            self.reload_weights(weights_iterator=asked_for())
        finally:
            del model.load_weights
        _repack_tied(model)
        left_out = [f"{name} was not read" for name in sorted(given)]
        left_out += [f"{name} was not filled" for name in sorted(wanted - loaded)]
        if not left_out:
            self.policy_version = version
        return left_out

    def policy_state(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int | None, dict[str, int]]:
        """Return the version stamped last, and fingerprints of those tensors that are held whole, by name."""
        held = dict(self.model_runner.get_model().named_parameters())
        found = {
            name: fingerprint(held[name], shape)
            for name, shape in shapes.items()
            if name in held and _has_rows(tuple(held[name].shape), shape)
        }
        return self.policy_version, found


def policy_weights(model: nn.Module) -> Weights:
    """Return the weights as a checkpoint names them, tied ones once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def compared_shapes(weights: Weights, tensor_parallel: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors that vLLM neither fuses nor repacks: the vectors and the embedding's rows.

    Vectors are norm weights and biases. Of the embedding the first rows are taken, and none where it is spread over
    GPUs. What the engine holds in another shape is left out by `policy_state`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in weights:
        if tensor.ndim == 1:
            shapes[name] = tuple(tensor.shape)
        elif tensor.ndim == 2 and "embed" in name and tensor_parallel == 1:
            shapes[name] = (min(len(tensor), _EMBEDDING_ROWS), tensor.shape[1])
    return shapes


@torch.no_grad()
def fingerprint(tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Return a 64-bit sum over the bits of the first `shape[0]` rows, each weighted by its place.

    Whole-number arithmetic: the same on every device, and different when any one bit is.
    """
    rows = tensor.detach()[: shape[0]].contiguous()
    bits = rows.view(_BITS[rows.element_size()]).flatten().to(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int((bits * places).sum())


def _repack_tied(model: nn.Module) -> None:
    """Pack tied output layers anew on a CPU.

    There a layer multiplies by a packed copy of its weight, made after loading. A tied layer loads nothing of its own,
    so vLLM 0.32's reload leaves its copy as it was: the old output layer upon a new trunk.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        if weight.data_ptr() in seen:
            cast(Any, module.quant_method).process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def _has_rows(held: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor of shape `held` has the rows of `shape`: vLLM pads an embedding's rows, a vector never."""
    if len(shape) == 1:
        return held == shape
    return len(held) == len(shape) and held[0] >= shape[0] and held[1:] == shape[1:]
