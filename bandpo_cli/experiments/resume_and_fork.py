"""Plans of runs that continue a checkpoint: resumed runs, and forks of another run.

A resumed run continues in its folder. The folder of a fork begins with the record of its parent up to the checkpoint,
so that plots, reports and trackers have complete curves. `sampling.engine: auto` depends on the machine, and a model or
data set on the hub can change: a resumed run and a fork have the engine and the commits that the run or the parent
started with. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from bandpo_cli.config.batch_and_sampling import is_installed
from bandpo_cli.config.layers import (
    Layer,
    Settings,
    as_layers,
    changes_text,
    flatten,
    read_layer,
    resolve,
    setting_changes,
    setting_text,
    with_values,
)
from bandpo_cli.config.run import WITHOUT_EFFECT, RunConfig, check_ranks
from bandpo_cli.config.task import DataTask
from bandpo_cli.custom_code import code_from
from bandpo_cli.errors import ConfigError, UserError, plural
from bandpo_cli.experiments.monitor import stop_reason
from bandpo_cli.experiments.plan import Fork, Plan, check_config, plan_training, run_warnings
from bandpo_cli.methods.settings import TrustRegionSettings
from bandpo_cli.paths import given_path, is_commit, path_exists, read_json_object, relative_to_cwd
from bandpo_cli.processes.ranks import is_main_process, rank_count
from bandpo_cli.registries import AUTO_ENGINE, ENGINES
from bandpo_cli.storage import checkpoints
from bandpo_cli.storage.checkpoints import ANY_PROBLEMS, Progress, check_contents, inherited_layers
from bandpo_cli.storage.files import iterate_metrics, run_lock
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, find_run, not_found, shell_command
from bandpo_cli.storage.run_record import changed_code, is_finished, read_parent
from bandpo_cli.tasks.question_answers import hub_ids
from bandpo_cli.tracking.mlflow_store import is_redacted, tracking_store

CHANGEABLE_SETTINGS = (
    *WITHOUT_EFFECT, "optim.max_skips", "sampling.vllm.kv_cache_gb", "sampling.weight_transfer", "sampling.vllm.sleep",
    "sampling.engine_process",
)  # fmt: skip
"""Settings and complete sections that a resume may change: those without effect on the record, and limits that a run
may have to change to continue after an error. `steps` may change too, under conditions."""

_CHANGEABLE_PREFIXES = ("steps", *(f"{name}." if "." not in name else name for name in CHANGEABLE_SETTINGS))

_FIXED_SETTINGS = ("model.path", "model.revision", "model.dtype", "model.lora")
"""Settings that a fork cannot change either: weights and optimizer state are those of the checkpoint."""

_OF_THE_PROBLEMS = ("model.", "task.", "sampling.", "evaluation.")
"""Sections that the problems of a run and of its evaluations depend on."""

_OF_THE_BATCH = ("seed", "model.", "task.", "sampling.", "grading.", "reward.", "optim.updates")
"""Settings and sections that the batches depend on which the parent has sampled ahead, and their number of updates."""

RESOLVED = "resolved"  # the entry of env.json with what settings such as `auto` resolved to

_RESTORE = "restore the file from a copy, or start a new run"


@dataclass(frozen=True)
class ForkPoint:
    """A checkpoint of `run` that new runs continue.

    `layers` are the settings of the run, except `tracking`: the defaults of its forks. `config` is them, validated.
    """

    run: RunFolder
    progress: Progress
    layers: Sequence[Layer]
    config: RunConfig

    @property
    def text(self) -> str:
        """PATH@STEP, the value of `--fork` in any folder."""
        return f"{self.run.path.absolute()}@{self.progress.step}"

    def changes(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the settings that a fork changes, without `tracking`; raise ConfigError if it cannot."""
        differing = setting_changes(self.config, config).items()
        changes = {key: values for key, values in differing if not key.startswith("tracking.")}
        where, step = f"--fork {self.run.name}@{self.progress.step}", self.progress.step
        if fixed := {key: values for key, values in changes.items() if key.startswith(_FIXED_SETTINGS)}:
            why = "weights and optimizer state are those of the checkpoint"
            raise ConfigError(f"{where}: leave out {changes_text(fixed)}; {why}")
        if config.steps <= step:
            more = f"give more, such as --steps {step + self.config.steps}, or an earlier checkpoint"
            raise ConfigError(f"{where}: steps = {config.steps}: all are done at this checkpoint; {more}")
        records = [record for record in self.run.read_metrics() if record["step"] <= step]
        if reason := stop_reason(config, records):
            raise ConfigError(f"{where}: the fork ends at once: {reason}; add --set {reason.split()[0]}=null")
        return changes


