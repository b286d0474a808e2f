"""Ranks, the processes of a run: number and world size of this process, collectives, and their connection.

torchrun sets the environment variables that are read here. `bandpo train --nproc` sets the same ones and those of
`LAUNCHER_VARIABLE` and `RUN_NAME_VARIABLE`. Every rank executes the same code on its share of the data. All decisions
are made from values that are equal on all ranks, so that the ranks call the same collectives in the same order. Without
torchrun there is one rank, and no function here communicates. torch is imported where ranks communicate.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bandpo_cli.errors import LostRankError, RunError, UserError, first_line, plural
from bandpo_cli.processes import watch
from bandpo_cli.processes.watch import Wait, progress, stuck_after

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")

LAUNCHER_VARIABLE = "BANDPO_NPROC"  # environment variable of a rank of `--nproc`: the number of ranks
RUN_NAME_VARIABLE = "BANDPO_RUN_NAME"  # environment variable of such a rank: the name of the run

SILENT_S = 5.0
"""Seconds without a sign after which a rank is silent: those that wait give one about once per second."""

_GLOO_ERROR = "gloo/transport"  # in every error of gloo's connections: the place in its source
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)  # in such an error

_exchanges: Counter[str] = Counter()  # begun by this rank, by name of the group


def rank_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks of which this process is one; 1 without torchrun."""
    return int(environ.get("WORLD_SIZE", "1")) if "RANK" in environ else 1


def local_rank_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine; 1 without torchrun."""
    return max(1, int(environ.get("LOCAL_WORLD_SIZE", "1"))) if rank_count(environ) > 1 else 1


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is rank 0, or has no other ranks."""
    return rank_count(environ) == 1 or environ["RANK"] == "0"


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that `--nproc` has started, in one of them; None elsewhere."""
    return int(environ.get(LAUNCHER_VARIABLE, "0")) or None


def ranks_to_start(nproc: int) -> int | None:
    """Return how many ranks `--nproc` asks this process to start; None where it trains itself."""
    if launched_ranks() is not None:
        return None
    if rank_count() not in (1, nproc):
        raise UserError(f"--nproc {nproc}: torchrun has started {rank_count()} ranks; leave out --nproc")
    return nproc if nproc > rank_count() else None


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` processes of the run.

    Attributes:
        local_rank: its number on this machine, which is the number of its GPU.
        group: the process group in which values are exchanged; None for torch's default group.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes the run folder, MLflow and the terminal."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this rank's part of `count` items: consecutive ones, their numbers differing by at most 1."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank. They are pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with self._exchange():
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Report the ranks for which the collective in the body waits: those that have not begun it."""
        group = "" if self.group is None else self.group.group_name
        _exchanges[group] += 1
        late = partial(late_ranks, group, _exchanges[group])
        try:
            with Wait(late, f"after {stuck_after()} the run ends, with a checkpoint to resume from"):
                yield
        except RuntimeError as error:
            if _TIMED_OUT.search(str(error)):
                raise LostRankError(f"{late()} has not answered for {stuck_after()}") from error
            raise
        progress()

    def gather_all(self, items: Sequence[T]) -> list[T]:
        """Return the items of all ranks as one list, in the order of the ranks."""
        return [item for part in self.gather(items) for item in part]

    def concatenate(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each column, [n] of one dtype, with the values of all ranks in their order, [N]; n may differ."""
        if self.size == 1:
            return [*columns]
        import torch
        import torch.distributed as dist

        lengths = self.gather(len(columns[0]))
        padded = columns[0].new_zeros(len(columns), max(lengths))
        padded[:, : len(columns[0])] = torch.stack([*columns])
        received = [torch.empty_like(padded) for _ in lengths]
        with self._exchange():
            dist.all_gather(received, padded)
        parts = (value[:, :length] for value, length in zip(received, lengths, strict=True))
        return [*torch.cat([*parts], dim=1)]

    def for_thread(self) -> Ranks:
        """Return these ranks for a thread of its own group; all ranks must call this together."""
        if self.size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo", timeout=stuck_after()))

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results, in the order of the ranks, on every rank.

        All ranks must call this together. The results are pickled. Raises what `action` raised on the first rank on
        which it failed; the other ranks raise an error of the same kind that names this rank, or their own one if it
        has the same text.
        """
        if self.size == 1:
            return [action()]
        result: Any = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            failure = error
        outcomes = self.gather((result, failure and _sendable(failure)))
        for rank, (_, received) in enumerate(outcomes):
            if received is None:
                continue
            if failure is not None and (rank == self.rank or str(failure) == str(received)):
                raise failure
            if not isinstance(received, OSError):  # whose text follows from its number
                received = type(received)(f"rank {rank}: {received}")
            received.__dict__["received"] = True  # see `errors.is_received`
            raise received
        return [result for result, _ in outcomes]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every rank; raise its error on every rank."""
        return cast("T", self.agree(action if self.is_main else lambda: None)[0])

    def check_same(self, *values: str) -> None:
        """Raise UserError on all ranks where these texts are not the same on each of them."""
        if len({*self.gather(values)}) > 1:
            raise UserError(
                "the ranks have different settings; start them with one command line and equal files"
            )

    def wait(self) -> None:
        """Wait until every rank has called this."""
        self.gather(None)


SINGLE = Ranks()
"""The one rank of a run without torchrun."""


def _sendable(error: Exception) -> Exception:
    """Return an error of the same kind that every rank can read: constructors of other packages may take anything."""
    if isinstance(error, UserError | RunError):
        return type(error)(str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    return RuntimeError(f"{type(error).__name__}: {first_line(error)}")


def ranks_from_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return the rank that torchrun has set in the environment; `SINGLE` without torchrun."""
    if (size := rank_count(environ)) == 1:
        return SINGLE
    rank = int(environ["RANK"])
    return Ranks(rank, size, int(environ.get("LOCAL_RANK", rank)))


def late_ranks(group: str, number: int, slack: int = 0) -> str:
    """Store the number of this rank; return the ranks with lower numbers, more than `slack`, as `rank 1, 3`."""
    own = ranks_from_environment()
    _store().set(f"{group}/{own.rank}", str(number))
    late = [rank for rank in range(own.size) if _store().add(f"{group}/{rank}", 0) < number - slack]
    return f"rank {', '.join(map(str, late))}" if late else "all ranks"


def silent_ranks() -> str:
    """Return the ranks that have not called this function in the last seconds; those that wait call it."""
    slack = min(SILENT_S, watch.stall_after or SILENT_S)
    return late_ranks("waiting", int(1000 * time.time()), int(1000 * slack))


@cache
def _store() -> Any:
    """Return a connection to the ranks' store beside the one of torch, for which another thread may be waiting."""
    import torch.distributed as dist

    place, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=10)
    return dist.PrefixStore("waits", dist.TCPStore(*place, timeout=timeout))  # type: ignore[attr-defined]


