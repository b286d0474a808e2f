"""Plan of an evaluation: the model or the stored completions, the tasks, the settings.

Every mistake that can be found without torch is found here.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from bandpo_cli.config.batch_and_sampling import check_engine, default_k
from bandpo_cli.config.layers import (
    Layer,
    Settings,
    as_layers,
    flatten,
    nest,
    read_assignments,
    read_layer,
    resolve,
    with_values,
)
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import FILE_SUFFIXES, DataTask, Source, TaskSettings, task_from_arguments
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, UserError, log, nearest, plural
from bandpo_cli.experiments.plan import check_graders, check_model_and_task, prepare_task
from bandpo_cli.paths import given_path, nearest_file, path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS, DATASETS, generated_tasks, split_member
from bandpo_cli.storage.checkpoints import (
    ModelRef,
    check_model_contents,
    check_model_path,
    resolve_model,
    run_layers,
)
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import SAMPLES_FILE, EvalFolder, RunFolder, find_run, timestamped
from bandpo_cli.storage.run_record import read_record
from bandpo_cli.tasks.completions import StoredProblem, read_completions
from bandpo_cli.tasks.question_answers import hub_ids, question_key
from bandpo_cli.tasks.rows import source_label
from bandpo_cli.tasks.task import Task, build_task

MAX_K = 10**6
_MAX_STEM_CHARS = 100  # largest length of the part of an evaluation's name that says what was evaluated
_OF_TRAINING = nest({"optim.updates": 1, "objective.advantages": "group", "reward.overlong_buffer": 0})
"""Settings that could contradict those of an evaluation, where they have no effect."""
_USED_SECTIONS = {"seed", "model", "task", "sampling", "grading", "evaluation", "tracking"}
_WITHOUT_EFFECT = (
    "steps", "reward.", "bounds.", "objective.", "optim.", "checkpoint.", "stop.", "evaluation.every",
    "sampling.prompts", "sampling.samples", "sampling.temperature", "sampling.dynamic", "sampling.max_lag",
)  # fmt: skip
_OF_SCORING = ("grading.", "evaluation.k", "evaluation.batch", "tracking.")
"""Beginnings of the settings without effect on an evaluation, and of those with an effect on one of a file."""


@dataclass(frozen=True)
class SamplesFile:
    """Stored completions: the file, its SHA-256, the grader that the user named, and the problems by evaluation set."""

    path: Path
    digest: str
    grader: str | None
    sets: dict[str, list[StoredProblem]]


@dataclass(frozen=True)
class EvalPlan:
    """An evaluation that has been checked and not started; it uses the sections in `_USED_SECTIONS`.

    `folder` is that of an interrupted evaluation, which continues; None for a new one.
    """

    config: RunConfig
    source: tuple[ModelRef, Task] | SamplesFile
    folder: EvalFolder | None = None

    def default_name(self) -> str:
        """Return the name of an evaluation to which the user gives none: what is evaluated, and the time."""
        if isinstance(self.source, SamplesFile):
            path, end = self.source.path.absolute(), "-rescored"
            of_run = f"{path.parent.parent.name}-" if path.parent.name == "samples" else ""
            is_evaluation = path.name == SAMPLES_FILE
            what = path.parent.name.removeprefix("eval-") if is_evaluation else f"{of_run}{path.stem}"
        else:
            model, task = self.source
            what = f"{model.stem}-{'+'.join(task.heldout_sets())}"
            end = f"-n{self.config.evaluation.samples}-s{self.config.seed}"
        # A folder's name cannot have all characters.
        return timestamped(re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", f"eval-{what}"[:_MAX_STEM_CHARS] + end))

    def as_json(self) -> dict[str, Any]:
        """Return what a later call needs to resume the same evaluation."""
        config = self.config.model_dump(mode="json", include=_USED_SECTIONS)
        for source in (*config["task"].get("train", ()), *config["task"].get("heldout", ())):
            source["path"] = _absolute_path(source["path"])
        if isinstance(file := self.source, SamplesFile):
            samples = {"path": str(file.path.absolute()), "sha256": file.digest, "grader": file.grader}
            return {"model": None, "samples": samples, "config": config}
        ref, _ = file
        run = None if ref.run is None else str(ref.run.path.absolute())
        model = {"path": _absolute_path(ref.path), "run": run, "step": ref.step}
        return {"model": model, "samples": None, "config": config}


def _absolute_path(path: str | None) -> str | None:
    """Return the absolute path of a local file or folder; other texts unchanged."""
    if not path or path in BUNDLED_MODELS or not path_exists(user_path(path)):
        return path
    return str(user_path(path).absolute())


class EvalOptions(TypedDict, total=False):
    """Keyword arguments of `plan_evaluation` and `evaluate`; those left out keep the defaults of the settings."""

    samples: Path | str | None  # a file of completions to score, in place of a model
    n: int | None  # completions per problem
    k: Sequence[int] | None  # the k of pass@k and maj@k, each at most n
    temperature: float | None
    max_tokens: int | None
    limit: int | None
    seed: int | None
    sampler: str | None  # the sampling engine: auto, transformers or vllm
    grader: str | None  # the grader of all answers; None for the data's own
    settings: Settings  # other settings, which win over the options above


def plan_evaluation(
    model: str = "embedded",
    tasks: Sequence[str] = (),
    *,
    base: Sequence[Layer] = (),
    runs_dir: Path | str = "runs",
    **options: Unpack[EvalOptions],
) -> EvalPlan:
    """Check everything that can be checked without torch, and load the problems; the arguments are as for `evaluate`.

    `base` are settings that the options override. Raises UserError if there is no such model, task or file, or a
    setting cannot be used.
    """
    n, k = options.get("n"), options.get("k")
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if n is not None and k and max(k) > n:
        raise ConfigError(f"--k {max(k)}: needs --n {max(k)}; make it that, or --k of at most {n}")
    flags = {
        "evaluation.samples": n,
        "evaluation.k": default_k(n) if k is None and n is not None else k and [*k],
        "evaluation.temperature": options.get("temperature"),
        "evaluation.problems": options.get("limit"),
        "sampling.max_tokens": options.get("max_tokens"),
        "sampling.engine": options.get("sampler"),
        "seed": options.get("seed"),
    }
    given = nest({key: value for key, value in flags.items() if value is not None})
    layers = [*base, given, *as_layers(options.get("settings", ()))]
    grader = options.get("grader")
    if (samples := options.get("samples")) is not None:
        plan = _plan_samples(user_path(str(samples)), grader, layers)
    else:
        layers += [] if grader is None else [{"task": {"grader": grader, "rewards": None}}]
        plan = _plan_model(model, tasks, given_path(runs_dir), layers)
    if not plan.config.evaluation.k:
        raise UserError("evaluation.k: give at least one k")
    return plan


def eval_assignments(assignments: Sequence[str], is_file: bool) -> Layer:
    """Return the settings of `--set`; raise ConfigError for one without effect on the evaluation, or on scores."""
    layer = read_assignments(assignments)
    for key in flatten(layer):
        if not key.startswith(_OF_SCORING) if is_file else key.startswith(_WITHOUT_EFFECT):
            of, flags = (
                ("scores of a file", "--grader") if is_file else ("evaluations", "--n and --temperature")
            )
            raise ConfigError(
                f"--set {key}: it has no effect on {of}, whose options are {flags}; leave it out"
            )
    return layer


def _plan_model(model: str, tasks: Sequence[str], runs_dir: Path, layers: Sequence[Layer]) -> EvalPlan:
    """Return the evaluation of a model, with the settings of its run, then `layers`."""
    run, step = find_run(model, runs_dir) or (None, None)
    if run is not None and step == 0:  # the model that the run started from: there is no such checkpoint
        ref = ModelRef(resolve([read_layer(run.path / RunFolder.marker)]).model.path, run, step)
    else:
        ref = resolve_model(model, runs_dir)
    base = [] if ref.run is None else run_layers(ref.run)
    own = resolve(base) if base else None
    task_layer = _task_layer(tasks, own)
    # Adapters are merged into the weights when a model is loaded.
    config = resolve([*base, task_layer, *layers, {"model": {"path": ref.path, "lora": None}}, _OF_TRAINING])
    check_engine(config.sampling.engine, config.model.device)
    check_model_and_task(config, f"--task {' '.join(tasks) or config.task.name}")
    task = prepare_task(config)
    problems = [problem for problems in task.heldout_sets().values() for problem in problems]
    check_graders(problems, trial=config.grading)
    if own is not None and tasks:
        _warn_of_training_problems(own, config, task)
    return EvalPlan(config, (ref, task))


def _warn_of_training_problems(own: RunConfig, config: RunConfig, task: Task) -> None:
    """Log how many problems are training problems, in files, of the run with the settings `own`."""
    if not (isinstance(own.task, DataTask) and isinstance(config.task, DataTask)) or hub_ids(own.task):
        return
    # Questions in the same template can be compared.
    trained_task = own.task.model_copy(update={"template": config.task.template})
    try:
        trained = {question_key(problem.prompt) for problem in build_task(trained_task).train_problems()}
    except UserError:  # the files are no longer there
        return
    for label, problems in task.heldout_sets().items():
        evaluated = problems[: config.evaluation.problems]
        if count := sum(question_key(problem.prompt) in trained for problem in evaluated):
            of_all = f"{count:,} of {plural(len(evaluated), 'problem')} are training problems of the run"
            log.warning("%s: %s; without --task, the held-out ones are used", label, of_all)


def _plan_samples(path: Path, grader: str | None, layers: Sequence[Layer]) -> EvalPlan:
    """Return the evaluation of stored completions."""
    sets = read_completions(path, grader)
    fewest = min(len(stored.completions_G) for stored_P in sets.values() for stored in stored_P)

    # The settings of sampling are not used here, and must not forbid a k.
    evaluation = {"samples": max(fewest, MAX_K), "temperature": 1.0}
    config = resolve([{"evaluation": {"k": default_k(fewest)}}, *layers, {"evaluation": evaluation}])
    if (most := max(config.evaluation.k, default=1)) > fewest:
        raise ConfigError(f"--k {most}: at most {fewest}, the completions of a problem in {path}")
    check_graders((stored.problem for stored_P in sets.values() for stored in stored_P), trial=config.grading)
    config = with_values(config, {"evaluation.samples": fewest})
    return EvalPlan(config, SamplesFile(path, file_digest(path), grader, sets))


def plan_evaluation_resume(folder: EvalFolder, tracking: Layer | None = None) -> EvalPlan:
    """Return the plan that the evaluation in `folder` was made from, with other settings of `tracking` only.

    An evaluation that has all its completions is scored again, and needs neither its model nor its samples file.
    """
    add_code_folder(folder.path)
    record, complete = read_record(folder.path / folder.marker), folder.samples_path.exists()
    try:
        samples, model = record["samples"], record["model"]
        layers = [record["config"], {"tracking": tracking or {}}]
        if samples is not None:
            path, digest, grader = Path(samples["path"]), samples["sha256"], samples["grader"]
        else:
            run = None if model["run"] is None else RunFolder(Path(model["run"]))
            ref = ModelRef(str(model["path"]), run, model["step"])
            layers.append({"model": {"path": ref.path}})
        config = resolve([*layers, _OF_TRAINING])
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"--resume {folder.path}: eval.json has no data for a resume ({error})") from None
    if samples is not None:
        if not complete and (not path_exists(path) or file_digest(path) != digest):
            raise UserError(f"--resume {folder.path}: {path} was changed or deleted; start a new evaluation")
        sets = {} if complete else read_completions(path, grader)
        return EvalPlan(config, SamplesFile(path, digest, grader, sets), folder)
    if not complete:
        check_model_path(ref.path)
        check_model_contents(Path(ref.path))
        check_engine(config.sampling.engine, config.model.device)
    return EvalPlan(config, (ref, prepare_task(config)), folder)


def _task_layer(tasks: Sequence[str], own: RunConfig | None) -> dict[str, Any]:
    """Return the settings of the tasks in `--task`; the run's own prompts, tools, environment and grader stay."""
    if not tasks:
        return {}
    task: dict[str, Any]
    generated = [text for text in tasks if text in generated_tasks() or split_member(text)]
    if generated:
        if len(generated) < len(tasks):
            raise ConfigError(f"--task {generated[0]}: evaluate it without other tasks")
        task = task_from_arguments(tasks)
    else:
        task = {"name": "data", "heldout": _sources(tasks)}
        if own is not None and isinstance(own.task, DataTask):
            kept = own.task.model_dump(include={"template", "system", *TaskSettings.model_fields})
            task = {**kept, **task, "grader": own.task.grader and own.task.chosen_grader}
    return {"evaluation": {"problems": None}, "task": task}


def _sources(tasks: Sequence[str]) -> list[Any]:
    """Return the setting `task.heldout` for names of data sets and files, each file with a unique label."""
    files = [name for name in tasks if name not in DATASETS]
    for name in files:
        if not name or not path_exists(user_path(name)):
            known = [*generated_tasks(), *DATASETS]
            near = nearest_file(user_path(name), FILE_SUFFIXES) or nearest(name, known)
            hint = f"{near}; known: {', '.join(known)}, or a {', '.join(FILE_SUFFIXES)} file"
            raise ConfigError(f"--task {name[:200]}: no such task or file{hint}")
    labels = Counter(map(_label_of, files))
    sources: list[Any] = []
    for name in tasks:
        if data := DATASETS.get(name):
            sources += data.evaluation if data.eval_split is None else [name]
            continue
        path, label = user_path(name).absolute(), _label_of(name)
        if labels[label] > 1:  # a/test.jsonl and b/test.jsonl are a-test and b-test
            label = _label_of(f"{path.parent.name}-{path.name}")
        sources.append({"path": name, "label": label})
    return sources


def _label_of(path: str) -> str:
    try:
        return source_label(Source(path=path))
    except ConfigError:  # no character of the name is allowed in a metric's name
        return "data"
