"""Helpers that run `bandpo` commands in this process, so that torch is imported once."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd

from bandpo_cli.__main__ import main
from tests.cli.train_runs import sets

SMALL = sets(
    "task.max_number=5 sampling.prompts=4 sampling.samples=4 optim.updates=2 "
    "evaluation.problems=6 evaluation.samples=8 evaluation.k=[1,4] evaluation.batch=16"
)
"""Three batches of two problems, eight completions each."""

_WITHOUT_TORCH = """
import contextlib, io, json, os, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "mlflow"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
from bandpo_cli.__main__ import main
done = []
for folder, arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["bandpo", *arguments]
    os.chdir(folder)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    done.append([code, out.getvalue(), err.getvalue()])
json.dump(done, sys.stdout)
"""
"""Code for `python -c` that runs commands and refuses to import torch, transformers and mlflow."""


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def bandpo(*arguments: str | Path, cwd: Path, **variables: str) -> Done:
    """Run a command in `cwd`, with these environment variables, and return its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    environ = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {**environ, "COLUMNS": "100", **variables}, clear=True),
        mock.patch.object(sys, "argv", ["bandpo", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def succeed(*arguments: str | Path, cwd: Path, **variables: str) -> Done:
    """Run a command and require exit code 0."""
    done = bandpo(*arguments, cwd=cwd, **variables)
    assert done.code == 0, done.out + done.err
    return done


def usage_error(*arguments: str | Path, cwd: Path, parts: Iterable[str] = ()) -> str:
    """Run a command, require exit code 2 and an error message of one line with these parts, and return that line."""
    done = bandpo(*arguments, cwd=cwd)
    assert (done.code, done.err[:7], done.err.count("\n")) == (2, "error: ", 1), done
    assert [part for part in parts if part not in done.err] == [], done.err
    return done.err


def without_torch(cases: Sequence[tuple[Path, Sequence[str]]]) -> list[Done]:
    """Run commands, each in its folder, in one other interpreter that cannot import torch, transformers and mlflow."""
    cases = json.dumps([[str(folder), arguments] for folder, arguments in cases])
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-c", _WITHOUT_TORCH]
    done = subprocess.run(command, input=cases, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Done(*load) for load in json.loads(done.stdout)]


def record_of(folder: Path) -> dict[str, Any]:
    """Return the `eval.json` of an evaluation."""
    return dict(json.loads((folder / "eval.json").read_text(encoding="utf-8")))


def samples_of(folder: Path) -> pd.DataFrame:
    """Return the completions of an evaluation."""
    return pd.read_parquet(folder / "samples.parquet")
