"""Helpers for tests of `bandpo train --resume`: comparing run folders, and changing them as a crash does."""

import json
import shutil
from pathlib import Path
from typing import Any

from bandpo_cli.metric_names import without_clock

SMALL = [
    "--set", "task.max_number=5",
    "--set", "sampling.prompts=4", "--set", "sampling.samples=4", "--set", "optim.updates=2",
    "--set", "evaluation.every=2", "--set", "evaluation.problems=4", "--set", "evaluation.samples=4",
    "--set", "evaluation.k=[1,4]", "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=null",
    "--seed", "3", "--no-mlflow",
]  # fmt: skip


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
    return {
        path.relative_to(folder).as_posix(): b""
        if path.name in TIMED or path.parent.name == "plots"
        else path.read_bytes()
        for path in paths
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
    kept = {
        key: value for key, value in without_clock(content).items() if key not in ("last_step", "overview_of")
    }
    return kept | {"overview": {**content["overview"], "started_ms": None}}


def truncate_metrics(folder: Path, last: int) -> None:
    """Keep the metrics up to step `last`, as after a kill, and remove summary and plots; keep the checkpoints."""
    (folder / "metrics.jsonl").write_text("".join(metrics_lines(folder)[: last + 1]))
    for name in ("summary.json", "plots"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def drop_checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
