"""Resuming a training run: the step from which it continues, the settings that may change, those that stay as resolved.

`sampling.engine: auto` depends on the machine, and a model or data set on the hub can change. A resumed run has the
engine, the dtype and the commits that the run started with. Nothing heavy is imported at module level.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

from bandpo_cli.callbacks import RunResult, TrainCallback
from bandpo_cli.config.layers import (
    Layer,
    changes_text,
    flatten,
    read_layer,
    resolve,
    setting_changes,
    setting_text,
    with_values,
)
from bandpo_cli.config.run import RunConfig, check_ranks
from bandpo_cli.config.sampling import is_installed
from bandpo_cli.config.task import DataTask
from bandpo_cli.custom_code import changed_code, code_from
from bandpo_cli.errors import ConfigError, UserError, plural
from bandpo_cli.experiments.monitor import stop_reason
from bandpo_cli.experiments.plan import CHANGEABLE_SETTINGS, Plan, Start
from bandpo_cli.experiments.preflight import check_config, run_warnings
from bandpo_cli.experiments.record import RESOLVED
from bandpo_cli.experiments.run import Stop
from bandpo_cli.experiments.run import run as run_plan
from bandpo_cli.methods.settings import TrustRegionSettings
from bandpo_cli.paths import is_commit, path_exists
from bandpo_cli.processes.ranks import is_main_process, rank_count
from bandpo_cli.registries import AUTO_ENGINE, ENGINES
from bandpo_cli.storage.checkpoints import (
    check_contents,
    complete_checkpoints,
)
from bandpo_cli.storage.files import read_json_object, run_lock
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, iterate_metrics, shell_command
from bandpo_cli.storage.run_record import is_finished, read_parent
from bandpo_cli.tasks.question_answers import hub_ids
from bandpo_cli.tracking.mlflow_store import is_redacted, tracking_store

FIXED_SETTINGS = ("model.path", "model.revision", "model.dtype", "model.lora")
"""Settings that a fork cannot change either: weights and optimizer state are those of the checkpoint."""

_RESTORE = "restore the file from a copy, or start a new run"

CHANGEABLE_PREFIXES = ("steps", *(f"{name}." if "." not in name else name for name in CHANGEABLE_SETTINGS))


def resume(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Sequence[Layer] = (),
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Continue a training run from its last complete checkpoint.

    Steps after the checkpoint are removed once the model and its state are loaded, not before.

    Args:
        run: its name in `runs_dir`, or its folder.
        settings: settings to change; see `CHANGEABLE_SETTINGS`. `{"steps": n}` trains further.

    Raises:
        UserError: the run is complete or imported from verl, its record is damaged, or a setting was given that cannot
            change.
        RunError: as `train`.
    """
    with locked_resume(run, runs_dir, settings) as plan:
        return run_plan(plan, callbacks, stop_requested)


@contextmanager
def locked_resume(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Sequence[Layer] = (),
    read_only: bool = False,
    ranks: int | None = None,
) -> Iterator[Plan]:
    """Yield the plan of a resume, with the run's lock held; a read-only plan takes no lock.

    `ranks` is the number of processes; None for those that torchrun has started, 1 without it.

    Raises UserError if there is no such run, if another process writes it, or as `plan_resume` does.
    """
    folder = RunFolder.open(Path(runs_dir), run)
    # With several ranks, rank 0 holds the lock for all of them.
    with (
        run_lock(folder.path) if is_main_process() and not read_only else nullcontext(),
        code_from(folder.path),
    ):
        plan = plan_resume(folder, settings, Path(runs_dir))
        check_ranks(plan.config, rank_count() if ranks is None else ranks)
        yield plan


def plan_resume(folder: RunFolder, layers: Sequence[Layer], runs_dir: Path = Path("runs")) -> Plan:
    """Return how the run in `folder` continues; `layers` are the settings that were given with --resume.

    Raises UserError if the run is complete, its record is damaged, or a setting was given that cannot change.
    """
    config_path = folder.path / "config.yaml"
    again, parent = f"start a new run: bandpo train --config {config_path}", read_parent(folder.path)
    if parent is not None:
        again = f"fork the other run again: bandpo train --fork {parent} --config {config_path}"
    if path_exists(folder.path / VERL_FILE):
        raise UserError(f"run {folder.name} was imported from verl: continue with its run.sh, or {again}")
    own_layer = read_layer(config_path, f"--resume {folder.name}:")
    try:
        own = resolve([own_layer])
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    config = resolve([own_layer, *layers])
    tracking = config.tracking
    if tracking.with_mlflow and is_redacted(tracking_store(tracking, runs_dir).uri):
        raise ConfigError(f"tracking.uri = {tracking.uri} lacks its secret: set MLFLOW_TRACKING_URI")
    done = last_step(folder, own)
    _check_changes(folder, own, config, done, _fork_command(folder, own, layers, runs_dir, done))
    if done >= config.steps and is_finished(folder.path):
        command = shell_command("train --resume", folder.path, runs_dir)
        further = f"; to train further: {command} --steps {2 * config.steps}"
        for schedule in _schedules_over_run(config).values():
            further = f" (its {schedule} schedule has ended)"
        raise UserError(f"run {folder.name} is complete: {done} of {config.steps} steps{further}")
    if is_finished(folder.path) and (reason := stop_reason(config, folder.read_metrics())):
        command = shell_command("train --resume", folder.path, runs_dir)
        raise UserError(
            f"run {folder.name} has ended: {reason}; to continue: {command} --set {reason.split()[0]}=null"
        )

    complete, damaged = complete_checkpoints(folder)
    ahead = [step for step in complete if step > done + 1]
    if ahead:
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
        raise UserError(f"run {folder.name} has no complete checkpoint; {again} --steps {config.steps}")
    warnings = [f"skipped: {why}" for later, why in damaged.items() if step < later <= done]
    if config.steps < own.steps:
        warnings.append(f"steps = {config.steps}: the run ends there; it was to end at step {own.steps}")
    pinned, task = config, None
    if step < config.steps:
        pinned, damage = pin(config, folder)
        warnings += damage
        pinned, task = check_config(pinned)
        warnings += changed_code(pinned.model_dump_json(), folder.path)
    start = Start(step, _describe(folder, config, done, step), is_resume=True)
    return Plan(config, pinned, task, folder, start, [*warnings, *run_warnings(config, task)])