def plan_fork(
    run: str,
    settings: Settings = (),
    runs_dir: Path | str = "runs",
    name: str | None = None,
    ranks: int | None = None,
) -> Plan:
    """Plan a fork; `ranks` is as for `plan_training`."""
    runs_dir = given_path(runs_dir)
    point = fork_point(run, runs_dir)
    config = resolve([*point.layers, *as_layers(settings)])
    changes, tracking = point.changes(config), config.tracking
    place = tracking_store(tracking, runs_dir).place(point.run.path) if tracking.with_mlflow else None
    if place is not None and place.remote_id and tracking.parent is None:
        config = with_values(config, {"tracking.parent": place.remote_id.rpartition("/")[2]})
    pinned, warnings = pin(config, point.run)
    which = "which the parent was trained with; the fork uses the other file"
    warnings += changed_code(pinned.model_dump_json(), point.run.path, which)
    if config.task != point.config.task:  # the commits are those of other data
        pinned = pinned.model_copy(update={"task": config.task})
    plan = plan_training(pinned, runs_dir, name, ranks)
    with_effect = [key for key in changes if not key.startswith(_CHANGEABLE_PREFIXES)]
    keeps_batch = not any(key.startswith(_OF_THE_BATCH) for key in with_effect)
    same_problems = not any(key.startswith(_OF_THE_PROBLEMS) for key in with_effect)
    progress = point.progress
    checkpoint = point.run.checkpoint_dir(progress.step)
    # The problems of batches that are dropped come again.
    begin = None if keeps_batch else checkpoints.position_before_batch(checkpoint)
    progress = replace(
        progress,
        position=progress.position if begin is None else begin,
        # Schedules are where a run with these settings is after this step: that of the learning rate counts updates.
        updates=progress.updates * config.optim.updates // point.config.optim.updates,
        problems=progress.problems if same_problems else ANY_PROBLEMS,
    )
    config = config.model_copy(update={"bounds": plan.config.bounds})  # with all options of a custom method
    where = f"{relative_to_cwd(checkpoint)}: {plural(config.steps - progress.step, 'step')} to go"
    text = "\n".join([where, *filter(None, [changes_text(changes, separator="\n")])])
    fork = Fork(point.run, progress, keeps_batch, changes)
    warnings += plan.warnings
    return replace(plan, config=config, warnings=warnings, step=progress.step, text=text, fork=fork)


def fork_point(text: str, runs_dir: Path) -> ForkPoint:
    """Return the checkpoint that RUN or RUN@STEP means, the last complete one."""
    match = find_run(text, runs_dir)
    if match is None:
        raise not_found("run", text.rpartition("@")[0] or text, runs_dir, RunFolder.marker)
    (run, step), where = match, f"--fork {text[:200]}"
    if path_exists(run.path / VERL_FILE):
        raise UserError(f"{where}: the run was imported from verl, which has its checkpoints; use verl's own")
    layers = inherited_layers(run)
    config = resolve(layers)
    complete, damaged = checkpoints.complete_checkpoints(run)
    done = last_step(run, config)
    steps = sorted(number for number in complete if number <= done)
    if not steps:
        defect = next(iter(damaged.values()), f"checkpoint.every = {config.checkpoint.every}")
        resume = shell_command("train --resume", run.path, runs_dir)
        raise UserError(f"{where}: the run has no complete checkpoint ({defect}); train it further: {resume}")
    step = steps[-1] if step is None else step
    if step not in steps:
        defect = damaged.get(step, f"there is no checkpoint of step {step}")
        raise UserError(f"{where}: {defect}; steps with a checkpoint: {', '.join(map(str, steps))}")
    check_contents(run.checkpoint_dir(step))
    return ForkPoint(run, complete[step], layers, config)


