"""Untrusted files of problems and completions, and files of sweeps from other users."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.task import Source, task_from_arguments
from bandpo_cli.errors import ConfigError
from bandpo_cli.reports.run_tables import read_runs
from bandpo_cli.reports.run_variants import select_runs
from bandpo_cli.reports.view_page import open_sources, page_data
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import is_finished
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.storage.tables import TOKEN_COLUMNS, TokenValues, read_recorded_tokens, write_token_table
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.tasks.rows import read_rows
from bandpo_cli.tasks.task import build_task
from bandpo_cli.types import WRONG, Completion, Group, Problem, Rollout
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

COUNT = 20
"""Files of a kind with changed bytes, and with changed values; every seed costs the same."""
ROWS: list[dict[str, Any]] = [
    {"question": f"{i}+1?", "answer": str(i + 1), "level": i, "data_source": "x", "extra_info": {"a": [i]},
     "completions": ["Answer: 1", "x"]}
    for i in range(30)
]  # fmt: skip
SHORT = tuple(text for text in JSON_TEXTS if len(text) < 60_000)


def as_lines(rows: list[Any]) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in rows)


def write_rows(path: Path) -> bytes:
    """Write `ROWS` in the format of the file extension, and return the content."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        path.write_text("question,answer,completion\n" + "".join(f'"{i}, 1?",{i},x\n' for i in range(30)))
    else:
        path.write_bytes(as_json(ROWS) if path.suffix == ".json" else as_lines(ROWS))
    return path.read_bytes()


def changed_files(suffix: str, value: Any, count: int) -> Iterator[bytes]:
    """Yield files of JSON, JSON lines or YAML with changed values; nothing for another suffix."""
    write = {".json": as_json, ".jsonl": as_lines, ".yaml": as_yaml}.get(suffix)
    for changed in changed_values(value, 2, count) if write else ():
        yield write(changed) if write and isinstance(changed, list) else as_json(changed)


def read_problems(path: Path) -> None:
    task = build_task(resolve([{"task": task_from_arguments([str(path)])}]).task)
    task.train_problems()
    task.heldout_sets()


READERS: list[Callable[[Path], Any]] = [read_problems, read_completions]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("read", READERS)
def test_data_files(tmp_path, read, ending):
    path = tmp_path / f"data{ending}"
    damaged = damaged_files(write_rows(path), () if ending == ".parquet" else SHORT, 1, COUNT)
    check_both_outcomes(lambda: read(path), path, [*damaged, *changed_files(ending, ROWS, COUNT)])


@pytest.mark.parametrize("kind", KINDS)
def test_paths_that_are_not_files(tmp_path, kind):
    for ending, readers in ((".jsonl", READERS), (".parquet", READERS), (".yaml", [read_layer])):
        path = tmp_path / f"data{ending}"
        write_rows(path)
        with not_a_file(path, kind):
            for read in readers:
                assert not accepts(lambda read=read, path=path: read(path), (kind, ending))


def test_a_script_next_to_the_data_is_not_executed(tmp_path):
    folder, mark = tmp_path / "set", tmp_path / "mark"
    folder.mkdir()
    (folder / "set.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        list(read_rows(Source(path=str(folder)), "train"))
    assert not mark.exists()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep of two runs, one of them finished, as another user could share it."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    runs = [{"name": f"{variant}-s0", "variant": variant, "seed": 0} for variant in ("clip", "none")]
    (folder / "plans").mkdir(parents=True)
    for run in runs:
        write_run(folder / run["name"], (f"bounds.method={run['variant']}",), steps=2)
        (folder / run["name"] / "config.yaml").write_text(f"steps: 2\nbounds: {{method: {run['variant']}}}\n")
        (folder / "plans" / f"{run['name']}.yaml").write_text("seed: 0\n")
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"name": "sweep", "baseline": "clip", "runs": runs}))
    (folder / "stopped.json").write_text('{"none-s0": "far behind"}')
    tokens = {name: [0.5, 0.25] for name in TOKEN_COLUMNS}
    write_token_table(folder / "clip-s0" / "tokens" / "step-000001.parquet", tokens)
    write_viewed_run(sweep=folder)
    return folder


def write_viewed_run(sweep: Path) -> None:
    """Add the completions of a step to a run, with values per token."""
    completion = Completion((1, 2), (-0.5, -1.0), "stop", 0)
    problem = Problem("p", "1+1", "2", "t", "math")
    rollout = Rollout(problem, "1+1", (1,), completion, "ab", WRONG)
    run, half = RunFolder(sweep / "clip-s0"), np.ones(2, np.float16)
    run.write_samples(1, [Group(problem, (rollout,))])
    single = half.astype(np.float32)
    arrays = np.array([2]), single[:1], ["a", "b"], np.arange(2, dtype=np.int32), single, single
    run.write_token_values(1, TokenValues(*arrays, half, half, half, half, np.ones(2, np.uint8)))


def read_page(sweep: Path) -> None:
    """Read a run as `bandpo view` does."""
    page_data(open_sources(["clip-s0"], sweep))


def read_all(sweep: Path) -> None:
    """Read a sweep as `--resume` and `bandpo report` do."""
    folder = SweepFolder.open(sweep.parent, sweep.name)
    folder.stopped()
    for run in folder.runs:
        is_finished(folder.path / run.name)
        folder.error_message(run.name)
        assert (folder.path / run.name).parent == folder.path
        resolve([read_layer(folder.plan_path(run.name))])


def read_report(sweep: Path) -> None:
    runs = select_runs([sweep], sweep.parent).runs
    assert all(run.folder.parent == sweep for run in runs)
    read_runs(runs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "texts", "calls"),
    [
        ("stopped.json", SHORT, [read_all]),
        ("sweep.yaml", YAML_TEXTS, [read_all, read_report]),
        ("plans/clip-s0.yaml", YAML_TEXTS, [read_all]),
        ("clip-s0/config.yaml", YAML_TEXTS, [read_report]),
        ("clip-s0/summary.json", SHORT, [read_all, read_report]),
        ("clip-s0/metrics.jsonl", SHORT, [read_report]),
        ("clip-s0/token_values/step-000001.parquet", (), [read_page]),
        ("clip-s0/samples/step-000001.parquet", (), [read_page]),
        ("clip-s0/tokens/step-000001.parquet", (), [lambda sweep: read_recorded_tokens(sweep / "clip-s0")]),
    ],
)
def test_files_of_an_untrusted_sweep(sweep, name, texts, calls):
    path = sweep / name
    good = path.read_bytes()
    inputs = [*damaged_files(good, texts[::4], 5, 8)]
    if path.suffix != ".parquet":
        value = [*map(json.loads, good.splitlines())] if path.suffix == ".jsonl" else yaml.safe_load(good)
        inputs += changed_files(path.suffix, value, 8)
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
