"""Ranks of an experiment: their connection, what they must agree on, the error of a lost connection; its callbacks.

Nothing heavy is imported at module level.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bandpo_cli import waits
from bandpo_cli.callbacks import Callback, Info, Report, Result
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.config.sampling import check_tensor_parallel
from bandpo_cli.errors import ConfigError, LostRankError, UserError, plural
from bandpo_cli.rank_process import local_rank_count
from bandpo_cli.ranks import TIMED_OUT, Ranks, connected, ranks_from_environment, silent_ranks

_GLOO_ERROR = "gloo/transport"
"""Part of the message of every error of gloo's connections: the place in its source."""


def check_ranks(config: RunConfig, count: int, training: bool = True) -> None:
    """Raise ConfigError where a run or an evaluation cannot be divided among `count` processes.

    `model.device` must not be one GPU, an engine not be spread over several, and a step must have enough prompts.
    """
    device, prompts = config.model.device, config.sampling.prompts
    if count > 1 and ":" in device:
        raise ConfigError(f"model.device = '{device}': one GPU for {count} ranks; use CUDA_VISIBLE_DEVICES")
    check_tensor_parallel(config.sampling.vllm.tensor_parallel, count)
    if training and prompts < count:
        most = plural(prompts, "rank")
        raise ConfigError(f"sampling.prompts = {prompts}: too few for {count} ranks; start at most {most}")


def check_gpu_count(model: ModelConfig, count: int, what: str) -> None:
    """Raise UserError where ranks would have to share a GPU. Imports torch; on a CPU any number is allowed.

    Args:
        count: number of ranks on this machine.
        what: start of the message, such as `--nproc 4`.
    """
    import torch

    from bandpo_cli.models.load import is_on_cuda

    if is_on_cuda(model) and count > (gpus := torch.cuda.device_count()):
        have = f"every rank needs its own GPU, and this machine has {gpus}"
        raise UserError(f"{what}: {have}; start at most {plural(gpus, 'rank')}, or set model.device=cpu")


@contextmanager
def connected_ranks(config: RunConfig) -> Iterator[Ranks]:
    """Connect this process with the other ranks that torchrun has started for the duration of the block.

    Without torchrun there is one rank, nothing is connected, and torch is not imported.

    Raises:
        UserError: ranks on this machine would have to share a GPU, or as `check_ranks`.
        LostRankError: in place of the backend's error where the process of another rank has ended.
    """
    waits.stall_after = config.tracking.stall_after
    ranks = ranks_from_environment()
    if ranks.size == 1:
        yield ranks
        return
    from bandpo_cli.models.load import is_on_cuda

    check_ranks(config, ranks.size, training=False)
    check_gpu_count(config.model, local_rank_count(), f"{local_rank_count()} ranks on this machine")
    with lost_rank_errors(), connected(ranks, "cuda" if is_on_cuda(config.model) else "cpu"):
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
        if _GLOO_ERROR in str(error) and TIMED_OUT.search(str(error)):
            raise LostRankError(f"{silent_ranks()} has not answered for {waits.stuck_after()}") from error
        if isinstance(error, kinds) or _GLOO_ERROR in str(error):
            raise LostRankError("lost the connection to another rank, whose process has ended") from error
        raise


def check_same_on_all(ranks: Ranks, *values: str) -> None:
    """Raise UserError on all ranks where these texts are not the same on each of them."""
    if len({*ranks.gather(values)}) > 1:
        raise UserError("the ranks have different settings; start them with one command line and equal files")


class Dispatcher(Callback[Info, Report, Result]):
    """Forward each event to several callbacks, in their order; `end` reaches all of them, also when one raises."""

    def __init__(self, callbacks: Sequence[Callback[Info, Report, Result]]) -> None:
        self._callbacks = tuple(callbacks)

    def start(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.start(info)

    def phase(self, name: str) -> None:
        for callback in self._callbacks:
            callback.phase(name)

    def step(self, report: Report) -> None:
        for callback in self._callbacks:
            callback.step(report)

    def end(self, result: Result) -> None:
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback.end, result)
