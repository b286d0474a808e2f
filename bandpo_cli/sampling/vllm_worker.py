"""vLLM in the trainer's process: protection of the process's state, and vLLM's side of the weight sync.

The context managers undo what vLLM changes for the complete process. `PolicyWorker` runs inside vLLM's workers, where
the weights are. `ComparedWeights` is the trainer's side of the comparison after a sync.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]  # Tensors under their names in a checkpoint

_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_ROWS = 1024  # Rows of a matrix that are compared after a sync
_INHERITED_VARIABLES = ("LD_PRELOAD", "LD_LIBRARY_PATH")
"""Environment variables that vLLM sets and every process started later inherits."""


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads at import; keep the user's values, except of multiprocessing."""
    # The weights are passed as tensors, so the engine must run in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the process-wide state that the start of an engine changes.

    vLLM replaces torch.set_num_threads on a CPU and sets the number to 1 on a GPU, may bind the process to cores,
    seeds torch's generators, and preloads libraries into every process started later (the graders, for example).
    """
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(gpus), vllm_kernels():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        if cores is not None and os.sched_getaffinity(0) != cores:
            os.sched_setaffinity(0, cores)
        for name in _INHERITED_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)


@contextmanager
def vllm_kernels() -> Iterator[None]:
    """Turn torch's deterministic mode off: vLLM has kernels of its own for it, and is not tested with that mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def preserve_process_group() -> Iterator[None]:
    """Keep the process group that connects the ranks of the run: vLLM destroys it where an engine ends."""
    if not dist.is_initialized():
        yield
        return
    destroy, default = dist.destroy_process_group, dist.group.WORLD

    def destroy_others(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not default:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


@contextmanager
def engine_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads, and restore torch's CPU random state afterwards.

    vLLM compiles its code again if the number of threads changes. On a CPU the engine uses torch's global random
    state even if every request has a seed.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.random.fork_rng(devices=[]), vllm_kernels():
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stderr_on_failure() -> Iterator[None]:
    """Buffer what compiled code writes to standard error, and print it only if the block raises.

    Nothing is buffered if the user has set VLLM_LOGGING_LEVEL to a level below ERROR to read the engine's messages.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") not in ("ERROR", "CRITICAL"):
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except BaseException:
            buffer.seek(0)
            os.write(original, buffer.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


class PolicyWorker:
    """Extension of vLLM's worker class (`worker_extension_cls`), so that these methods exist on every GPU.

    The names start with `policy_` because vLLM refuses an extension that overrides an attribute of its worker.
    """

    policy_version: int | None = None

    if TYPE_CHECKING:
        model_runner: Any

        def reload_weights(self, **kwargs: Any) -> None: ...

    def policy_load(self, weights: Weights, version: int) -> list[str]:
        """Load a complete set of weights through vLLM's loader and set `policy_version` if all were loaded.

        The loader takes one tensor at a time. All tensors are taken, also those that it does not read: a sharded policy
        gathers each of them, which all ranks do together.

        Returns:
            One line per weight that was not loaded: tensors that the loader did not read and parameters of the engine
            that it did not fill. If there are any, `policy_version` is None.
        """
        model = self.model_runner.get_model()
        parameters = {name for name, _ in model.named_parameters()}
        remaining, loaded = iter(weights), set[str]()
        self.policy_version = None
        load_weights = model.load_weights

        def record_loaded(iterator: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            names: set[str] | None = load_weights(iterator)
            # A few architectures do not return the names that they loaded; assume that they loaded all.
            loaded.update(parameters if names is None else names)
            return names

        model.load_weights = record_loaded  # vLLM itself only logs a warning for weights that it did not load
        try:
            self.reload_weights(weights_iterator=remaining)
        finally:
            del model.load_weights
        _repack_tied(model)
        skipped = [f"{name} was not read" for name in sorted(name for name, _ in remaining)]
        skipped += [f"{name} was not filled" for name in sorted(parameters - loaded)]
        self.policy_version = None if skipped else version
        return skipped

    def policy_runner(self) -> str:
        """Return module and name of the class that runs the model in this worker."""
        kind = type(self.model_runner)
        return f"{kind.__module__}.{kind.__qualname__}"

    def policy_state(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int | None, dict[str, int]]:
        """Return the version of the last complete load, and the fingerprints by name of what is stored unchanged.

        `shapes` are the shapes of the parts to compare, by the names of tensors in a checkpoint.
        """
        model = self.model_runner.get_model()
        stored = dict(model.named_parameters())
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        stored = _parts_of_packed(stored, shapes, packed) | stored
        sums = {
            name: fingerprint(stored[name], shape)
            for name, shape in shapes.items()
            # vLLM pads the rows of embeddings, but not vectors.
            if name in stored
            and stored[name].shape[1:] == shape[1:]
            and (len(stored[name]) >= shape[0] if shape[1:] else len(stored[name]) == shape[0])
        }
        return self.policy_version, as_numbers(sums)


class ComparedWeights:
    """Weights on their way into the engine; names, shapes and fingerprints of those that the engine stores unchanged.

    These are vectors (norm weights and biases), which vLLM neither packs nor shards, and matrices if they are not
    sharded over GPUs. `policy_state` skips tensors that the engine stores in another shape.
    """

    def __init__(self, weights: Weights, tensor_parallel: int) -> None:
        self._weights, self._tensor_parallel = weights, tensor_parallel
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.fingerprints: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, each after its fingerprint was taken: none of them is held."""
        for name, tensor in self._weights:
            if tensor.ndim == 1 or (tensor.ndim == 2 and self._tensor_parallel == 1):
                self.shapes[name] = tuple(tensor.shape)
                self.fingerprints[name] = fingerprint(tensor, self.shapes[name])
            yield name, tensor


@torch.no_grad()
def fingerprint(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an int64 sum over the bits of the first `shape[0]` rows, each element weighted by its index; a scalar.

    It uses integer arithmetic, so it is the same on every device and changes if any single bit changes. Of a matrix,
    the first 1,024 rows count: the sum needs 24 bytes of memory per element.
    """
    rows = tensor.detach()[: shape[0] if len(shape) == 1 else min(shape[0], _MAX_ROWS)].contiguous()
    bits = rows.view(_INTEGER_DTYPES[rows.element_size()]).flatten().to(torch.int64)
    factors = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return (bits * factors).sum()


def as_numbers(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return scalars of one device as numbers, after one transfer."""
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}


def _repack_tied(model: nn.Module) -> None:
    """Repack tied output layers on a CPU.

    On a CPU, a layer multiplies by a packed copy of its weight that vLLM makes after loading. A tied layer loads no
    weight itself, so vLLM 0.32's reload does not update its copy: the model would use an old output layer.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        if weight.data_ptr() in seen:
            cast(Any, module.quant_method).process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def _parts_of_packed(
    stored: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, Sequence[str]],
) -> dict[str, torch.Tensor]:
    """Return the matrices of a checkpoint that are rows of a packed parameter, by their names.

    `packed` has vLLM's names of packed modules, each with the names of its parts in their order, such as qkv_proj of
    q_proj, k_proj and v_proj. On a CPU, packed biases have another dtype.
    """
    parts: dict[str, torch.Tensor] = {}
    for name, parameter in stored.items():
        layer, _, kind = name.rpartition(".")
        block, _, module = layer.rpartition(".")
        names = [f"{block}.{part}.{kind}" for part in packed.get(module, ())]
        sizes = [shapes.get(part, (0,))[0] for part in names]
        if names and parameter.ndim == 2 and sum(sizes) == len(parameter):
            parts |= zip(names, torch.split(parameter, sizes), strict=True)
    return parts
