"""Plan of a training run, and the checks of its names, settings and problems before torch is imported.

Functions here do not import torch, except for a custom method or estimator; `check_config` imports numpy.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bandpo_cli.callbacks import Callback, TrainCallback
from bandpo_cli.config.batch_and_sampling import GradingConfig, RewardComponent, check_engine, needs_answer
from bandpo_cli.config.layers import Layer, changes_text, setting_changes
from bandpo_cli.config.run import RunConfig, check_ranks, dtype_on
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, UserError, definition_location, log, plural
from bandpo_cli.experiments.monitor import stop_reason
from bandpo_cli.grading.answers import unparsed_references
from bandpo_cli.grading.pool import check_grader
from bandpo_cli.grading.tools import first_messages, tool_schemas
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import CustomSettings, TrustRegionSettings
from bandpo_cli.paths import MODEL_CONFIG, cached_commit, is_adapter_folder, path_exists, user_path
from bandpo_cli.processes.ranks import rank_count
from bandpo_cli.registries import BUNDLED_MODELS, DATASETS, ENGINES, ENVIRONMENT_GRADER, generated_tasks
from bandpo_cli.storage.checkpoints import Progress, check_model_path, inherited_layers, resolve_model
from bandpo_cli.storage.run_folder import RunFolder, check_name, timestamped, unused_name
from bandpo_cli.tasks.rows import NotLoadedError
from bandpo_cli.tasks.task import Task, build_task
from bandpo_cli.tracking.trackers import tracker_class
from bandpo_cli.types import Problem

_LARGE_LR = "optim.lr"
_SMALL_LR = "optim.lr for adapters or a small model"
_EXTREMES = (
    (_LARGE_LR, 0, 3e-4, "reinforcement learning of all weights usually has 1e-7 to 1e-5"),
    (_SMALL_LR, 0, 1e-3, "usual are up to 2e-4, and with LoRA up to 5e-4"),
    ("optim.weight_decay", 0, 1, "usual are 0 to 0.1"),
    ("optim.updates", 1, 64, "the last updates are far from the policy that sampled the batch; usual are 1 to 16"),
    ("sampling.temperature", 0.1, 2, "low ones make the completions of a group equal, high ones make noise"),
    ("evaluation.temperature", 0, 2, "the answers are noise; usual are 0 to 1"),
    ("objective.reference_kl", 0, 1, "the penalty outweighs the reward; usual are 0 to 0.1"),
    ("objective.entropy_bonus", 0, 0.1, "the bonus outweighs the reward, up to noise; usual are 0 to 0.01"),
)  # fmt: skip
"""Settings with the least and the largest value that no warning is about, and the reason or the usual values.

The usual values are those of public recipes: TRL, verl, DAPO, Dr. GRPO, and "LoRA Without Regret" for adapters. With
1e-3, two updates of all weights end all answers of SmolLM2-135M (entropy 2.04 → 0.59); with 1e-4 it declines.
"""

_FEW_HELDOUT = 10
"""Evaluation sets with fewer problems are warned about: one problem moves their accuracy by more than a tenth, which is
more than runs usually differ by. The smallest public sets in use, AIME and AMC, have 30 and 40."""

FIXED_SETTINGS = ("model.path", "model.revision", "model.dtype", "model.lora")
"""Settings that a fork cannot change either: weights and optimizer state are those of the checkpoint."""


@dataclass(frozen=True)
class Fork:
    """The checkpoint of another run, the parent, that a new run continues; its progress is as the new run counts it.

    With `keeps_batch` the new run trains on the batches that the parent has sampled ahead. `changes` has the settings
    that differ: the values of the parent and of the fork.
    """

    run: RunFolder
    progress: Progress  # in a plan as the new run counts it
    layers: Sequence[Layer]  # the settings of the parent, except `tracking`: the defaults of its forks
    config: RunConfig  # the same, validated
    keeps_batch: bool = True  # the new run trains on the batches that the parent has sampled ahead
    changes: Mapping[str, tuple[Any, Any]] = field(
        default_factory=dict
    )  # values of the parent and of the new run

    @property
    def text(self) -> str:
        """PATH@STEP, the value of `--fork` in any folder."""
        return f"{self.run.path.absolute()}@{self.progress.step}"

    def changes_to(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the settings that a fork changes, without `tracking`; raise ConfigError if it cannot."""
        differing = setting_changes(self.config, config).items()
        changes = {key: values for key, values in differing if not key.startswith("tracking.")}
        where, step = f"--fork {self.run.name}@{self.progress.step}", self.progress.step
        if fixed := {key: values for key, values in changes.items() if key.startswith(FIXED_SETTINGS)}:
            why = "weights and optimizer state are those of the checkpoint"
            raise ConfigError(f"{where}: leave out {changes_text(fixed)}; {why}")
        if config.steps <= step:
            more = f"give more, such as --steps {step + self.config.steps}, or an earlier checkpoint"
            raise ConfigError(f"{where}: steps = {config.steps}: all are done at this checkpoint; {more}")
        records = [record for record in self.run.read_metrics() if record["step"] <= step]
        if reason := stop_reason(config, records):
            raise ConfigError(f"{where}: the fork ends at once: {reason}; add --set {reason.split()[0]}=null")
        return changes


