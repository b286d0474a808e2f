"""From the flags of `bandpo eval` to what is to be done, with every mistake told that can be told unloaded."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.cli.model_ref import ModelRef, find_model
from bandpo_cli.cli.preflight import check_model_path
from bandpo_cli.config.data import DATASETS, FILE_ENDINGS
from bandpo_cli.config.engine import check_engine
from bandpo_cli.config.layers import Layer, read_layer, resolve
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.grading import check_grader
from bandpo_cli.tasks import build_task
from bandpo_cli.tasks.base import Task
from bandpo_cli.tasks.completions import StoredProblem, read_completions
from bandpo_cli.tasks.known import evaluation_sources
from bandpo_cli.tracking.run_folder import RunFolder

DEFAULT_K = (4, 16, 64, 256)
"""The k of pass@k and maj@k where none is asked for: those of these within n, and n itself."""

_TASKS = ("countdown", *DATASETS)


@dataclass(frozen=True)
class SamplesFile:
    """Completions from a file: where they lie, and what tells whether they are still the same."""

    path: Path
    digest: str
    grader: str | None
    sets: dict[str, list[StoredProblem]]


@dataclass(frozen=True)
class EvalRequest:
    """An evaluation to be made.

    Attributes:
        config: seed, model, task, sampling, grading and evaluation; its other sections say nothing here.
        source: the model and its task, or stored completions.
        legacy: add best@k as resampling with replacement gives it.
    """

    config: RunConfig
    source: tuple[ModelRef, Task] | SamplesFile
    legacy: bool = False

    @property
    def stem(self) -> str:
        """The evaluation's name, the time apart."""
        if isinstance(self.source, SamplesFile):
            return _plain(f"eval-{self.source.path.stem}-rescored")
        model, task = self.source
        labels = "+".join(task.heldout_sets())
        return _plain(
            f"eval-{model.stem}-{labels}"[:120] + f"-n{self.config.evaluation.samples}-s{self.config.seed}"
        )

    def default_name(self) -> str:
        """Return the evaluation's name with the time."""
        return f"{self.stem}-{time.strftime('%Y%m%d-%H%M%S')}"

    def as_json(self) -> dict[str, Any]:
        """Return what a later call needs to go on with the same evaluation."""
        sections = ("seed", "model", "task", "sampling", "grading", "evaluation", "tracking")
        dump = self.config.model_dump(mode="json")
        common = {"config": {name: dump[name] for name in sections}, "legacy_best_at_k": self.legacy}
        if isinstance(self.source, SamplesFile):
            where = {
                "path": str(self.source.path.absolute()),
                "sha256": self.source.digest,
                "grader": self.source.grader,
            }
            return {"model": None, "samples": where, **common}
        model, _ = self.source
        run = None if model.run is None else str(model.run.path.absolute())
        path = model.path if not Path(model.path).exists() else str(Path(model.path).absolute())
        return {"model": {"path": path, "run": run, "step": model.step}, "samples": None, **common}


def model_request(
    model: str, tasks: Sequence[str], runs_dir: Path, layers: Sequence[Layer], legacy: bool
) -> EvalRequest:
    """Plan the evaluation of a model.

    Args:
        tasks: as `--task` has them; none takes the run's own, or the settings' default.
        layers: settings on top of the run's own.

    Raises:
        UserError: a mistake in any of them; one line.
    """
    ref = find_model(model, runs_dir)
    base = [] if ref.run is None else [read_layer(ref.run.path / "config.yaml")]
    own = resolve(base) if base else None
    config = resolve([*base, _task_layer(tasks, own), *layers, {"model": {"path": ref.path}}])
    check_engine(config.sampling.engine)
    if ref.path == EMBEDDED_MODEL and not isinstance(config.task, CountdownTask):
        raise ConfigError(
            f"--task {' '.join(tasks) or config.task.name}: the embedded model can read nothing but countdown; "
            "name a model, for example --model Qwen/Qwen2.5-0.5B-Instruct"
        )
    task = build_task(config.task)
    for grader in sorted(
        {problem.grader for problems in task.heldout_sets().values() for problem in problems}
    ):
        check_grader(grader)
    return EvalRequest(config, (ref, task), legacy)


