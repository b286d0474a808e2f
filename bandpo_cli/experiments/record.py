"""The record of a training run: its beginning in a fork and after a resume, and its end, however the run ends."""

from __future__ import annotations

import shlex
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import RunResult, TrainCallback
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, UserError, exits_as_errors, log, redact_credentials, warn_on_failure
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.experiments.monitor import stop_reason
from bandpo_cli.experiments.plan import Fork, Plan
from bandpo_cli.paths import path_exists, relative_to_cwd
from bandpo_cli.processes.ranks import is_main_process
from bandpo_cli.results import summary_fields
from bandpo_cli.storage import checkpoints
from bandpo_cli.storage.files import remove_temporary_files
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import PARENT, iterate_forks, keep_code, last_change

if TYPE_CHECKING:
    from bandpo_cli.training.build import Components


def load_state(plan: Plan, config: RunConfig, components: Components) -> None:
    """Load the checkpoint that the run continues, for a fork that of its parent."""
    fork = plan.fork
    changes = () if fork is None else (fork.progress, fork.keeps_batch)
    checkpoint = (plan.folder if fork is None else fork.run).checkpoint_dir(plan.step)
    if fork is not None and not path_exists(checkpoint):
        raise _removed(checkpoint)
    with out_of_memory_errors(config):
        components.resume_from(checkpoint, *changes)


def _removed(checkpoint: Path) -> RunError:
    return RunError(f"{checkpoint}: the run has removed it; fork its last checkpoint")


def copy_parent(fork: Fork, folder: RunFolder) -> dict[str, object]:
    """Copy the record and the checkpoint of the parent, unless it has removed it; return the entry of env.json."""
    step = fork.progress.step
    checkpoint = fork.run.checkpoint_dir(step)
    try:
        folder.begin_with(fork.run, step)
        checkpoints.copy_checkpoint(checkpoint, folder.checkpoint_dir(step), fork.progress, fork.keeps_batch)
    except (OSError, UserError) as error:
        checkpoints.remove_tree(folder.path)
        damage = RunError(f"{checkpoint}: cannot be copied: {error}")
        raise (damage if path_exists(checkpoint) else _removed(checkpoint)) from error
    path = fork.run.path.absolute()
    about = {"run": str(relative_to_cwd(path)), "path": str(path), "step": step}
    earlier = next(iterate_forks(fork.run.path), None)
    return {PARENT: {**about, "changed": fork.changes, **({PARENT: earlier} if earlier else {})}}


def cut_back(folder: RunFolder, config: RunConfig, step: int, env: dict[str, Any]) -> None:
    """Cut the record and the checkpoints back to the step after which the run continues, and record the resume."""
    (folder.path / "summary.json").unlink(missing_ok=True)
    remove_temporary_files(folder.path / "plots")
    # Checkpoints first: after a kill in between, a checkpoint ahead of the record would mean that lines are missing.
    checkpoints.remove_checkpoints_after(folder, step)
    folder.roll_back(step)
    checkpoints.prune_checkpoints(folder, config.checkpoint)
    keep_code(config.model_dump_json(), folder.path)  # of callbacks that are new
    folder.write_config(to_yaml(config))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    folder.record_resume({"time": when, "after_step": max(step, 0)}, env)


def close_record(config: RunConfig, folder: RunFolder, events: TrainCallback, result: RunResult) -> RunResult:
    """Write the plots and the summary, then call `end`; return the end of the run with its records.

    After the error that has ended the run, later ones are warnings. A rank other than 0 writes nothing.
    """
    try:
        events.phase("close")
        if is_main_process():
            records, reason = folder.read_metrics(), result.stopped_by
            if result.status == "FINISHED":  # also of a run that ended before it could write why
                reason = stop_reason(config, records) or reason
            result = replace(result, records=records, stopped_by=reason)
            _write_summary(config, folder, result)
    except Exception as raised:  # such as a full disk
        if result.error is None:
            result = replace(result, status="FAILED", error=raised)
            raise
        with warn_on_failure("the summary cannot be written"):
            raise
    finally:
        unreported = warn_on_failure("the end of the run was not reported")
        with nullcontext() if result.error is None else unreported, exits_as_errors():
            events.end(result)
    return result


def _write_summary(config: RunConfig, folder: RunFolder, result: RunResult) -> None:
    """Write the plots, then summary.json: status FINISHED there means that the run folder is complete."""
    status, records, error = result.status, result.records, result.error
    begin = last_change(folder.path)[0]
    later = (record for record in records if record["step"] > begin)
    scores = ({key: line[key] for key in line if key == "step" or key.startswith("eval/")} for line in later)
    evaluations = [record for record in scores if len(record) > 1]
    message = "stopped by request" if status == "KILLED" else None
    if error is not None:
        name = type(error).__name__
        message = redact_credentials(str(error) or name if status == "KILLED" else f"{name}: {error}")
    plot_command = f"bandpo plot {shlex.quote(str(folder.path))}"
    try:
        with warn_on_failure(f"the plots cannot be written; type {plot_command}"):
            from bandpo_cli.reports.run_plots import plot_run

            if records:
                plot_run(folder.path)
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # it is not empty
            (folder.path / "plots").rmdir()
        log.warning("the plots are incomplete; type %s", plot_command)
        raise
    finally:
        summary = {
            "status": status,
            "error": message,
            "stopped_by": result.stopped_by,
            "steps": int(records[-1]["step"]) if records else 0,
            "of_steps": config.steps,
            "time/train_s": round(sum(record["time/step"] for record in records), 3),
            "first_eval": evaluations[0] if evaluations else None,
            "last_eval": evaluations[-1] if evaluations else None,
            "last_step": records[-1] if records else None,
        }
        folder.write_summary(summary | summary_fields(folder.path))