@dataclass(frozen=True)
class Plan:
    """A training run that has been checked and not started."""

    config: RunConfig  # for config.yaml
    pinned: RunConfig  # with the engine and the commits that the run, or the parent of a fork, started with
    task: Task | None  # with its problems; None for a resume of a run whose steps are all done
    folder: RunFolder  # which a new run has yet to create
    warnings: Sequence[str]  # what the user should know before the run starts, one line each
    step: int = -1  # of the checkpoint that the run continues; -1 for the initial weights
    text: str = ""  # the checkpoint and the number of steps to train, for the user
    fork: Fork | None = None  # the checkpoint of another run that a new run continues
    is_resume: bool = False  # the run continues in its folder

    @property
    def first_step(self) -> int:
        """The first step to train; 0 is the evaluation before training."""
        return self.step + 1


def new_run_layers(layers: Sequence[Layer], runs_dir: Path) -> list[Layer]:
    """Return the layers of a new run. If its model is a run or RUN@STEP, the run's settings are the first of them."""
    models = [layer["model"] for layer in layers if isinstance(layer.get("model"), dict)]
    path = next((model["path"] for model in reversed(models) if "path" in model), None)
    ref = resolve_model(path, runs_dir, "model.path =") if isinstance(path, str) else None
    if ref is None or ref.run is None:
        return [*layers]
    return [*inherited_layers(ref.run), {"model": {"revision": None}}, *layers, {"model": {"path": ref.path}}]


def plan_training(
    config: RunConfig, runs_dir: Path | str = "runs", name: str | None = None, ranks: int | None = None
) -> Plan:
    """Check everything that can be checked without torch, and load the problems.

    `name` is the name of the run folder; None for method, task, seed and time. `ranks` is the number of processes; None
    for those that torchrun has started, 1 without it.

    Raises UserError if a setting cannot be used, the name is taken, or nothing can be written to `runs_dir`.
    """
    task_name = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", config.task.title)[:60]
    default = timestamped(f"{config.bounds.slug()}-{task_name}-s{config.seed}")
    folder = RunFolder(Path(runs_dir) / choose_run_name(Path(runs_dir), name, default))
    check_ranks(config, rank_count() if ranks is None else ranks)
    config, task = check_config(config)
    return Plan(config, config, task, folder, run_warnings(config, task))


def choose_run_name(runs_dir: Path, asked: str | None, default: str) -> str:
    """Return the name of a new folder in `runs_dir`: `asked`, or `default` with a suffix; or raise UserError."""
    # `runs_dir` is created with the run, inside the innermost of its parents that exists.
    place = runs_dir.absolute()
    existing = next(filter(path_exists, (place, *place.parents)))
    if not existing.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not writable; name another folder")
    if asked is None:
        return unused_name(default, runs_dir)
    if path_exists(runs_dir / (asked := check_name(asked, runs_dir))):
        raise UserError(f"--name {asked}: exists already; try --name {unused_name(asked, runs_dir)}")
    return asked