@contextmanager
def locked_resume(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Settings = (),
    read_only: bool = False,
    ranks: int | None = None,
) -> Iterator[Plan]:
    """Yield the plan of a resume, with the run's lock held unless it is read-only; see `plan_training`."""
    folder = RunFolder.open(given_path(runs_dir), run)
    # With several ranks, rank 0 holds the lock for all of them.
    lock = run_lock(folder.path) if is_main_process() and not read_only else nullcontext()
    with lock, code_from(folder.path):
        plan = plan_resume(folder, as_layers(settings), given_path(runs_dir))
        check_ranks(plan.config, rank_count() if ranks is None else ranks)
        yield plan


def plan_resume(folder: RunFolder, layers: Sequence[Layer], runs_dir: Path = Path("runs")) -> Plan:
    """Return how the run in `folder` continues with changed settings, `layers`."""
    name, path, command = folder.name, folder.path, shell_command("train --resume", folder.path, runs_dir)
    config_path = path / "config.yaml"
    again, parent = f"start a new run: bandpo train --config {config_path}", read_parent(path)
    if parent is not None:
        again = f"fork the other run again: bandpo train --fork {parent} --config {config_path}"
    if path_exists(path / VERL_FILE):
        raise UserError(f"run {name} was imported from verl: continue with its run.sh, or {again}")
    own_layer = read_layer(config_path, f"--resume {name}:")
    try:
        own = resolve([own_layer])
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    config = resolve([own_layer, *layers])
    tracking = config.tracking
    if tracking.with_mlflow and is_redacted(tracking_store(tracking, runs_dir).uri):
        raise ConfigError(f"tracking.uri = {tracking.uri} lacks its secret: set MLFLOW_TRACKING_URI")
    done = last_step(folder, own)
    _check_changes(folder, own, config, done, layers, runs_dir)
    reason = stop_reason(config, folder.read_metrics())
    if is_finished(path):
        if done >= config.steps:
            further = f"; to train further: {command} --steps {2 * config.steps}"
            for schedule in _schedules_over_run(config).values():
                further = f" (its {schedule} schedule has ended)"
            raise UserError(f"run {name} is complete: {done} of {config.steps} steps{further}")
        if reason is not None:
            setting = reason.split()[0]
            raise UserError(f"run {name} has ended: {reason}; to continue: {command} --set {setting}=null")
    complete, damaged = checkpoints.complete_checkpoints(folder)
    if ahead := [step for step in complete if step > done + 1]:
        raise UserError(f"{folder.metrics_path}: ends before the checkpoint of step {min(ahead)}; {_RESTORE}")
    for step in sorted((step for step in complete if step <= done), reverse=True):
        try:
            check_contents(folder.checkpoint_dir(step))
            break
        except UserError as error:
            damaged[step] = str(error)
    else:
        step = -1
    if step < 0 and (done >= own.steps or parent is not None):
        raise UserError(f"run {name} has no complete checkpoint; {again} --steps {config.steps}")
    warnings = [f"skipped: {why}" for later, why in damaged.items() if step < later <= done]
    if config.steps < own.steps:
        warnings.append(f"steps = {config.steps}: the run ends there; it was to end at step {own.steps}")
    pinned, task = config, None
    if step < config.steps:
        pinned, damage = pin(config, folder)
        warnings += damage
        pinned, task = check_config(pinned)
        warnings += changed_code(pinned.model_dump_json(), path)
    warnings += run_warnings(config, task)
    text = _describe(folder, config, done, step)
    return Plan(config, pinned, task, folder, warnings, step, text, is_resume=True)


def _describe(folder: RunFolder, config: RunConfig, done: int, step: int) -> str:
    """Return the `step` after which the run continues, or -1, in one line; `done` is the last in metrics.jsonl."""
    if step >= config.steps:
        return f"all {step} steps are done; what is left is the summary and the plots"
    if step < 0:
        again = f"; {done} of {config.steps} steps are done again" if done > 0 else ""
        return f"from the start: there is no checkpoint yet{again}"
    again = f", {done - step} of them done again" if done > step else ""
    return f"after step {step} ({folder.checkpoint_dir(step)}): {plural(config.steps - step, 'step')} to go{again}"


