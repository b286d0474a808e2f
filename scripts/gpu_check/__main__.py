"""Checks and measurements of training on one GPU, or two: `make gpu-check`, or `python -m scripts.gpu_check`.

    python -m scripts.gpu_check [--json FILE] [--checks a,b] [--device DEVICE] [--tiny] [--budget SECONDS]

Random weights in the shapes of Qwen2.5-0.5B and 1.5B in bfloat16; nothing is downloaded. The checks of vLLM and TRL are
skipped unless these are installed. Exit code 1 when a line falls short of its limits, an exception ends a check, or the
time is used up. `--tiny --device cpu` runs the same code with small shapes and without limits of time and memory, which
are for GPUs.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.engines import check_decode, check_early_grades, check_vllm
from scripts.gpu_check.kernels import check_attention, check_head, check_logprobs, check_operator
from scripts.gpu_check.race import check_race, check_trl
from scripts.gpu_check.ranks import check_ranks
from scripts.gpu_check.results import Line, Measured, Skipped, passed, table, write_json
from scripts.gpu_check.throughput import PRIME_RL, check_compiled, check_first_shapes, check_prime_rl
from scripts.gpu_check.training import (
    check_ahead,
    check_deterministic,
    check_engine_weights,
    check_memory,
    check_resume,
    check_step,
    free_memory,
)
from scripts.gpu_check.work import Work

Check = Callable[[Work], Measured]

CHECKS: dict[str, Check] = {
    "operator": check_operator,
    "logprobs-0.5b": partial(check_logprobs, shape="0.5b"),
    "logprobs-1.5b": partial(check_logprobs, shape="1.5b"),
    "head-0.5b": partial(check_head, shape="0.5b"),
    "head-1.5b": partial(check_head, shape="1.5b"),
    "attention": check_attention,
    "first-shapes": check_first_shapes,
    "compiled": check_compiled,
    "step-0.5b": partial(check_step, shape="0.5b"),
    "memory-0.5b": partial(check_memory, shape="0.5b"),
    "resume": check_resume,
    "deterministic": check_deterministic,
    "ahead": check_ahead,
    "engine-weights": check_engine_weights,
    "vllm": check_vllm,
    "decode": check_decode,
    "trl-vllm": check_race,
    "trl": check_trl,
    **{name: partial(check_prime_rl, name=name) for name in PRIME_RL},
    "early-grades": check_early_grades,
    "step-1.5b": partial(check_step, shape="1.5b"),
    "memory-1.5b": partial(check_memory, shape="1.5b"),
    "two-ranks": check_ranks,
    "trl-vllm-1.5b": partial(check_race, shape="1.5b"),
}
"""The checks in the order in which they run."""
ON_REQUEST = ("trl-vllm-1.5b",)
"""Checks that run only where `--checks` names them."""

BUDGET_S = 600.0
BUDGET_OF_RANKS_S = 300.0
"""Additional seconds where there are two GPUs."""


class BudgetError(Exception):
    """The time for all checks is used up."""


def run_checks(checks: Mapping[str, Check], work: Work, budget_s: float) -> Iterator[Line]:
    """Run the checks one after another and yield the line of each; an exception is the failure of its line alone.

    When `budget_s` seconds are used up, the running check is interrupted, and it and all later ones have failed.
    """
    end = time.perf_counter() + budget_s
    for name, check in checks.items():
        begin = time.perf_counter()
        try:
            with deadline(end - begin):
                measured = check(work)
            status, reason = ("failed", "; ".join(measured.shortfalls)) if measured.shortfalls else ("ok", "")
        except Skipped as error:
            measured, status, reason = Measured(), "skipped", str(error)
        except BudgetError:
            measured, status = Measured(), "failed"
            reason = f"the {budget_s:g} s for all checks were used up"
        except (Exception, SystemExit) as error:  # noqa: BLE001 (any error is the result of the check)
            traceback.print_exc()
            measured, status, reason = Measured(), "failed", f"{type(error).__name__}: {error}"
        free_memory()
        seconds = time.perf_counter() - begin
        yield Line(name, status, seconds, measured.values, measured.limits, reason)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise BudgetError in the body after `seconds`."""
    if seconds <= 0:
        raise BudgetError

    def interrupt(*_: object) -> None:
        raise BudgetError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def machine(device: str) -> dict[str, Any]:
    """Return the device and the versions for the report."""
    import transformers

    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print the table, write the report and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the checks themselves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--checks", metavar="A,B", help=f"only these of {', '.join(CHECKS)}")
    parser.add_argument(
        "--budget", type=float, help="seconds for all checks (default: 600, with two GPUs 900)"
    )
    options = parser.parse_args(arguments)
    names = [name for name in CHECKS if name not in ON_REQUEST]
    if options.checks:
        names = options.checks.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device; --tiny --device cpu runs the checks on the CPU with small shapes"
        )
    if options.device not in ("cpu", "cuda", *(f"cuda:{card}" for card in range(torch.cuda.device_count()))):
        parser.error(f"there is no device {options.device!r}; give cpu or cuda")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.device.startswith("cuda") and "deterministic" in names:
        # cuBLAS reads it once, before the first check; the size is torch's default on an H100.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    about = machine(options.device)
    print(json.dumps(about), flush=True)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="bandpo-gpu-check-") as folder:
        work = Work(options.device, options.tiny, Path(folder))
        budget = options.budget or BUDGET_S + (BUDGET_OF_RANKS_S if torch.cuda.device_count() > 1 else 0.0)
        for line in run_checks({name: CHECKS[name] for name in names}, work, budget):
            lines.append(line)
            print(f"{line.name}: {line.status} ({line.seconds:.1f} s)", file=sys.stderr, flush=True)
            if options.json:
                write_json(options.json, about, lines)
    print(table(lines), flush=True)
    return 0 if passed(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