def read_numbers(option: str, text: str, first: int, last: int) -> list[int]:
    """Return the whole numbers of an option such as `--k 1,8,32`. Raise ConfigError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    # Python refuses to convert thousands of digits.
    if not all(part.isdecimal() and len(part) <= 12 and first <= int(part) <= last for part in parts):
        raise ConfigError(f"{option} {text[:100]!r}: whole numbers from {first} to {last:,}, such as 1,8,32")
    return [int(part) for part in parts]


def check_config(config: RunConfig) -> tuple[RunConfig, Task]:
    """Check settings that validation alone cannot check; return them with all options of a custom method, and the task.

    The problems of the task are loaded. Raises ConfigError for custom code, a model path, an engine or a task that
    cannot be used.
    """
    if isinstance(config.bounds, CustomSettings):
        from bandpo_cli.objective.custom_methods import check_method

        config = config.model_copy(update={"bounds": check_method(config.bounds, config.objective)})
    elif isinstance(config.bounds, TrustRegionSettings):
        from bandpo_cli.bounds.band import find_divergence

        find_divergence(config.bounds.divergence)  # raises for a custom divergence that cannot be used
    if ":" in config.objective.advantages:  # a custom function
        from bandpo_cli.objective.advantages import check_estimator

        check_estimator(config.objective)
    for name in config.tracking.callbacks:
        callback_class(name)
    for name in config.tracking.names:
        if name != "mlflow":
            tracker_class(name)
    path, revision = config.model.path, config.model.revision
    if revision is not None and (path in BUNDLED_MODELS or path_exists(user_path(path))):
        raise ConfigError(f"model.revision = {revision!r}: model.path = {path!r} is a folder; leave it out")
    sampling = config.sampling
    if (limit := config.task.max_turn_tokens or 0) > (most := sampling.max_tokens):
        raise ConfigError(f"task.max_turn_tokens = {limit} must be within sampling.max_tokens = {most}")
    check_engine(sampling.engine, config.model.device, sampling.max_lag > 0 and sampling.engine_process)
    return config, load_task(config)


def callback_class(name: str) -> type[TrainCallback]:
    """Return the class of `tracking.callbacks` that `name` means. Raise ConfigError if it is no class of a callback."""
    callback = load_setting("tracking.callbacks", name)
    if isinstance(callback, type) and issubclass(callback, Callback):
        return callback
    advice = "name a subclass of bandpo_cli.callbacks.CallbackBase"
    raise ConfigError(f"tracking.callbacks = '{name}': no callback; {advice}{definition_location(callback)}")


def load_task(config: RunConfig, trial: bool = True) -> Task:
    """Return the task of a run with its problems loaded.

    With `trial`, asynchronous graders are called once. Raises ConfigError if the model cannot be trained or not on this
    task, the task has no problems, or a grader cannot be used.
    """
    path = config.model.path
    if path not in BUNDLED_MODELS:
        check_model_path(path)
        if is_adapter_folder(user_path(path)):
            raise ConfigError(
                f"model.path = {path!r}: an adapter; first: bandpo export merged {path} --out DIR"
            )
    check_model_and_task(config, f"task.name = {config.task.name!r}")
    folder = Path(__file__).parents[1] / "models" / path if path in BUNDLED_MODELS else user_path(path)
    with suppress(OSError, ValueError, AttributeError):  # loading the model refuses a damaged file
        content, sampling = json.loads((folder / MODEL_CONFIG).read_bytes()), config.sampling
        most = content.get("text_config", content).get("max_position_embeddings")
        if isinstance(most, int) and sampling.max_prompt_tokens + sampling.max_tokens > most:
            raise sampling.context_error(most)
    task = prepare_task(config)
    try:
        check_graders(task.train_problems(), config.task.rewards, config.grading if trial else None)
    except NotLoadedError as error:
        is_here = path_exists(folder) or cached_commit(path, "model", config.model.revision) is not None
        raise ConfigError(f"{error}{'' if is_here else ' --model FOLDER'}") from None
    return task


def prepare_task(config: RunConfig) -> Task:
    """Return the task of a run; with `task.environment`, its prompts are the first messages of it."""
    if config.task.functions:
        tool_schemas(config.task.functions, config.task.environment is not None)
    if config.task.environment is None:
        return build_task(config.task)
    task, grader = build_task(config.task), getattr(config.task, "answer_grader", ENVIRONMENT_GRADER)
    reset = partial(first_messages, config.task.environment, config.grading, grader=grader)
    train, sets = lambda: reset(task.train_problems()), task.heldout_sets
    prompted = Task(task.name, train, lambda: {label: reset(of_set) for label, of_set in sets().items()})
    prompted.notes = task.notes
    return prompted


def check_model_and_task(config: RunConfig, setting: str) -> None:
    """Raise ConfigError, with `setting`, for a bundled model on another task, or for another model without a task."""
    path = config.model.path
    if (task := BUNDLED_MODELS.get(path, config.task.name)) != config.task.name:
        model = "add --model MODEL, a folder or hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        raise ConfigError(
            f"{setting}: the bundled model was trained on {task} only; {model}, or take --task {task}"
        )
    if path not in BUNDLED_MODELS and "task" not in config.model_fields_set:
        names = ", ".join((*generated_tasks(), *DATASETS))
        raise ConfigError(
            f"model.path = {path!r}: a task is missing, because countdown is the default of the bundled model only; "
            f"add --task FILE.jsonl, or --task NAME with one of {names}"
        )


def check_graders(
    problems: Iterable[Problem],
    rewards: Sequence[RewardComponent] | None = None,
    trial: GradingConfig | None = None,
) -> None:
    """Raise ConfigError if a grader of these problems, or of `rewards`, cannot be used; see `check_grader`.

    With `trial`, references that the grader `math` cannot parse are counted, and a warning has the first of them.
    """
    for grader, its_problems in problems_by_grader([*problems], rewards).items():
        check_grader(grader, its_problems, trial)
        if grader == "math" and trial and (line := unparsed_references(its_problems, trial)):
            log.warning("%s", line)


def problems_by_grader(
    problems: Sequence[Problem], rewards: Sequence[RewardComponent] | None
) -> dict[str, Sequence[Problem]]:
    """Return the problems that every grader grades by name, for `rewards` all; not those of environments and controls.

    A grader that compares with a reference answer grades no problem without one.
    """
    added = [reward.grader for reward in rewards or () if reward.grader and not reward.is_control]
    by_grader: dict[str, Sequence[Problem]] = {}
    for name in dict.fromkeys([*(problem.grader for problem in problems), *added]):
        graded = problems if name in added else [problem for problem in problems if problem.grader == name]
        graded = [problem for problem in graded if problem.answer or not needs_answer(name)]
        if graded and name != ENVIRONMENT_GRADER:
            by_grader[name] = graded
    return by_grader


def extreme_settings(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each of `_EXTREMES`, and for an interval of ratios that a token of p = 0.5 never leaves."""
    import numpy as np

    is_small = config.model.lora is not None or config.model.path in BUNDLED_MODELS
    for key, least, most, reason in _EXTREMES:
        section, name = key.split()[0].split(".")
        value = getattr(getattr(config, section), name)
        if key != (_LARGE_LR if is_small else _SMALL_LR) and not least <= value <= most:
            limit = f"below {least:g}" if value < least else f"above {most:g}"
            setting, space, model = key.partition(" ")
            yield f"{setting} = {value:g} is extreme{space}{model}, {limit}: {reason}"
    bounds, method = config.bounds, METHODS[config.bounds.method]
    is_changed = not isinstance(bounds, CustomSettings) and bounds != bounds.published()
    if method.control or method.without_bounds or not is_changed:
        return
    usual, chosen = (settings.ratio_bounds()(np.log([0.5])) for settings in (bounds.published(), bounds))
    low, high = (float(end[0]) for end in chosen)
    if usual[1] < 2 <= high:  # the ratio of a token cannot exceed 1/p
        pairs = zip(vars(bounds).items(), vars(bounds.published()).values(), strict=True)
        changed = ", ".join(f"bounds.{name} = {value}" for (name, value), other in pairs if value != other)
        clipped = "nothing is clipped" if low < 0.02 else "no increase is clipped"
        interval = f"for p = 0.5 the interval of ratios is [{low:.3g}, {high:.3g}], and the ratio at most 2"
        yield f"{changed}: {interval}, so that {clipped}"