def samples_request(path: Path, grader: str | None, layers: Sequence[Layer], legacy: bool) -> EvalRequest:
    """Plan the scoring of stored completions.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    sets = read_completions(path, grader)
    for name in sorted({stored.problem.grader for stored_P in sets.values() for stored in stored_P}):
        check_grader(name)
    fewest = min(len(stored.completions_G) for stored_P in sets.values() for stored in stored_P)
    config = resolve([{"evaluation": samples_layer(fewest, None)}, *layers])
    if max(config.evaluation.k) > fewest:
        raise ConfigError(
            f"--k {max(config.evaluation.k)}: {path} has a problem with only {fewest} completions; "
            f"ask for k of at most {fewest}"
        )
    return EvalRequest(config, SamplesFile(path, _digest(path), grader, sets), legacy)


def samples_layer(n: int | None, k: Sequence[int] | None) -> dict[str, Any]:
    """Return the settings of `--n` and `--k`; with n alone the k are those of `DEFAULT_K` within n, and n itself."""
    layer: dict[str, Any] = {} if n is None else {"samples": n}
    if k is None and n is not None:
        k = sorted({*(each for each in DEFAULT_K if each < n), n})
    return layer if k is None else {**layer, "k": list(k)}


def read_k(text: str) -> list[int]:
    """Read `--k 1,8,32`. Raises ConfigError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**6 for part in parts):
        raise ConfigError(f"--k {text}: whole numbers from 1 on, apart by commas, as in --k 1,8,32")
    return sorted({int(part) for part in parts})


def _task_layer(tasks: Sequence[str], own: RunConfig | None) -> dict[str, Any]:
    """Return the settings of the tasks that are asked for; the run's own template, system message and grader stay."""
    if not tasks:
        return {}
    problems = {"evaluation": {"problems": None}}
    if "countdown" in tasks:
        if len(tasks) > 1:
            raise ConfigError("--task countdown: it has a model and a form of its own; evaluate it by itself")
        same = own is not None and isinstance(own.task, CountdownTask)
        return problems | ({} if same else {"task": {"name": "countdown"}})
    sources: list[Any] = []
    for name in tasks:
        if name in DATASETS:
            sources += evaluation_sources(name)
        elif Path(name).suffix.lower() in FILE_ENDINGS or Path(name).exists():
            sources.append({"path": name})
        else:
            raise ConfigError(
                f"--task {name}: no such task or file{nearest(name, _TASKS)}; known: {', '.join(_TASKS)}, or a "
                f"{', '.join(FILE_ENDINGS)} file"
            )
    task: dict[str, Any] = {"name": "data", "heldout": sources}
    if own is not None and not isinstance(own.task, CountdownTask):
        task |= {"template": own.task.template, "system": own.task.system, "grader": own.task.grader}
    return problems | {"task": task}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", name)


def request_of(record: Mapping[str, Any], folder: Path, tracking: Layer) -> EvalRequest:
    """Return the request that the `eval.json` of `folder` was made from, with other settings of `tracking` only.

    Raises:
        UserError: the record is damaged, or its model or samples are no longer there as they were.
    """
    try:
        config = resolve([record["config"], {"tracking": tracking}])
        legacy, samples, model = bool(record["legacy_best_at_k"]), record["samples"], record["model"]
        if samples is not None:
            path, digest = Path(samples["path"]), str(samples["sha256"])
        else:
            run = None if model["run"] is None else RunFolder(Path(model["run"]))
            ref = ModelRef(str(model["path"]), run, model["step"])
    except (KeyError, TypeError) as error:
        raise UserError(f"--resume {folder}: its eval.json lacks what a resume needs ({error})") from None
    if samples is not None:
        sets = read_completions(path, samples.get("grader"))
        if _digest(path) != digest:
            raise UserError(f"--resume {folder}: {path} has changed since; start a new evaluation")
        return EvalRequest(config, SamplesFile(path, digest, samples.get("grader"), sets), legacy)
    check_model_path(ref.path)
    check_engine(config.sampling.engine)
    return EvalRequest(config, (ref, build_task(config.task)), legacy)
