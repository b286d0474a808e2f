"""Memory of a run: the estimate for the devices of this machine, the check before it starts, and errors of too little.

The estimate itself is `models.memory_estimate`. torch is imported where it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING

from bandpo_cli.config.batch_and_sampling import engine_cards, resolve_engine
from bandpo_cli.config.layers import read_assignments, resolve, with_values
from bandpo_cli.config.run import RunConfig, dtype_on
from bandpo_cli.errors import EngineMemoryError, RunError, UserError, find_out_of_memory, first_line, log
from bandpo_cli.processes.ranks import Ranks, is_gpu, local_rank_count, rank_count, ranks_from_environment
from bandpo_cli.registries import ENGINES

if TYPE_CHECKING:
    from bandpo_cli.models.memory_estimate import MemoryEstimate
    from bandpo_cli.tasks.task import Task

_FREE_GPU = "end the other processes (nvidia-smi lists them) or choose another GPU with CUDA_VISIBLE_DEVICES"

_LONGEST_TEXTS = 64  # prompts whose tokens are counted to find the longest: those with the most characters


OnEstimate = Callable[[RunConfig, "MemoryEstimate"], None]
"""Receives the estimate of a run, and the settings that it is made of."""


def memory_report(config: RunConfig, ranks: int = 1, training: bool = True) -> MemoryEstimate:
    """Estimate the memory of a run on the GPU of this rank, or on this machine where there is none. Imports torch.

    `training` is False for an evaluation, which has no updates. Raises UserError if the model's architecture cannot be
    read, or this machine has no such GPU or no memory left on it.
    """
    from bandpo_cli.models.memory_estimate import Device, estimate_memory

    if not is_gpu(config.model.device):
        share = "" if ranks == 1 else f" / {ranks} ranks"
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        device = Device(f"this machine{share} (no GPU)", total, total, on_gpu=False)
        return estimate_memory(config, device, ranks, training=training)
    import torch

    engine = None
    try:
        card, cards = _cards(config, ranks if rank_count() == 1 else local_rank_count())
        free, total = torch.cuda.mem_get_info(card)
        device = Device(torch.cuda.get_device_properties(card).name, total, free)
        if training and cards:
            # Its free memory is not asked for: that would create a context of this process there.
            gpu = torch.cuda.get_device_properties(cards[0])
            names = ", ".join(f"cuda:{card}" for card in cards)
            engine = Device(f"{gpu.name} ({names})", gpu.total_memory, gpu.total_memory)
    except (RuntimeError, AssertionError, ValueError) as error:
        problem = f"not usable on this machine: {first_line(error)}"
        if find_out_of_memory(error):
            problem = f"the GPU has no memory left; {_FREE_GPU}"
        raise UserError(f"model.device = {config.model.device!r}: {problem}") from None
    return estimate_memory(config, device, ranks, engine, training)


def memory_of_task(
    config: RunConfig, task: Task | None, ranks: int = 1, training: bool = True
) -> tuple[RunConfig, MemoryEstimate]:
    """Return the estimate of a run on this task, and the settings that it is made of; see `memory_report`.

    If the run does not fit with prompts of `sampling.max_prompt_tokens`, this setting is the length of the longest
    prompt of the task. For an evaluation `evaluation.problems` is the number of problems of all its sets.
    """
    if task is not None and not training:
        sets = task.heldout_sets().values()
        count = sum(len(problems[: config.evaluation.problems]) for problems in sets)
        config = with_values(config, {"evaluation.problems": count})
    estimate = memory_report(config, ranks, training)
    if estimate.fits or task is None:
        return config, estimate
    from bandpo_cli.models.load import load_tokenizer
    from bandpo_cli.sampling.prompt_encoding import PromptEncoder

    heldout = task.heldout_sets().values() if config.evaluation.every or not training else ()
    problems = chain(task.train_problems() if training else (), *heldout)
    longest = nlargest(_LONGEST_TEXTS, problems, key=lambda problem: len(str(problem.prompt)))
    prompts = PromptEncoder.of_run(load_tokenizer(config.model), config).encode(longest)
    tokens = min(max(len(prompt.token_ids) for prompt in prompts), config.sampling.max_prompt_tokens)
    config = with_values(config, {"sampling.max_prompt_tokens": tokens})
    return config, memory_report(config, ranks, training)


def _cards(config: RunConfig, local_ranks: int) -> tuple[int, list[int]]:
    """Return the GPU of this rank, and those of the engine processes if they are not the GPUs of the trainers."""
    import torch

    index = None if config.model.device == "auto" else torch.device(config.model.device).index
    card = ranks_from_environment().local_rank if index is None else index
    if not (config.sampling.max_lag and config.sampling.engine_process):
        return card, []
    cards = engine_cards(card, local_ranks, torch.cuda.device_count())
    return card, [] if card in cards else cards


def check_memory(
    config: RunConfig,
    ranks: Ranks,
    training: bool = True,
    changeable: Sequence[str] | None = None,
    task: Task | None = None,
    on_estimate: OnEstimate | None = None,
) -> RunConfig:
    """Log the estimate of a run, and return its settings with those that the estimate has chosen. Imports torch.

    Without a GPU only a run that does not fit is logged, or one with settings that are `auto`. All ranks must call this
    together. `changeable` are the settings that a message may advise to change, None for all; `on_estimate` is called
    with the estimate before it is judged, and reports it instead of the log.

    Raises UserError if the run needs more memory than its GPU has, or than other processes leave of it.
    """
    from bandpo_cli.models.memory_estimate import NoEstimateError

    def line(estimated: RunConfig, estimate: MemoryEstimate) -> str:
        advice = "" if estimate.fits else f"; {saving_advice(estimated, estimate, training, changeable)}"
        return f"{describe_memory(estimate)}{advice}"

    def checked() -> tuple[RunConfig, MemoryEstimate]:
        estimated, estimate = memory_of_task(config, task, ranks.size, training)
        if on_estimate is not None:
            on_estimate(estimated, estimate)
        if estimate.device.on_gpu and not estimate.can_start:
            raise UserError(line(estimated, estimate))
        return estimated, estimate

    try:
        estimates = ranks.agree(checked)
    except NoEstimateError as error:
        log.info("%s", error)
        return config
    # The rank with the least memory chooses for all.
    usable = [estimate.device.usable for _, estimate in estimates]
    estimated, estimate = estimates[usable.index(min(usable))]
    is_reported = estimate.device.on_gpu or estimate.chosen or not estimate.fits
    if is_reported and on_estimate is None and ranks.is_main:
        (log.info if estimate.fits else log.warning)("%s", line(estimated, estimate))
    fractions = [rank.memory_fraction for _, rank in estimates if rank.memory_fraction is not None]
    chosen = {**estimate.chosen, **({"sampling.vllm.memory_fraction": min(fractions)} if fractions else {})}
    return with_values(config, chosen) if chosen else config


def describe_memory(estimate: MemoryEstimate) -> str:
    """Return the peak of the estimate and the memory of the GPU, in one line."""
    device, other = estimate.device, estimate.engine_device
    of_each = "" if estimate.ranks == 1 else " of each rank"
    has = f"{device.name} has {_gib(device.total)}"
    if not device.is_idle:
        has += f", of which other processes leave {_gib(device.free)}"
    line = f"memory: {_gib(estimate.peak)} at the peak{of_each} by the estimate, {has}"
    if other is not None:
        line += f"; the engine {_gib(estimate.engine_peak)}, {other.name} has {_gib(other.total)}"
    if estimate.memory_fraction is not None:
        line += f"; vLLM's share is {estimate.memory_fraction:g} ({_gib(estimate.vllm)})"
    if estimate.vllm < estimate.vllm_minimum:
        line += f", and it needs {_gib(estimate.vllm_minimum)}"
    if estimate.chosen:
        chosen = (f"{key}={str(value).lower()}" for key, value in estimate.chosen.items())
        line += f"; auto is {', '.join(chosen)}"
    return line


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def saving_advice(
    config: RunConfig,
    estimate: MemoryEstimate,
    training: bool = True,
    changeable: Sequence[str] | None = None,
) -> str:
    """Return the settings with which a run fits that does not, as the end of a message; see `check_memory`."""
    from bandpo_cli.models.memory_estimate import estimate_memory

    config = with_values(config, estimate.chosen)

    def fits(flags: Mapping[str, str]) -> bool:
        assignments = [f"{key}={value}" for key, value in flags.items() if key != "--nproc"]
        try:
            changed = resolve([config.model_dump(mode="json"), read_assignments(assignments)])
            has_process = changed.sampling.max_lag and changed.sampling.engine_process
            engine = estimate.engine_device if has_process else None
            ranks = int(flags.get("--nproc", estimate.ranks))
            return estimate_memory(changed, estimate.device, ranks, engine, training).fits
        except UserError:  # such as a model without layers for adapters
            return False

    on_gpu, gpus = estimate.device.on_gpu, 1
    has_process = config.sampling.max_lag and config.sampling.engine_process
    if on_gpu and training and estimate.ranks == 1 and not has_process:
        import torch

        gpus = 1 if ":" in config.model.device else torch.cuda.device_count()
    savings = memory_savings(config, on_gpu, training, estimate.engine_device is not None, gpus)
    if config.sampling.vllm.memory_fraction is not None:
        savings.insert(0, ("sampling.vllm.memory_fraction", "null"))
    if changeable is not None:
        savings = [(key, value) for key, value in savings if key in ("--nproc", *changeable)]
    flags = _fewest(savings, fits)
    advice = f"no setting tried makes it fit; use a smaller model or {'more GPUs' if on_gpu else 'a GPU'}"
    if flags is not None:
        advice = f"it fits with {' '.join(_flag_text(*flag) for flag in flags.items())}"
    return advice if estimate.device.is_idle else f"{_FREE_GPU}; without that, {advice}"


def _fewest(
    savings: Sequence[tuple[str, str]], fits: Callable[[Mapping[str, str]], bool]
) -> dict[str, str] | None:
    """Return as few of the first settings as fit together; None if all do not. A later value needs less memory."""
    enough = next((n for n in range(1, len(savings) + 1) if fits(dict(savings[:n]))), None)
    if enough is None:
        return None
    together, last = dict(savings[:enough]), savings[enough - 1][0]
    for key, value in savings[enough - 1 :]:  # one alone rather than two with smaller changes
        if key == last and fits({key: value}):
            return {key: value}
    for key in list(together):
        fewer = {name: value for name, value in together.items() if name != key}
        together = fewer if fits(fewer) else together
    return together


def _flag_text(key: str, value: str) -> str:
    return f"{key} {value}" if key.startswith("--") else f"--set {key}={value}"


def memory_savings(
    config: RunConfig, on_gpu: bool, training: bool = True, engine_has_gpu: bool = False, gpus: int = 1
) -> list[tuple[str, str]]:
    """Return settings with values that lower the memory, those that cost least first.

    Args:
        training: False for an evaluation, or a GPU that only samples, which have no updates.
        engine_has_gpu: the engine process has a GPU to itself, so that the trainer's has more memory.
        gpus: number of GPUs that the run could use in place of one.
    """
    model, sampling, vllm = config.model, config.sampling, config.sampling.vllm
    savings = []
    if training:
        from bandpo_cli.models.memory_estimate import smaller_passes

        savings += [(True, "optim.micro_batch_tokens", f"{tokens}") for tokens in smaller_passes(config)]
    is_float32 = dtype_on(model.dtype, on_gpu) == "float32"
    in_process = ENGINES[resolve_engine(sampling.engine, on_gpu)].shares_weights
    vllm_on_gpu, shares_gpu = on_gpu and not in_process, training and not engine_has_gpu
    savings += [
        (training and not model.gradient_checkpointing, "model.gradient_checkpointing", "true"),
        (on_gpu and is_float32, "model.dtype", "bfloat16"),
        (shares_gpu and sampling.max_lag > 0 and sampling.engine_process, "sampling.engine_process", "false"),
        (in_process, "sampling.max_sequences", f"{max(1, sampling.max_sequences // 4)}"),
        (not in_process and not on_gpu, "sampling.vllm.kv_cache_gb", f"{vllm.kv_cache_gb / 2:g}"),
        (vllm_on_gpu and shares_gpu and not vllm.sleep, "sampling.vllm.sleep", "true"),
    ]
    if vllm_on_gpu and vllm.memory_fraction is not None:
        savings.append((True, "sampling.vllm.memory_fraction", f"{vllm.memory_fraction / 2:g}"))
    savings += [(ranks <= min(gpus, sampling.prompts), "--nproc", f"{ranks}") for ranks in (2, 4, 8)]
    savings += [
        (True, "sampling.max_tokens", f"{max(1, sampling.max_tokens // 2)}"),
        (training and model.lora is None, "model.lora.rank", "16"),
        (not on_gpu and is_float32, "model.dtype", "bfloat16"),  # slow on most CPUs
    ]
    return [(key, value) for applies, key, value in savings if applies]


@contextmanager
def out_of_memory_errors(config: RunConfig, training: bool = True) -> Iterator[None]:
    """Raise RunError with the settings to change in place of an out-of-memory error of torch, vLLM or Python."""
    try:
        yield
    except Exception as error:
        failed = find_out_of_memory(error)
        if failed is None:
            raise
        on_gpu = is_gpu(config.model.device)
        has_gpu = training and on_gpu and bool(_cards(config, local_rank_count())[1])
        if has_gpu and isinstance(failed, EngineMemoryError):
            training = False  # the settings of updates do not help a GPU that only samples
        # The requested size as the error states it, without the allocator's advice and file names in brackets. What
        # precedes the brackets is kept: it says that the engine process has failed.
        head, _, text = first_line(failed, max_chars=1000).rpartition("] ")
        size = f"{head.partition('[')[0]}{text.split('. GPU', 1)[0]}".strip()
        savings = memory_savings(config, on_gpu, training, has_gpu)
        first = dict(reversed(savings))  # of several values the first
        flags = ", ".join(_flag_text(*flag) for flag in reversed(first.items()))
        raise RunError(f"out of memory ({size}); for less memory, in this order: {flags}") from error
