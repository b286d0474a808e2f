"""`bandpo eval compare`: finds the two records and shows what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bandpo_cli.cli.eval_views import interval_text, metric_label, metric_text, plural
from bandpo_cli.cli.lines import print_line
from bandpo_cli.cli.model_ref import find_run
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.evaluation.compare import Comparison, compare
from bandpo_cli.paths import folders_containing, path_exists, user_path
from bandpo_cli.storage.eval_folder import RECORD_FILE, read_record
from bandpo_cli.storage.files import replace_nonfinite, step_of


def print_comparison(console: Console, a: str, b: str, runs_dir: Path, show: int, style: str) -> None:
    """Print what changed from A to B. Raises UserError for what is no evaluation, or shares nothing."""
    path_a, path_b = find_record(a, runs_dir), find_record(b, runs_dir)
    found = compare(read_record(path_a), read_record(path_b))
    if style == "json":
        sets = {label: each.as_json() for label, each in found.items()}
        print(
            json.dumps(
                replace_nonfinite({"a": str(path_a), "b": str(path_b), "sets": sets}),
                indent=2,
                ensure_ascii=False,
            )
        )
        return
    print_line(console, str(path_a), "A")
    print_line(console, str(path_b), "B")
    for label, each in found.items():
        _print_set(console, label, each, show)


def find_record(text: str, runs_dir: Path) -> Path:
    """Return the record that `text` names: an evaluation, a JSON file, or RUN or RUN@STEP as evaluated in training.

    Raises:
        UserError: there is none.
    """
    for path in (runs_dir / text, user_path(text)):
        if text and path_exists(path / RECORD_FILE):
            return path / RECORD_FILE
    if Path(text).suffix == ".json":
        return user_path(text)
    found = find_run(text, runs_dir)
    if found is None:
        names = sorted(
            [*folders_containing(runs_dir, RECORD_FILE), *folders_containing(runs_dir, "config.yaml")]
        )
        raise UserError(
            f"no evaluation {text[:200]!r} in {runs_dir}{nearest(text, names)}; give an evaluation's name, folder or "
            f"{RECORD_FILE}, or RUN@STEP"
        )
    run, step = found
    steps: dict[int, Path] = {
        number: path
        for path in sorted((run.path / "evals").glob("step-*.json"))
        if (number := step_of(path)) is not None
    }
    if not steps:
        raise UserError(f"{text}: the run in {run.path} was not evaluated in training")
    step = max(steps) if step is None else step
    if step not in steps:
        raise UserError(f"{text}: not evaluated at that step; evaluated at: {', '.join(map(str, steps))}")
    return steps[step]


def _print_set(console: Console, label: str, comparison: Comparison, show: int) -> None:
    console.print()
    print_line(console, _problems(comparison), label)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("A", "B", "B − A", "95% interval"):
        table.add_column(heading, justify="right")
    for name, each in comparison.metrics.items():
        table.add_row(
            metric_label(name),
            metric_text(name, each.a),
            metric_text(name, each.b),
            _signed(name, each.change.value),
            interval_text(name, each.change),
        )
    console.print(table)
    print_line(
        console,
        f"a higher share right in B on {plural(comparison.wins, 'problem')}, lower on {comparison.losses:,}, the same "
        f"on {comparison.ties:,}",
    )
    for id_, before, after in comparison.changed_problems[:show]:
        print_line(console, f"  {before:.2f} → {after:.2f}  {id_}")


def _problems(comparison: Comparison) -> str:
    words = f"{plural(comparison.shared, 'problem')} in both"
    extra: list[Any] = [
        f"{count:,} only in {which}"
        for which, count in (("A", comparison.only_a), ("B", comparison.only_b))
        if count
    ]
    return ", ".join([words, *extra])


def _signed(name: str, value: float) -> str:
    text = metric_text(name, value)
    return text if text.startswith("-") or float(text.replace(",", "")) == 0 else f"+{text}"
