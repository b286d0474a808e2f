"""Plan of an evaluation: the model or the stored completions, the tasks, the settings.

Every mistake that can be found without torch is found here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from bandpo_cli.config.layers import Layer, nest, read_layer, resolve, without_secret
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.config.sampling import check_engine
from bandpo_cli.config.task import FILE_SUFFIXES, DataTask, Source, task_from_arguments
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.experiments.preflight import (
    ModelRef,
    check_embedded_task,
    check_graders,
    check_model_contents,
    check_model_path,
    resolve_model,
)
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.registries import DATASETS, generated_tasks, split_member
from bandpo_cli.storage.eval_folder import SAMPLES_FILE
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import RunFolder, timestamped
from bandpo_cli.tasks.completions import StoredProblem, read_completions
from bandpo_cli.tasks.rows import source_label
from bandpo_cli.tasks.task import Task, build_task

DEFAULT_K = (4, 16, 64, 256)
"""The default k of pass@k and maj@k: the values below n, and n itself."""

_MAX_K = 10**6
_MAX_STEM_CHARS = 100
"""Largest length of the part of an evaluation's name that says what was evaluated."""


@dataclass(frozen=True)
class SamplesFile:
    """Stored completions.

    Attributes:
        path: the file.
        digest: SHA-256 of its contents; a resume compares it.
        grader: the grader that the user named; None for the data's own.
        sets: problems with their completions, by evaluation set.
    """

    path: Path
    digest: str
    grader: str | None
    sets: dict[str, list[StoredProblem]]


