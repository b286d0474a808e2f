"""Memory: what a run will take, said before it starts, and what to change when it was too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.registries import ENGINES

if TYPE_CHECKING:
    from bandpo_cli.models.memory import MemoryEstimate

GIB = 2**30


def print_memory(console: Console, config: RunConfig) -> None:
    """Print the estimate by part against the card at hand, or against this machine's memory where there is none."""
    import torch

    from bandpo_cli.config.sampling import resolve_engine
    from bandpo_cli.models.memory import estimate_memory

    on_gpu = torch.cuda.is_available() and config.model.device in ("auto", "cuda")
    if on_gpu:
        card = torch.cuda.get_device_properties(0)
        place, room = card.name, card.total_memory
    else:
        place, room = "this machine (no GPU)", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own_sampler = ENGINES[resolve_engine(config.sampling.engine, on_gpu)].shares_weights
    try:
        estimate = estimate_memory(config, own_sampler, "cuda" if on_gpu else "cpu")
    except UserError as error:
        console.print(f"[yellow]no estimate of memory:[/yellow] {error}", highlight=False, soft_wrap=True)
        return
    engine = 0 if own_sampler else _engine_bytes(config, room, on_gpu)
    console.print(_table(estimate, config, engine), highlight=False)
    peak = _peak(estimate, config, engine)
    verdict = (
        f"{_gib(peak)} at the peak, {place} has {_gib(room)}: {'fits' if peak < 0.95 * room else 'too much'}"
    )
    console.print(f"[bold]memory[/bold]  {verdict}", highlight=False)
    if peak >= 0.95 * room:
        console.print(
            f"[yellow]warning:[/yellow] {memory_saving_settings(config)}", highlight=False, soft_wrap=True
        )


def _engine_bytes(config: RunConfig, room: int, on_gpu: bool) -> int:
    vllm = config.sampling.vllm
    return int(room * vllm.memory_fraction) if on_gpu else int(vllm.kv_cache_gb * GIB)


def _peak(estimate: MemoryEstimate, config: RunConfig, engine: int) -> int:
    """A sleeping engine makes room for the update; one that stays awake does not."""
    held, update = sum(estimate.always.values()), sum(estimate.update.values())
    if engine and config.sampling.vllm.sleep:
        return held + max(update, engine)
    return estimate.peak + engine


def _table(estimate: MemoryEstimate, config: RunConfig, engine: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"{estimate.parameters / 1e6:,.1f}M parameters")
    table.add_column("GiB", justify="right")
    table.add_column("while")
    for name, size in estimate.always.items():
        table.add_row(name, _number(size), "always")
    for name, size in estimate.update.items():
        table.add_row(name, _number(size), "updating")
    for name, size in estimate.sampling.items():
        table.add_row(f"at most: {name}", _number(size), "sampling")
    if engine:
        while_ = "sampling" if config.sampling.vllm.sleep else "always"
        table.add_row("vLLM: weights and cache", _number(engine), while_)
    return table


def _number(size: int) -> str:
    return f"{size / GIB:,.2f}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"


def memory_saving_settings(config: RunConfig) -> str:
    """Name the settings that take less memory, the cheapest to change first, with values to type."""
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    less = max(config.optim.micro_batch_tokens // 2, longest)
    found = []
    if less < config.optim.micro_batch_tokens:
        found.append(f"optim.micro_batch_tokens={less}")
    if not config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing=true")
    if config.model.dtype == "float32":
        found.append("model.dtype=bfloat16")
    if config.sampling.engine == "vllm":
        found.append(f"sampling.vllm.memory_fraction={config.sampling.vllm.memory_fraction / 2:g}")
    else:
        found.append(f"sampling.max_sequences={max(1, config.sampling.max_sequences // 4)}")
    found.append(f"sampling.max_tokens={max(1, config.sampling.max_tokens // 2)}")
    return "for less memory, in this order: " + ", ".join(f"--set {setting}" for setting in found)


@contextmanager
def out_of_memory_errors(config: RunConfig) -> Iterator[None]:
    """Turn running out of memory into one line that names the settings to change.

    Raises:
        RunError: in place of torch's or Python's own error.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(f"out of memory ({_first_line(error)}); {memory_saving_settings(config)}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's CPU allocator has no class of its own
            raise
        raise RunError(f"out of memory ({_first_line(error)}); {memory_saving_settings(config)}") from error


def _first_line(error: BaseException) -> str:
    """Say what was asked for, without the allocator's advice and its file names."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.rsplit("] ", 1)[-1].split(". GPU", 1)[0].strip()
