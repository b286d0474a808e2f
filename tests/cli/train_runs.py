"""Helpers for tests of `bandpo train --resume`: comparing run folders, and changing them as a crash does."""

import json
import shutil
from pathlib import Path
from typing import Any

from bandpo_cli.metric_names import without_clock


def sets(settings: str) -> list[str]:
    """Return the flags --set of settings that are separated by spaces."""
    return [word for setting in settings.split() for word in ("--set", setting)]


SMALL_SETTINGS = (
    "task.max_number=5 sampling.prompts=4 sampling.samples=4 optim.updates=2 evaluation.every=2 evaluation.problems=4 "
    "evaluation.samples=4 evaluation.k=[1,4] checkpoint.every=2 checkpoint.keep_last=null"
)
SMALL = [*sets(SMALL_SETTINGS), "--seed", "3", "--no-mlflow"]


def metrics_lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines(keepends=True)


def record(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, metrics_lines(folder))
    return [without_clock(line) for line in found]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


TIMED = ("metrics.jsonl", "env.json", "summary.json")


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run by path without the lock; files and plots that depend on times are empty."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    timed = {path for path in paths if path.name in TIMED or path.parent.name == "plots"}
    return {
        path.relative_to(folder).as_posix(): b"" if path in timed else path.read_bytes() for path in paths
    }


def check_equal(folder: Path, uninterrupted: Path) -> None:
    """Require an equal run; only env.json may differ after a crash."""
    assert record(folder) == record(uninterrupted)
    ours, theirs = file_contents(folder), file_contents(uninterrupted)
    assert sorted(ours) == sorted(theirs)
    assert not [name for name in ours if ours[name] != theirs[name]]
    ended, other = (without_times(summary(path)) for path in (folder, uninterrupted))
    assert ended == other


def without_times(content: dict[str, Any]) -> dict[str, Any]:
    """Return a summary without what depends on the clock; the size of metrics.jsonl does, too."""
    left_out = dict.fromkeys(("last_step", "overview_of"))
    return without_clock(content) | left_out | {"overview": {**content["overview"], "started_ms": None}}


def truncate_metrics(folder: Path, last: int) -> None:
    """Keep the metrics up to step `last`, as after a kill, and remove summary and plots; keep the checkpoints."""
    (folder / "metrics.jsonl").write_text("".join(metrics_lines(folder)[: last + 1]))
    for name in ("summary.json", "plots"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def drop_checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