@dataclass(frozen=True)
class EvalRequest:
    """An evaluation that has been checked and not started.

    Attributes:
        config: seed, model, task, sampling, grading, evaluation and tracking are used, the other sections are not.
        source: the model and its task, or stored completions.
        legacy: add best@k as resampling with replacement gives it.
    """

    config: RunConfig
    source: tuple[ModelRef, Task] | SamplesFile
    legacy: bool = False

    def default_name(self) -> str:
        """Return the name of an evaluation to which the user gives none: what is evaluated, and the time."""
        if isinstance(self.source, SamplesFile):
            stem = f"eval-{_samples_name(self.source.path)}"[:_MAX_STEM_CHARS] + "-rescored"
        else:
            model, task = self.source
            stem = f"eval-{model.stem}-{'+'.join(task.heldout_sets())}"[:_MAX_STEM_CHARS]
            stem += f"-n{self.config.evaluation.samples}-s{self.config.seed}"
        # A folder's name cannot have all characters.
        return timestamped(re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", stem))

    def as_json(self) -> dict[str, Any]:
        """Return what a later call needs to resume the same evaluation."""
        sections = ("seed", "model", "task", "sampling", "grading", "evaluation", "tracking")
        dump = self.config.model_dump(mode="json")
        for source in (*dump["task"].get("train", ()), *dump["task"].get("heldout", ())):
            source["path"] = _absolute_path(source["path"])
        common = {"config": {name: dump[name] for name in sections}, "legacy_best_at_k": self.legacy}
        if isinstance(self.source, SamplesFile):
            samples = {
                "path": str(self.source.path.absolute()),
                "sha256": self.source.digest,
                "grader": self.source.grader,
            }
            return {"model": None, "samples": samples, **common}
        ref, _ = self.source
        run = None if ref.run is None else str(ref.run.path.absolute())
        model = {"path": _absolute_path(ref.path), "run": run, "step": ref.step}
        return {"model": model, "samples": None, **common}


def _absolute_path(path: str | None) -> str | None:
    """Return the absolute path of a local file or folder; other texts unchanged."""
    if not path or path == EMBEDDED_MODEL or not path_exists(user_path(path)):
        return path
    return str(user_path(path).absolute())


class EvalOptions(TypedDict, total=False):
    """Keyword arguments of `plan_evaluation` and `evaluate`; those left out keep the defaults of the settings.

    Attributes:
        samples: a file of completions to score, in place of a model.
        n: completions per problem.
        k: the k of pass@k and maj@k, each at most n.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: the most tokens of a completion.
        limit: the most problems of each set.
        seed: seed of the sampling.
        sampler: the sampling engine: auto, transformers or vllm.
        grader: the grader of all answers; None for the data's own.
        settings: other settings, as nested dictionaries; they win over the options above.
        legacy_best_at_k: add best@k as resampling with replacement gives it.
    """

    samples: Path | str | None
    n: int | None
    k: Sequence[int] | None
    temperature: float | None
    max_tokens: int | None
    limit: int | None
    seed: int | None
    sampler: str | None
    grader: str | None
    settings: Sequence[Layer]
    legacy_best_at_k: bool


def plan_evaluation(
    model: str = "embedded",
    tasks: Sequence[str] = (),
    *,
    base: Sequence[Layer] = (),
    runs_dir: Path | str = "runs",
    **options: Unpack[EvalOptions],
) -> EvalRequest:
    """Check everything that can be checked without torch, and load the problems.

    Args:
        model, tasks, runs_dir: as for `evaluate`.
        base: settings that the options override.
        options: see `EvalOptions`.

    Raises:
        UserError: there is no such model, task or file, or a setting cannot be used.
    """
    flags = {
        "evaluation": samples_layer(options.get("n"), options.get("k")) or None,
        "evaluation.temperature": options.get("temperature"),
        "evaluation.problems": options.get("limit"),
        "sampling.max_tokens": options.get("max_tokens"),
        "sampling.engine": options.get("sampler"),
        "seed": options.get("seed"),
    }
    given = nest({key: value for key, value in flags.items() if value is not None})
    layers = [*base, given, *options.get("settings", ())]
    samples, grader = options.get("samples"), options.get("grader")
    legacy = options.get("legacy_best_at_k", False)
    if samples is not None:
        request = samples_request(user_path(str(samples)), grader, layers, legacy)
    else:
        grader_layer = [] if grader is None else [{"task": {"grader": grader, "rewards": None}}]
        request = model_request(model, tasks, Path(runs_dir), [*layers, *grader_layer], legacy)
    if not request.config.evaluation.k:
        raise UserError("evaluation.k: give at least one k")
    return request


def model_request(
    model: str, tasks: Sequence[str], runs_dir: Path, layers: Sequence[Layer], legacy: bool
) -> EvalRequest:
    """Return the request that evaluates a model.

    Args:
        tasks: values of `--task`; none for the run's own tasks, or the default of the settings.
        layers: settings that replace the run's own.

    Raises:
        UserError: the model, a task or a setting is not valid.
    """
    ref = resolve_model(model, runs_dir)
    base = [] if ref.run is None else [read_layer(ref.run.path / "config.yaml")]
    own = resolve(base) if base else None
    # Adapters are merged into the weights when a model is loaded.
    model_layer = {"model": {"path": ref.path, "lora": None}}
    config = resolve([*base, eval_task_layer(tasks, own), *layers, model_layer])
    check_engine(config.sampling.engine, config.model.device)
    check_embedded_task(config, f"--task {' '.join(tasks) or config.task.name}")
    task = build_task(config.task)
    check_graders(problem for problems in task.heldout_sets().values() for problem in problems)
    return EvalRequest(config, (ref, task), legacy)


def samples_request(path: Path, grader: str | None, layers: Sequence[Layer], legacy: bool) -> EvalRequest:
    """Return the request that scores stored completions.

    Raises:
        UserError: the file cannot be read, or has no completions.
    """
    sets = read_completions(path, grader)
    check_graders(stored.problem for stored_P in sets.values() for stored in stored_P)
    fewest = min(len(stored.completions_G) for stored_P in sets.values() for stored in stored_P)
    layers = [{"evaluation": samples_layer(fewest, None)}, *layers]
    # Settings of sampling are not used here, and must not forbid a k.
    k = _resolve_for(layers, max(fewest, _MAX_K)).evaluation.k
    if max(k, default=1) > fewest:
        raise ConfigError(
            f"--k {max(k)}: {path} has a problem with only {fewest} completions; ask for k of at most {fewest}"
        )
    return EvalRequest(
        _resolve_for(layers, fewest), SamplesFile(path, file_digest(path), grader, sets), legacy
    )


def _resolve_for(layers: Sequence[Layer], samples: int) -> RunConfig:
    return resolve([*layers, {"evaluation": {"samples": samples, "temperature": 1.0}}])


def samples_layer(n: int | None, k: Sequence[int] | None) -> dict[str, Any]:
    """Return the settings of `--n` and `--k`; without k it is the values of `DEFAULT_K` below n, and n itself.

    Raises:
        ConfigError: a k is greater than n.
    """
    layer: dict[str, Any] = {} if n is None else {"samples": n}
    if n is not None and k and max(k) > n:
        raise ConfigError(
            f"--k {max(k)}: needs as many completions; make it --n {max(k)}, or --k of at most {n}"
        )
    if k is None and n is not None:
        k = sorted({*(value for value in DEFAULT_K if value < n), n})
    return layer if k is None else {**layer, "k": list(k)}


def read_k(text: str) -> list[int]:
    """Read `--k 1,8,32`. Raises ConfigError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 12 and 0 < int(part) <= _MAX_K for part in parts):
        raise ConfigError(
            f"--k {text[:100]!r}: whole numbers from 1 to {_MAX_K:,}, separated by commas, as in --k 1,8,32"
        )
    return sorted({int(part) for part in parts})


def _samples_name(path: Path) -> str:
    """Return a name for a samples file; a file written by this package is named by its evaluation or run."""
    path = path.absolute()
    if path.name == SAMPLES_FILE:
        return path.parent.name.removeprefix("eval-")
    return f"{path.parent.parent.name}-{path.stem}" if path.parent.name == "samples" else path.stem


def request_from_record(
    record: Mapping[str, Any], folder: Path, tracking: Layer, complete: bool
) -> EvalRequest:
    """Return the request that the `eval.json` of `folder` was made from, with other settings of `tracking` only.

    Args:
        complete: all completions are stored, so that neither the model nor the samples file is needed.

    Raises:
        UserError: the record is damaged, or its model or samples have changed or are missing.
    """
    try:
        samples, model, legacy = record["samples"], record["model"], bool(record["legacy_best_at_k"])
        stored = without_secret(record["config"])
        if samples is not None:
            path, digest, grader = Path(samples["path"]), samples["sha256"], samples["grader"]
            config = resolve([stored, {"tracking": tracking}])
        else:
            run = None if model["run"] is None else RunFolder(Path(model["run"]))
            ref = ModelRef(str(model["path"]), run, model["step"])
            config = resolve([stored, {"tracking": tracking, "model": {"path": ref.path}}])
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"--resume {folder}: eval.json does not have the data for a resume ({error})"
        ) from None
    if samples is not None:
        if not complete and (not path_exists(path) or file_digest(path) != digest):
            raise UserError(
                f"--resume {folder}: {path} was changed or deleted since the evaluation started; start a new evaluation"
            )
        sets = {} if complete else read_completions(path, grader)
        return EvalRequest(config, SamplesFile(path, digest, grader, sets), legacy)
    if not complete:
        check_model_path(ref.path)
        check_model_contents(Path(ref.path))
        check_engine(config.sampling.engine, config.model.device)
    return EvalRequest(config, (ref, build_task(config.task)), legacy)


def eval_task_layer(tasks: Sequence[str], own: RunConfig | None) -> dict[str, Any]:
    """Return the settings of the tasks in `--task`; the run's own template, system message and grader stay.

    Raises:
        ConfigError: there is no such task or file, or a generated task is asked for with others.
    """
    if not tasks:
        return {}
    problems = {"evaluation": {"problems": None}}
    generated = [text for text in tasks if text in generated_tasks() or split_member(text)]
    if generated:
        if len(generated) < len(tasks):
            raise ConfigError(f"--task {generated[0]}: evaluate it without other tasks")
        return problems | {"task": task_from_arguments(tasks)}
    task: dict[str, Any] = {"name": "data", "heldout": _sources(tasks)}
    if own is not None and isinstance(own.task, DataTask):
        task |= {"template": own.task.template, "system": own.task.system, "grader": own.task.answer_grader}
    return problems | {"task": task}


def _sources(tasks: Sequence[str]) -> list[Any]:
    """Return the setting `task.heldout` for names of data sets and files, each file with a unique label."""
    files = [name for name in tasks if name not in DATASETS]
    for name in files:
        if name and path_exists(user_path(name)):
            continue
        if Path(name).suffix.lower() in FILE_SUFFIXES:
            raise ConfigError(f"--task {name[:200]}: no such file")
        known = [*generated_tasks(), *DATASETS]
        raise ConfigError(
            f"--task {name[:200]}: no such task or file{nearest(name, known)}; known: {', '.join(known)}, or a "
            f"{', '.join(FILE_SUFFIXES)} file"
        )
    labels = Counter(map(_label_of, files))
    sources: list[Any] = []
    for name in tasks:
        if name in DATASETS:
            data = DATASETS[name]
            sources += data.evaluation if data.eval_split is None else [name]
        elif labels[_label_of(name)] == 1:
            sources.append({"path": name, "label": _label_of(name)})
        else:  # a/test.jsonl and b/test.jsonl are a-test and b-test
            path = user_path(name).absolute()
            sources.append({"path": name, "label": _label_of(f"{path.parent.name}-{path.name}")})
    return sources


def _label_of(path: str) -> str:
    try:
        return source_label(Source(path=path))
    except ConfigError:  # no character of the name is allowed in a metric's name
        return "data"
