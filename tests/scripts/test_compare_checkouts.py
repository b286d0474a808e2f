"""The comparers of scripts/compare_checkouts, on hand-made folders: what counts as a difference, and what does not."""

import json
import math
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.compare_checkouts.commands import COMMANDS, Command, Stdout, choose
from scripts.compare_checkouts.compare import compare_files, first_difference, numbers_in, settings_in
from scripts.compare_checkouts.judge import judge_all
from scripts.compare_checkouts.run import Outcome, Side, stamps

WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
CHECKPOINT = "checkpoints/step-000002"


def write_tensor(path: Path, values: tuple[float, ...]) -> None:
    """Write one float32 tensor of shape (2, 3) as a safetensors file, by hand."""
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "embed.weight": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<6f", *values))


def write_samples(folder: Path, texts: list[str], kind: Any = None) -> None:
    table = pa.table({"text": texts, "reward": pa.array([0.0, math.nan], kind)})
    pq.write_table(table, folder / "samples" / "step-000001.parquet")


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Side, Side]:
    """Return two sides with the same run, whose durations and paths differ."""
    both = tuple(Side(name, tmp_path / f"{name}-checkout", tmp_path / name) for name in ("old", "new"))
    for side, seconds in zip(both, (1.5, 2.5), strict=True):
        folder = side.work / "runs" / "a"
        for name in ("samples", CHECKPOINT):
            (folder / name).mkdir(parents=True)
        records = [{"step": step, "optim/loss": 0.1 + step, "time/step": seconds + step} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "config.yaml").write_text(f"seed: 1\nmodel:\n  path: {side.work}/model\n")
        (folder / "summary.json").write_text(json.dumps({"status": "FINISHED", "last_step": records[-1]}))
        write_tensor(folder / CHECKPOINT / "model.safetensors", WEIGHTS)
        write_samples(folder, ["1+1", "2*3"])
        (folder / "plot.png").write_bytes(str(seconds).encode())
    return both[0], both[1]


def outcome(side: Side, **changes: Any) -> Outcome:
    """Return the outcome of a command that wrote every file of a side."""
    values = {"code": 0, "stdout": "", "stderr": "", "seconds": 1.0, "written": frozenset(stamps(side.work))}
    return Outcome(**{**values, **changes})


def differences(sides: tuple[Side, Side], command: Command | None = None, *outcomes: Outcome) -> list[str]:
    """Return what the comparison of one command reports."""
    command = command or Command("train", ("train",))
    pair = (outcomes[0], outcomes[1]) if outcomes else (outcome(sides[0]), outcome(sides[1]))
    (verdict,) = judge_all([command], {command.name: pair}, sides)
    return [str(difference) for difference in verdict.differences]


def test_runs_that_differ_in_durations_and_paths_are_equal(sides):
    assert differences(sides) == []


def test_values_and_lines_that_differ_are_reported_with_their_place(sides):
    """A float in its last bit, an added key, one element of a tensor, a cell of a table, a removed line, and a type."""
    folder = sides[1].work / "runs" / "a"
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    metrics.write_text(metrics.read_text().replace("2.1", repr(math.nextafter(2.1, 3))))
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "steps": 3}))
    write_tensor(folder / CHECKPOINT / "model.safetensors", (*WEIGHTS[:4], 0.75, 0.6))
    write_samples(folder, ["1+1", "2*4"])
    tensor, *others = differences(sides)
    assert "safetensors: embed.weight[4] (1 of 6 elements differ, bytes): '0000003f' != '0000403f'" in tensor
    assert others == [
        "runs/a/metrics.jsonl: [2]: optim/loss: 2.1 != 2.1000000000000005",
        "runs/a/samples/step-000001.parquet: columns: text[1]: '2*3' != '2*4'",
        "runs/a/summary.json: steps: missing != 3",
    ]
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    write_samples(folder, ["1+1", "2*3"], pa.float32())
    _, line, column, _ = differences(sides)
    assert line.startswith("runs/a/metrics.jsonl: [2]: {'step': 2")
    assert line.endswith("!= missing")
    assert column == "runs/a/samples/step-000001.parquet: types: reward: 'double' != 'float'"