def _describe(folder: RunFolder, config: RunConfig, done: int, step: int) -> str:
    """Return the step from which the run continues, in one line.

    Args:
        done: the last step in metrics.jsonl; -1 before the first line.
        step: the step after which the run continues; -1 for from the start.
    """
    if step >= config.steps:
        return f"all {step} steps are done; what is left is the summary and the plots"
    if step < 0:
        again = f"; {done} of {config.steps} steps are done again" if done > 0 else ""
        return f"from the start: there is no checkpoint yet{again}"
    again = f", {done - step} of them done again" if done > step else ""
    left = plural(config.steps - step, "step")
    return f"after step {step} ({folder.checkpoint_dir(step)}): {left} to go{again}"


def pin(config: RunConfig, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """Return the settings with the engine, dtype and commits that the run in `folder` started with.

    Entries of env.json that no run writes are ignored; a damaged file gives a warning. A run that an earlier version
    started has the entry in its list of resumes.

    Raises ConfigError if the engine that `auto` resolved to is not installed.
    """
    path = folder.path / "env.json"
    try:
        env = read_json_object(path) if path_exists(path) else {}
    except UserError as error:
        return config, [f"{error}; engine, dtype and commits of the run are not known and are chosen anew"]
    resumes = env.get("resumes")
    entries = [env, *(resumes if isinstance(resumes, list) else [])]
    stored = [entry[RESOLVED] for entry in entries if isinstance(entry, dict) and RESOLVED in entry][:1]
    if not stored or not isinstance(stored[0], dict):
        return config, []
    task, (engine, dtype, commit, data) = (
        config.task,
        map(stored[0].get, ("engine", "dtype", "model", "data")),
    )
    changes: dict[str, Any] = {}
    if config.sampling.engine == AUTO_ENGINE and isinstance(engine, str) and engine in ENGINES:
        entry = ENGINES[engine]
        if not is_installed(entry.package):
            raise ConfigError(f"run {folder.name} samples with {engine}, not installed here: {entry.install}")
        changes["sampling.engine"] = engine
    if config.model.dtype == "auto" and dtype in ("float32", "bfloat16"):
        changes["model.dtype"] = dtype
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


def _check_changes(folder: RunFolder, own: RunConfig, config: RunConfig, done: int, fork: str) -> None:
    """Raise ConfigError where a setting differs from the run's own, except `CHANGEABLE_SETTINGS` and more steps.

    `fork` is the command of a new run with these settings, for the message.
    """
    name = folder.name
    changes = setting_changes(own, config).items()
    refused = {key: values for key, values in changes if not key.startswith(CHANGEABLE_PREFIXES)}
    if refused:
        allowed = ", ".join((*CHANGEABLE_SETTINGS, "steps"))
        again = f"bandpo train --config {folder.path / 'config.yaml'} with the other values starts a new run"
        if not any(key.startswith(FIXED_SETTINGS) for key in refused):
            again = f"a new run can continue with the other values: {fork}"
        text = f"leave out {changes_text(refused)}; a resume can change {allowed}; {again}"
        raise ConfigError(f"--resume {name}: {text}")
    if own.steps == config.steps:
        return
    for key, schedule in _schedules_over_run(own).items():
        ends = f"{key} = '{schedule}' ends with step {own.steps}; only a constant schedule can be extended"
        raise ConfigError(
            f"--resume {name}: steps = {config.steps}: {ends}, or the schedule in a new run: {fork}"
        )
    if config.steps <= done:
        raise ConfigError(f"--resume {name}: steps = {config.steps}: {done} are done; give more than that")


def _fork_command(
    folder: RunFolder, own: RunConfig, layers: Sequence[Layer], runs_dir: Path, done: int
) -> str:
    """Return the shell command that forks the run with those settings in `layers` that differ from its own.

    A run whose steps are all done is forked with more steps.
    """
    before = flatten(own.model_dump(mode="json"))
    given = {key: value for layer in layers for key, value in flatten(layer).items()}
    changed = [f"{key}={setting_text(value)}" for key, value in given.items() if before.get(key) != value]
    words = [f"--set {quote(text)}" for text in changed]
    if done >= given.get("steps", own.steps):
        words.append(f"--steps {2 * own.steps}")
    return " ".join([shell_command("train --fork", folder.path, runs_dir), *words])