@contextmanager
def connected(ranks: Ranks, device_type: str) -> Iterator[None]:
    """Connect the ranks for the duration of the block: gloo for CPU tensors and objects, NCCL for those on a GPU."""
    import torch
    import torch.distributed as dist

    if device_type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.size, timeout=stuck_after())
    try:
        yield
    except BaseException:
        # The process ends now, and NCCL may wait for the other ranks, which wait for the end of this process.
        if device_type != "cuda":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def is_gpu(device: str) -> bool:
    """Return whether `model.device` is a CUDA GPU on this machine. Imports torch."""
    import torch

    return torch.cuda.is_available() and device.partition(":")[0] in ("auto", "cuda")


def check_gpu_count(device: str, count: int, what: str) -> None:
    """Raise UserError, with `what` at its start, where `count` ranks on this machine would have to share a GPU."""
    import torch

    if is_gpu(device) and count > (gpus := torch.cuda.device_count()):
        have = f"every rank needs its own GPU, and this machine has {gpus}"
        raise UserError(f"{what}: {have}; start at most {plural(gpus, 'rank')}, or set model.device=cpu")


@contextmanager
def connected_ranks(device: str, stall_after: float) -> Iterator[Ranks]:
    """Connect this process with the other ranks that torchrun has started for the duration of the block.

    Without torchrun there is one rank, nothing is connected, and torch is not imported. The arguments are the settings
    `model.device` and `tracking.stall_after`. Raises UserError if ranks would have to share a GPU, and LostRankError in
    place of the backend's error where the process of another rank has ended.
    """
    watch.stall_after = stall_after
    if (ranks := ranks_from_environment()).size == 1:
        yield ranks
        return
    local = local_rank_count()
    check_gpu_count(device, local, f"{local} ranks on this machine")
    with lost_rank_errors(), connected(ranks, "cuda" if is_gpu(device) else "cpu"):
        yield ranks


@contextmanager
def lost_rank_errors() -> Iterator[None]:
    """Raise LostRankError in place of an error of the connection to another rank, also of one in a forward pass."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        # NCCL's errors, and those of the store by which the ranks find each other.
        kinds = dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError
        if _GLOO_ERROR in str(error) and _TIMED_OUT.search(str(error)):
            raise LostRankError(f"{silent_ranks()} has not answered for {stuck_after()}") from error
        if isinstance(error, kinds) or _GLOO_ERROR in str(error):
            raise LostRankError("lost the connection to another rank, whose process has ended") from error
        raise