def run_warnings(config: RunConfig, task: Task | None = None) -> list[str]:
    """Return warnings about extreme settings and settings without an effect, checkpoints, and few problems."""
    warnings = [*extreme_settings(config)]
    method, engine = METHODS[config.bounds.method], ENGINES.get(config.sampling.engine)
    updates, last = config.optim.updates, config.steps
    # Before torch is imported it is not known whether there is a GPU, where the dtype `auto` is bfloat16.
    dtype = dtype_on(config.model.dtype, on_gpu=config.model.device != "cpu")
    lag = config.sampling.max_lag
    is_exact = engine is not None and engine.shares_weights and dtype == "float32" and not lag
    # The ratio is 1 in every update if log π_old is as the trainer computes it.
    is_comparable = not method.control and method.name in METHODS  # a custom loss may differ at ratio 1
    if updates == 1 and is_comparable and (config.objective.old_logprobs == "trainer" or is_exact):
        others = ", ".join(entry.name for entry in METHODS.values() if entry.differs_at_ratio_one)
        warnings.append(
            "clipping never has an effect: with one update per batch the ratio is always 1, and all methods but "
            f"{others} give the same run; use --set optim.updates=4 or more to compare methods"
        )
    if 0 < last <= lag:
        warnings += [f"sampling.max_lag = {lag}: with steps = {last} the initial weights sample every batch"]
    if config.optim.warmup_steps >= last * updates:
        counts = f"{config.optim.lr:g}: the warm-up is {config.optim.warmup_steps} updates, the run {last * updates}"
        warnings.append(f"the learning rate never reaches {counts}; see --set optim.warmup_steps=N")
    # The step of the best checkpoint needs an evaluation. If the only evaluations are those before the first and after
    # the last step, there is nothing to compare, and no interval of checkpoints changes that.
    saved, evaluated, metric = config.checkpoint.every, config.evaluation.every, config.checkpoint.best_metric
    keeps_best = config.checkpoint.keep_best and (metric is None or metric.startswith("eval/"))
    if keeps_best and 0 < saved < last and 0 < evaluated < last <= math.lcm(saved, evaluated):
        better = max(every for every in range(1, min(saved, evaluated) + 1) if evaluated % every == 0)
        warnings.append(
            f"only the last checkpoint can be best: checkpoints (every {saved}) and evaluations (every {evaluated} "
            f"steps) never coincide before it; use --set checkpoint.every={better}"
        )
    if task is None:  # all steps of a resumed run are done
        return warnings
    warnings += [
        f"the evaluation set '{label}' has only {plural(len(problems), 'problem')}: one problem moves its accuracy by "
        f"{1 / len(problems):.0%}; hold out more (task.heldout, task.heldout_fraction)"
        for label, problems in (task.heldout_sets() if config.evaluation.every else {}).items()
        if len(problems) < _FEW_HELDOUT
    ]
    count, wanted = len(task.train_problems()), config.sampling.prompts
    if 0 < count < wanted:
        counts = f"{plural(count, 'training problem')} for {wanted:,} prompts per step"
        often = f"a step samples every problem {wanted / count:.1f} times on average"
        warnings.append(f"{counts}: {often}; lower sampling.prompts")
    return warnings
