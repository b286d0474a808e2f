"""Copy of a training state in host memory, which a thread writes while training continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bandpo_cli.models.sharding import local_tensor
from bandpo_cli.training.checkpoint_files import TrainedState


class StateCopy:
    """Copy of a training state in host memory, pinned where the state is on a GPU.

    Its tensors are allocated once and overwritten by each copy. With several ranks each copies its shards; the weights,
    which rank 0 has gathered in host memory, are kept as they are.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._mesh: DeviceMesh | None = None

    def missing_bytes(self, state: TrainedState) -> int:
        """Return the bytes that `allocate` would take."""
        missing = [tensor for key, tensor in _tensors_of(_local(state)) if key not in self._tensors]
        return sum(_allocated_bytes(tensor) for tensor in missing)

    def allocate(self, state: TrainedState) -> None:
        """Allocate what a copy of `state` lacks.

        Raises:
            RuntimeError, MemoryError: there is not enough memory.
        """
        for key, tensor in _tensors_of(_local(state)):
            self._target(key, tensor)

    def take(self, state: TrainedState) -> TrainedState:
        """Copy `state` and return the copy, which the next call overwrites."""
        local = _local(state)
        weights, optimizer = (
            self._copied("weights", local.weights),
            self._copied("optimizer", local.optimizer),
        )
        for device in {each.device for each in (*local.weights.values(), *local.optimizer.values())}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies to pinned memory are asynchronous
        if not _is_sharded(state):
            return TrainedState(weights, optimizer)
        return TrainedState(state.weights, self._sharded_as(state.optimizer, optimizer))

    def _sharded_as(
        self, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return `shards`, those of `tensors` that are DTensors as DTensors in host memory."""
        found = dict(shards)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                found[name] = DTensor.from_local(
                    shards[name],
                    self._host_mesh(tensor.device_mesh),
                    tensor.placements,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
        return found

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the ranks of `mesh` as a mesh of host memory; all ranks call this together the first time."""
        if mesh.device_type == "cpu":
            return mesh
        if self._mesh is None:
            self._mesh = init_device_mesh("cpu", (mesh.size(),))
        return self._mesh

    def _copied(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies by name; tensors that share their memory share that of the copy."""
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        for name, tensor in _distinct(tensors).items():
            copies[_place(tensor)] = target = self._target(f"{kind}/{name}", tensor)
            target.copy_(tensor.detach(), non_blocking=True)
        return {name: copies[_place(tensor)] for name, tensor in tensors.items()}

    def _target(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that receives the copy: that of the last copy if it has the same form, else a new one."""
        found = self._tensors.get(key)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            found = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            self._tensors[key] = found
        return found


def _is_sharded(state: TrainedState) -> bool:
    return any(isinstance(each, DTensor) for each in state.optimizer.values())


def _local(state: TrainedState) -> TrainedState:
    """Return the tensors of this rank that are to be copied."""
    if not _is_sharded(state):
        return state
    return TrainedState({}, {name: local_tensor(each) for name, each in state.optimizer.items()})


def _tensors_of(state: TrainedState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to copy with their keys in `StateCopy`."""
    for kind, tensors in (("weights", state.weights), ("optimizer", state.optimizer)):
        for name, tensor in _distinct(tensors).items():
            yield f"{kind}/{name}", tensor


def _allocated_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy; torch allocates pinned memory in powers of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.device.type == "cuda" else tensor.nbytes


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return what tied weights have in common."""
    return tensor.data_ptr(), tensor.shape


def _distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without those that share the memory of an earlier one."""
    found: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        found.setdefault(_place(tensor), name)
    return {name: tensors[name] for name in found.values()}
