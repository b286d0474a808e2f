"""The part of the weight sync that runs inside vLLM's worker, beside the weights, and what both sides compute alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

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
            if name in held and _covers(tuple(held[name].shape), shape)
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


def _covers(held: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor of shape `held` has the rows of `shape`: vLLM pads an embedding's rows, a vector never."""
    if len(shape) == 1:
        return held == shape
    return len(held) == len(shape) and held[0] >= shape[0] and held[1:] == shape[1:]
