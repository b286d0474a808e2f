"""The checkpoints of a run folder without what is in them: which are whole, which are kept, what a crash left.

A checkpoint is `checkpoints/step-000010/`: a Hugging Face model folder, and in `trainer/` what training goes on from.
It comes to the disk in this order: files into a hidden folder, flushed; `trainer/state.json`, which lists them; the
rename. It goes the other way: first the name. So what has a name is whole, unless the disk itself lost something.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import CheckpointConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.files import step_of, sync_folder, write_json
from bandpo_cli.storage.run_folder import RunFolder

TRAINER = "trainer"
STATE = f"{TRAINER}/state.json"
FORMAT = 1

_STAGING_NAME = re.compile(r"\.step-\d+\.(writing|removing)")


@dataclass(frozen=True)
class Progress:
    """How far a run has come. With weights and optimizer state, all that its further steps depend on.

    The learning rate is a function of `updates`; every random choice has a seed made of the run's seed and the step
    (`bandpo_cli.seeds`), so there is no state of a random generator to keep.

    Attributes:
        step: the last step that is done.
        updates: optimizer updates done; the version of the policy.
        skipped_in_a_row: how many of the latest updates were skipped; `optim.max_skips` bounds it.
        position: problems given by the stream.
        problems: tells the problems that the run trains and is evaluated on from others.
    """

    step: int
    updates: int
    skipped_in_a_row: int
    position: int
    problems: str


def write_trainer_state(folder: Path, progress: Progress) -> None:
    """Write `trainer/state.json` with the size of every file there is: the mark of a whole checkpoint."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_json(folder / STATE, {"format": FORMAT, **asdict(progress), "files": files})


def read_trainer_state(folder: Path) -> Progress:
    """Return the progress of a whole checkpoint. Raises UserError, which says what is wrong, for any other."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise UserError(f"{folder}: format {state['format']} of a checkpoint is not known here")
        progress = Progress(
            step=int(state["step"]),
            updates=int(state["updates"]),
            skipped_in_a_row=int(state["skipped_in_a_row"]),
            position=int(state["position"]),
            problems=str(state["problems"]),
        )
        sizes = {str(name): int(size) for name, size in state["files"].items()}
    except OSError as error:
        raise UserError(f"{folder}: {STATE} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{folder}: {STATE} is damaged") from None
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size:,}" if path.is_file() else "no"
            raise UserError(f"{folder}: {name} is damaged: {found} of {size:,} bytes")
    if step_of(folder) != progress.step:
        raise UserError(f"{folder}: holds step {progress.step}")
    return progress


def complete_checkpoints(run: RunFolder) -> tuple[dict[int, Progress], dict[int, str]]:
    """Return the progress of each checkpoint that training can go on from, and what is wrong with each other one."""
    whole: dict[int, Progress] = {}
    damaged: dict[int, str] = {}
    for path in sorted((run.path / "checkpoints").glob("step-*")):
        step = step_of(path)
        if step is not None:
            try:
                whole[step] = read_trainer_state(path)
            except UserError as error:
                damaged[step] = str(error)
    return whole, damaged


def kept_steps(
    steps: Iterable[int], records: Iterable[Mapping[str, Any]], config: CheckpointConfig
) -> set[int]:
    """Return which of the checkpoints of `steps` are kept: the last ones, and the best by the steps' records.

    Of equals the earlier is the better. A checkpoint of a step without the metric is never among the best.
    """
    ordered = sorted(steps)
    last = ordered if config.keep_last is None else ordered[-config.keep_last :]
    scores = {record["step"]: _score(record, config.best_metric) for record in records}
    scored = [(score, -step) for step in ordered if (score := scores.get(step)) is not None]
    best = sorted(scored, reverse=True)[: config.keep_best]
    return {*last, *(-step for _, step in best)}


def _score(record: Mapping[str, Any], metric: str | None) -> float | None:
    """Return what a step is judged by: the metric, or without one the mean of mean@n over the evaluation sets."""
    if metric is not None:
        value = record.get(metric)
        return float(value) if isinstance(value, int | float) else None
    means = [value for key, value in record.items() if key.startswith("eval/") and "/mean_at_" in key]
    return sum(means) / len(means) if means and None not in means else None


def prune_checkpoints(run: RunFolder, config: CheckpointConfig) -> None:
    """Remove the checkpoints that the settings do not keep, by what the disk has: a resume decides as the run did.

    The record is flushed first: a checkpoint counts only when the line of its step is there. Nothing is removed where
    the updates before the latest one were skipped: the policy may be broken, and the others are what to go back to.
    """
    whole, _ = complete_checkpoints(run)
    if whole and whole[max(whole)].skipped_in_a_row:
        return
    run.sync_metrics()
    for step in whole.keys() - kept_steps(whole, run.read_metrics(), config):
        delete_checkpoint(run.checkpoint_dir(step))


def remove_checkpoints_after(run: RunFolder, step: int) -> None:
    """Remove what a run that goes on after `step` must not meet: later checkpoints, damaged ones, and half ones."""
    folder = run.path / "checkpoints"
    whole, damaged = complete_checkpoints(run)
    for each in [*(each for each in whole if each > step), *damaged]:
        delete_checkpoint(run.checkpoint_dir(each))
    for path in folder.glob(".step-*"):
        if _STAGING_NAME.fullmatch(path.name):
            shutil.rmtree(path)


def staging_folder(folder: Path, doing: str) -> Path:
    """Return the hidden folder beside a checkpoint in which it is written or removed, empty ground for it."""
    hidden = folder.with_name(f".{folder.name}.{doing}")
    if hidden.exists():
        shutil.rmtree(hidden)
    return hidden


def delete_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its name first: one that is half removed is never taken for whole."""
    hidden = staging_folder(folder, "removing")
    os.rename(folder, hidden)
    sync_folder(folder.parent)
    shutil.rmtree(hidden)