def pin(config: RunConfig, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """Return the settings with the engine and the commits that the run in `folder` started with, and warnings.

    Entries of env.json that no run writes are ignored; a damaged file gives a warning. Raises ConfigError if the engine
    that `auto` resolved to is not installed.
    """
    path = folder.path / "env.json"
    try:
        stored = read_json_object(path).get(RESOLVED) if path_exists(path) else None
    except UserError as error:
        return config, [f"{error}; engine and commits of the run are not known and are chosen anew"]
    if not isinstance(stored, dict):
        return config, []
    task, engine, commit, data = config.task, stored.get("engine"), stored.get("model"), stored.get("data")
    changes: dict[str, Any] = {}
    if config.sampling.engine == AUTO_ENGINE and isinstance(engine, str) and engine in ENGINES:
        entry = ENGINES[engine]
        if not is_installed(entry.package):
            raise ConfigError(f"run {folder.name} samples with {engine}, not installed here: {entry.install}")
        changes["sampling.engine"] = engine
    if is_commit(commit):
        changes["model.revision"] = commit
    if isinstance(task, DataTask) and isinstance(data, dict):
        changes["task.revisions"] = {name: data[name] for name in hub_ids(task) if is_commit(data.get(name))}
    return with_values(config, changes), []


def _schedules_over_run(config: RunConfig) -> dict[str, str]:
    """Return the schedules, by key, that end with the run; a run with one cannot be extended."""
    schedules: dict[str, str] = {"optim.schedule": config.optim.schedule}
    if isinstance(config.bounds, TrustRegionSettings) and config.bounds.delta_steps is None:
        schedules["bounds.delta_schedule"] = config.bounds.delta_schedule
    return {key: schedule for key, schedule in schedules.items() if schedule != "constant"}


def last_step(folder: RunFolder, config: RunConfig) -> int:
    """Return the last step of the record, which has each step once.

    Before the first line it is -1, or 0 in a run that does not evaluate before training. A fork has the first line of
    its parent, which may have evaluated or not.
    """
    steps = [record["step"] for record in iterate_metrics(folder.metrics_path)]
    first = steps[0] if steps[:1] in ([0], [1]) else int(not config.evaluation.every)
    for index, step in enumerate(steps):
        if step != first + index:
            where = f"{folder.metrics_path}, line {index + 1}"
            raise UserError(f"{where}: step {step} where step {first + index} belongs; {_RESTORE}")
    return first + len(steps) - 1


def _check_changes(
    folder: RunFolder, own: RunConfig, config: RunConfig, done: int, layers: Sequence[Layer], runs_dir: Path
) -> None:
    """Raise ConfigError where a setting differs from the run's own, except `CHANGEABLE_SETTINGS` and more steps.

    The message has the command that forks the run with these settings, and with more steps if all are done.
    """
    where, before = f"--resume {folder.name}", flatten(own.model_dump(mode="json"))
    given = {key: value for layer in layers for key, value in flatten(layer).items()}
    changed = [f"{key}={setting_text(value)}" for key, value in given.items() if before.get(key) != value]
    words = [f"--set {quote(text)}" for text in changed]
    words += [f"--steps {2 * own.steps}"] if done >= given.get("steps", own.steps) else []
    fork = " ".join([shell_command("train --fork", folder.path, runs_dir), *words])
    changes = setting_changes(own, config).items()
    if refused := {key: values for key, values in changes if not key.startswith(_CHANGEABLE_PREFIXES)}:
        allowed = ", ".join((*CHANGEABLE_SETTINGS, "steps"))
        again = f"bandpo train --config {folder.path / 'config.yaml'} with the other values starts a new run"
        if not any(key.startswith(_FIXED_SETTINGS) for key in refused):
            again = f"a new run can continue with the other values: {fork}"
        text = f"leave out {changes_text(refused)}; a resume can change {allowed}; {again}"
        raise ConfigError(f"{where}: {text}")
    if own.steps == config.steps:
        return
    for key, schedule in _schedules_over_run(own).items():
        ends = f"{key} = '{schedule}' ends with step {own.steps}; only a constant schedule can be extended"
        raise ConfigError(f"{where}: steps = {config.steps}: {ends}, or the schedule in a new run: {fork}")
    if config.steps <= done:
        raise ConfigError(f"{where}: steps = {config.steps}: {done} are done; give more than that")