def test_exit_codes_tracebacks_and_written_files_are_compared(sides):
    wrong = Command("wrong", ("train", "--steps", "0"), code=2, writes=False)
    nothing: dict[str, Any] = {"code": 2, "written": frozenset()}
    good, bad = outcome(sides[0], **nothing), outcome(sides[1], **{**nothing, "code": 0})
    assert differences(sides, wrong, good, good) == []
    assert differences(sides, wrong, good, bad) == ["exit code (expected 2; ): 2 != 0"]
    assert differences(sides, wrong, bad, bad) == ["exit code (expected 2; ): 0 != 0"]
    trace = outcome(sides[1], **nothing, stderr="Traceback (most recent call last):\n")
    assert differences(sides, wrong, good, trace) == ["shows a traceback: False != True"]
    wrote = outcome(sides[1], **{**nothing, "written": frozenset(["runs/a/metrics.jsonl"])})
    assert differences(sides, wrong, good, wrote) == ["writes files: [] != ['runs/a/metrics.jsonl']"]


def test_output_is_compared_as_the_command_asks(sides):
    def found(stdout: Stdout, old: str, new: str) -> list[str]:
        command = Command("bounds", ("bounds",), stdout=stdout, writes=False)
        outcomes = (outcome(sides[0], stdout=text, written=frozenset()) for text in (old, new))
        return differences(sides, command, *outcomes)

    assert found(Stdout.BYTES, "a 1\n", "a  1\n") == ["stdout[0]: 'a 1' != 'a  1'"]
    assert found(Stdout.NUMBERS, "p is 1.50e-3\n", "p: 1.50e-3\n") == []
    assert found(Stdout.NUMBERS, "p is 1.50e-3\n", "p is 1.51e-3\n") == ["stdout[0]: '1.50e-3' != '1.51e-3'"]
    report = '{"finding": "%s", "accuracy": %s, "seconds_per_step": %s}'
    assert found(Stdout.JSON, report % ("a", 1, 2), report % ("b", 1, 3)) == []
    assert found(Stdout.JSON, report % ("a", 1, 2), report % ("a", 1.0, 2)) == ["stdout: accuracy: 1 != 1.0"]
    assert found(Stdout.NONE, "a", "b") == []


def test_settings_of_a_dry_run_are_read_between_sentences_and_equal_values_are_the_same_number():
    text = "model  the model\nseed: 1\nsteps: 3\noptim:\n  lr: 0.1\n\nmemory 1.5 GiB\n"
    expected = {"settings": {"seed": 1, "steps": 3, "optim": {"lr": 0.1}}, "numbers": ["1.5"]}
    assert settings_in(text) == expected
    assert numbers_in("mean@4 0.375 to -1e-05") == ["4", "0.375", "-1e-05"]
    assert first_difference({"a": [math.nan, None, "x"]}, {"a": [math.nan, None, "x"]}) is None
    for old, new in ((0.0, -0.0), (1, 1.0), (1, True), (0.1, 0.1 + 2**-56), (None, "None"), ([], {})):
        assert first_difference([old], [new]) is not None, (old, new)


def test_metrics_of_the_mlflow_store_are_compared(tmp_path):
    paths = {name: tmp_path / name / "mlflow.db" for name in ("old", "new")}
    for (name, path), loss in zip(paths.items(), (0.5, 0.25), strict=True):
        path.parent.mkdir()
        with closing(sqlite3.connect(path)) as store, store:
            for table in ("runs (run_uuid, name, status)", "params (key, value, run_uuid)",
                          "tags (key, value, run_uuid)", "metrics (key, value, step, is_nan, run_uuid)"):  # fmt: skip
                store.execute(f"CREATE TABLE {table}")
            store.execute("INSERT INTO runs VALUES (?, 'a', 'FINISHED')", (name,))
            store.execute("INSERT INTO tags VALUES ('bandpo.run', ?, ?)", (name, name))
            rows = [("optim/loss", loss, 1, 0, name), ("time/step", 2 * loss, 1, 0, name)]
            store.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", rows)
    assert compare_files(paths["old"], paths["old"], (str, str)) is None
    found = compare_files(paths["old"], paths["new"], (str, str))
    assert str(found) == "a: metrics: optim/loss[0][1]: 0.5 != 0.25"


def test_only_takes_the_commands_that_others_need():
    assert [command.name for command in choose(["eval-again"])] == ["eval-file", "eval-again"]
    with pytest.raises(ValueError, match="no such command"):
        choose(["no-such"])
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    assert sum(command.name.startswith("wrong-") for command in COMMANDS) >= 20
