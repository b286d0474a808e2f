"""Untrusted files of problems, completions and probabilities, and files of sweeps from other users."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from bandpo_cli.cli.bounds_view import probabilities
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.task import task_from_arguments
from bandpo_cli.errors import ConfigError
from bandpo_cli.reports.comparison import select_runs
from bandpo_cli.reports.comparison.runs import read_variant_run
from bandpo_cli.storage.tables import TOKEN_COLUMNS, read_token_tables, write_token_table
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.tasks.rows import read_hub
from bandpo_cli.tasks.task import build_task
from tests.fuzz.mutate import (
    JSON_TEXTS,
    KINDS,
    YAML_TEXTS,
    as_json,
    as_yaml,
    changed_values,
    damaged_files,
    not_a_file,
)
from tests.fuzz.outcome import accepts, check_both_outcomes
from tests.reports.sweep_folders import write_run

ROWS: list[dict[str, Any]] = [
    {"question": f"{i}+1?", "answer": str(i + 1), "level": i, "data_source": "x", "extra_info": {"a": [i]},
     "completions": ["Answer: 1", "x"]}
    for i in range(30)
]  # fmt: skip
LINES = b"\n".join(map(as_json, ROWS))
COUNTS = pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.slow)])
SHORT = tuple(text for text in JSON_TEXTS if len(text) < 60_000)


def write_rows(path: Path) -> bytes:
    """Write `ROWS` in the format of the file extension, and return the content."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        path.write_text("question,answer,completion\n" + "".join(f'"{i}, 1?",{i},x\n' for i in range(30)))
    else:
        path.write_bytes(as_json(ROWS) if path.suffix == ".json" else LINES)
    return path.read_bytes()


def contents(path: Path, count: int) -> Iterator[bytes]:
    """Yield damaged files, and JSON files with changed values."""
    good = write_rows(path)
    yield from damaged_files(good, () if path.suffix == ".parquet" else SHORT, 1, count)
    if path.suffix == ".json":
        yield from map(as_json, changed_values(ROWS, 2, count))
    elif path.suffix == ".jsonl":
        changed = (
            changed_value
            for changed_value in changed_values(ROWS, 3, count)
            if isinstance(changed_value, list)
        )
        yield from (b"\n".join(map(as_json, item)) for item in changed)


def read_problems(path: Path) -> None:
    task = build_task(resolve([{"task": task_from_arguments([str(path)])}]).task)
    task.train_problems()
    task.heldout_sets()
    task.notes()


READERS: list[Callable[[Path], Any]] = [read_problems, read_completions]


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("read", READERS)
def test_data_files(tmp_path: Path, read: Callable[[Path], Any], ending: str, count: int) -> None:
    path = tmp_path / f"data{ending}"
    check_both_outcomes(lambda: read(path), path, contents(path, count))


@pytest.mark.parametrize("kind", KINDS)
def test_paths_that_are_not_files(tmp_path: Path, kind: str) -> None:
    for ending in (".jsonl", ".parquet"):
        path = tmp_path / f"data{ending}"
        write_rows(path)
        with not_a_file(path, kind):
            for read in READERS:
                assert not accepts(lambda read=read, path=path: read(path), (kind, ending))
            assert not accepts(lambda path=path: probabilities([], path), kind)


@COUNTS
def test_files_of_probabilities(tmp_path: Path, count: int) -> None:
    path = tmp_path / "p.txt"
    contents = damaged_files(b"0.1 0.2, 0.5\n# x\n1e-9 1\n", SHORT, 4, count)
    check_both_outcomes(lambda: probabilities([], path), path, contents)


def test_a_script_next_to_the_data_is_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    mark = tmp_path / "mark"
    (folder / "set.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        list(read_hub(str(folder), None, "train", "give a file"))
    assert not mark.exists()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep of two runs, one of them finished, as another user could share it."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    runs = [{"name": f"{arm}-s0", "arm": arm, "seed": 0} for arm in ("clip", "none")]
    for run in runs:
        write_run(folder / run["name"], (f"bounds.method={run['arm']}",), steps=2)
        (folder / run["name"] / "config.yaml").write_text(f"steps: 2\nbounds: {{method: {run['arm']}}}\n")
    (folder / "plans").mkdir()
    for run in runs:
        (folder / "plans" / f"{run['name']}.yaml").write_text("seed: 0\n")
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"name": "sweep", "baseline": "clip", "runs": runs}))
    (folder / "stopped.json").write_text('{"none-s0": "far behind"}')
    write_token_table(
        folder / "clip-s0" / "tokens" / "step-000001.parquet", {name: [0.5, 0.25] for name in TOKEN_COLUMNS}
    )
    return folder


def read_all(sweep: Path) -> None:
    """Read a sweep as `--resume` and `bandpo report` do."""
    folder = SweepFolder.open(sweep.parent, sweep.name)
    folder.stopped()
    for run in folder.runs:
        folder.is_finished(run.name)
        folder.error_message(run.name)
        assert folder.run_path(run.name).parent == folder.path
        resolve([read_layer(folder.plan_path(run.name))])


def read_report(sweep: Path) -> None:
    for run in select_runs([sweep], sweep.parent).runs:
        assert run.folder.parent == sweep
        read_variant_run(run)


def read_tokens(sweep: Path) -> None:
    read_token_tables(sweep / "clip-s0")


FILES: dict[str, tuple[tuple[str, ...], list[Callable[[Path], None]]]] = {
    "sweep.yaml": (YAML_TEXTS, [read_all, read_report]),
    "plans/clip-s0.yaml": (YAML_TEXTS, [read_all]),
    "stopped.json": (JSON_TEXTS, [read_all]),
    "clip-s0/config.yaml": (YAML_TEXTS, [read_report]),
    "clip-s0/summary.json": (JSON_TEXTS, [read_all, read_report]),
    "clip-s0/metrics.jsonl": (JSON_TEXTS, [read_report]),
    "clip-s0/tokens/step-000001.parquet": ((), [read_tokens]),
}


@pytest.mark.parametrize("count", [6, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_files_of_an_untrusted_sweep(sweep: Path, name: str, count: int) -> None:
    path = sweep / name
    good = path.read_bytes()
    texts, calls = FILES[name]
    texts = texts if count > 50 else tuple(text for text in texts if len(text) < 5000)[::3]
    inputs = [*damaged_files(good, texts, 5, count)]
    if path.suffix in (".yaml", ".json"):
        write = as_yaml if path.suffix == ".yaml" else as_json
        inputs += map(write, changed_values(yaml.safe_load(good), 6, count))
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in good.splitlines()]
        inputs += (as_json(changed_value) for changed_value in changed_values(lines, 7, count))
        inputs += (
            b"\n".join(map(as_json, changed_value)) + b"\n"
            for changed_value in changed_values(lines, 8, count)
            if isinstance(changed_value, list)
        )
    before = {item for item in sweep.parent.rglob("*") if item != path}
    try:
        for content in inputs:
            path.write_bytes(content)
            for call in calls:
                accepts(lambda call=call: call(sweep), content[:2000])
        for kind in KINDS:
            with not_a_file(path, kind):
                for call in calls:
                    accepts(lambda call=call: call(sweep), kind)
    finally:
        path.write_bytes(good)
    read_all(sweep)
    assert {item for item in sweep.parent.rglob("*") if item != path} == before
