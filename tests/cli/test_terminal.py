"""Foreign text does not control the terminal: every command under a pseudo-terminal, with a hostile text everywhere."""

import io
import json
import logging
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import CONTINUES, Console, SafeStream, open_console, print_json, protect_streams
from bandpo_cli.errors import escape_controls
from tests.cli.train_runs import SMALL, sets
from tests.commands import Forked, run_bandpo
from tests.tasks.stored_completions import jsonl
from tests.text_model import save_text_model

HOSTILE = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x1b[38;5;199m\x9b5A\x7f\x00\x08\u202e\u2066\rEND"
"""Clear the screen, write to the clipboard, a colour, a C1 sequence, DEL, changes of direction, an overwritten line."""

NAME = HOSTILE.replace("\x00", "")
"""The text as a file name."""

WRITTEN_BY_RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[(?:2K|\d+A|H)|\r")
"""Colours, the cursor of live displays."""

FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def on_terminal(*arguments: str | Path, cwd: Path) -> str:
    """Run `bandpo` on a terminal, and return what it has written there."""
    controller, terminal = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": "160", "PYTHONPATH": str(cwd)}
    process = Forked(*map(str, arguments), cwd=cwd, terminal=os.ttyname(terminal), **variables)
    written = bytearray()
    while process.poll() is None or select.select([controller], [], [], 0)[0]:
        if select.select([controller], [], [], 0.05)[0]:
            written += os.read(controller, 1 << 16)
    os.close(terminal)
    os.close(controller)
    return written.decode(errors="surrogateescape")


def check_harmless(written: str) -> None:
    """Require that the terminal has received nothing of `HOSTILE` and no other control sequence than Rich's."""
    for part in ("\x1b[2J", "\x1b]", "\x1b[38;5;199m", "\rEND"):
        assert part not in written
    assert not FORBIDDEN.findall(WRITTEN_BY_RICH.sub("", written))


def poisoned(value: Any) -> Any:
    """Return JSON with the hostile text at the end of each text and of each key of a metric."""
    if isinstance(value, dict):
        return {key + HOSTILE if "/" in key else key: poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


def poison_json(path: Path, keep: tuple[str, ...] = ()) -> None:
    """Change each line of a file; the values of the keys `keep` stay, so that the file remains valid."""
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    contents = [*map(json.loads, texts)]
    changed = [poisoned(old) | {key: old[key] for key in keep if key in old} for old in contents]
    path.write_text("\n".join(map(json.dumps, changed)) + "\n")


def poison_table(path: Path) -> None:
    table = pq.read_table(path)
    for index, field in enumerate(table.schema):
        if field.type == pa.string() and field.name not in ("finish_reason", "extra"):
            values = [None if text is None else text + HOSTILE for text in table[index].to_pylist()]
            table = table.set_column(index, field.name, pa.array(values, pa.string()))
    pq.write_table(table, path)


def poison_config(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    config["tracking"] |= {"experiment": HOSTILE, "parent": HOSTILE}
    config["model"] |= {"path": HOSTILE, "revision": HOSTILE}
    path.write_text(yaml.safe_dump(config))


def poison_run(folder: Path, valid: bool) -> None:
    """Put the hostile text into the files of a run; with `valid`, only where the run remains readable."""
    status = ("status",) if valid else ()
    poison_json(folder / "summary.json", status)
    poison_json(folder / "env.json")
    poison_json(folder / "metrics.jsonl", ("train/accuracy", "time/step"))
    poison_json(next(folder.glob("checkpoints/*/trainer/state.json")))
    place = {"destination": "http://h/", "project": "e", "id": "k", "remote_id": "r", "where": "w"}
    (folder / "trackers.json").write_text(json.dumps({"mlflow": [poisoned(place)]}))
    for path in folder.glob("evals/*.json"):
        sets = json.loads(path.read_text())["sets"]
        path.write_text(json.dumps({"step": 2, "sets": {HOSTILE + label: sets[label] for label in sets}}))
    for path in folder.glob("samples/*.parquet"):
        poison_table(path)
    if valid:
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"status": "FAILED", "error": HOSTILE}))
        poison_config(folder / "config.yaml")
    else:
        (folder / "config.yaml").write_text(json.dumps({"bounds": {"method": HOSTILE}, HOSTILE: 1}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with hostile runs, evaluations, data, a model, a sweep file and graders."""
    folder = tmp_path_factory.mktemp("hostile")
    evaluation = ["eval", "--model", "a", "--n", "2", "--limit", "2", "--task", "countdown", "--name", "e"]
    for arguments in (["train", *SMALL, "--steps", "2", "--name", "a"], [*evaluation, "--no-mlflow"]):
        run_bandpo(*arguments, cwd=folder).check_returncode()
    runs = folder / "runs"
    for name in (NAME, f"{NAME}2", "damaged"):
        shutil.copytree(runs / "a", runs / name)
        poison_run(runs / name, valid=name != "damaged")
    shutil.copytree(runs / "e", runs / f"e{NAME}")
    poison_json(runs / f"e{NAME}" / "eval.json", ("name", "status"))
    for path in (runs / f"e{NAME}").rglob("*.parquet"):
        poison_table(path)
    rows = (
        {"question": f"{row}+1? {HOSTILE}", "answer": HOSTILE, "id": f"{HOSTILE}{row}"} for row in range(8)
    )
    jsonl(folder / "data.jsonl", *rows)
    jsonl(folder / f"{NAME}.jsonl", {HOSTILE: HOSTILE})
    row = {"question": "q", "answer": "1", "completion": HOSTILE, "id": HOSTILE}
    jsonl(folder / "samples.jsonl", row, row)
    (folder / "hostile_grader.py").write_text(
        f"import sys\n\ndef fail(*arguments):\n    print({HOSTILE!r}, flush=True)\n"
        f"    print({HOSTILE!r}, file=sys.stderr)\n    raise ValueError({HOSTILE!r})\n"
        f"\ndef right(*arguments):\n    print({HOSTILE!r}, flush=True)\n    return 1.0\n"
    )
    (folder / "no_import.py").write_text(f"raise ValueError({HOSTILE!r})\n")
    save_text_model(folder / "model", ["1+1"], layers=1)
    shutil.copytree(folder / "model", folder / "hostile-model")
    poison_json(folder / "hostile-model" / "config.json")
    variants = {NAME: {"bounds.method": HOSTILE}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"variants": variants, "seeds": [0]}))
    (folder / "settings.yaml").write_text(yaml.safe_dump({HOSTILE: HOSTILE}))
    return folder


DATA = ["--task", "data.jsonl", "--model", "model", "--max-tokens", "4", "--no-mlflow"]
SMALL_STEP = "sampling.prompts=2 sampling.samples=2 optim.updates=1 evaluation.every=0"
FEW = [*DATA, "--steps", "1", *sets(SMALL_STEP)]
COMMANDS: Mapping[str, list[str]] = {
    "runs": ["runs"],
    "show": ["show", NAME],
    "show json": ["show", NAME, "--format", "json"],
    "show damaged": ["show", "damaged"],
    "samples": ["samples", NAME, "--limit", "0"],
    "samples jsonl": ["samples", NAME, "--format", "jsonl"],
    "samples of an evaluation": ["samples", f"e{NAME}"],
    "view": ["view", NAME],
    "plot": ["plot", NAME],
    "report": ["report", f"runs/{NAME}", f"runs/{NAME}2", "runs/a", "runs/damaged", "--out", f"report{NAME}"],
    "compare": ["eval", "compare", f"{NAME}@0", f"{NAME}@2"],
    "compare evaluations": ["eval", "compare", "e", f"e{NAME}"],
    "sync": ["sync", NAME, "--tracking-uri", "http://127.0.0.1:9"],
    "resume": ["train", "--resume", NAME],
    "resume an evaluation": ["eval", "--resume", f"e{NAME}"],
    "train dry": ["train", "--dry-run", *DATA],
    "train columns": ["train", "--dry-run", "--model", "model", "--task", f"{NAME}.jsonl"],
    "train grader": ["train", *FEW, "--grader", "hostile_grader:fail"],
    "train import": ["train", *FEW, "--grader", "no_import:f"],
    "eval": ["eval", *DATA, "--grader", "hostile_grader:right", "--n", "2"],
    "eval samples": ["eval", "--samples", "samples.jsonl", "--grader", "hostile_grader:fail", "--no-mlflow"],
    "sweep": ["sweep", "sweep.yaml", "--dry-run"],
    "bounds": ["bounds", NAME],
    "command": [NAME],
}  # fmt: skip

WITHOUT_FOREIGN_TEXT = {"compare evaluations", "train dry"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_foreign_control_characters_to_a_terminal(name, folder):
    written = on_terminal(*COMMANDS[name], cwd=folder)
    check_harmless(written)
    assert name in WITHOUT_FOREIGN_TEXT or "\\x1b[2J" in written or "\\u001b[2J" in written


def test_texts_are_escaped_wherever_they_are_printed(capsys):
    protect_streams()
    console = open_console()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(Text(HOSTILE), Panel(HOSTILE, title=HOSTILE))
    console.print(table)
    with Live(Text(HOSTILE), console=console):
        print(HOSTILE)
    logging.getLogger("bandpo_cli").warning("%s", HOSTILE)
    print(HOSTILE, file=sys.stderr)
    out, err = capsys.readouterr()
    assert not FORBIDDEN.findall(out + err)
    assert out.count("\\x1b[2J") >= 6
    assert err.rstrip("\n") == escape_controls(HOSTILE)


def test_colours_reach_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(Text("red", "red"))
    assert console.file.getvalue() == "\x1b[31mred\x1b[0m\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_has_equal_values_in_every_encoding(encoding, monkeypatch):
    value = {"text": HOSTILE + "\n\tδ é 😀"}
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    protect_streams()
    print_json(value)
    sys.stdout.flush()
    written = stream.buffer.getvalue().decode(encoding)
    assert json.loads(written) == value
    assert not FORBIDDEN.findall(written)
    assert ("δ" in written) == (encoding == "utf-8")


@pytest.mark.slow
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path):
    command = [sys.executable, "-m", "bandpo_cli", "bounds", "0.1"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert b"\\u0394p" in done.stdout
    assert done.stderr == b""


def test_output_without_a_reader_is_discarded(capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        stream = SafeStream(pipe)
        stream.on_loss = "nothing reads it"
        for _ in range(3):
            stream.write("line\n")
            stream.flush()
    assert capfd.readouterr().err == "nothing reads it\n"


@pytest.mark.slow
def test_a_run_goes_on_when_its_output_is_closed(tmp_path):
    process = Forked("train", *SMALL, "--steps", "2", "--name", "a", cwd=tmp_path)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(60), err) == (0, CONTINUES + "\n")
    assert json.loads((tmp_path / "runs/a/summary.json").read_text())["status"] == "FINISHED"
