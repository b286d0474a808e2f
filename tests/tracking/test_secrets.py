"""A secret in the address of MLflow or in its variables reaches neither the files, nor MLflow, nor the terminal."""

from pathlib import Path

import pytest

from tests.cli.eval_command import Done, bandpo
from tests.cli.train_runs import SMALL

SECRET = "s3cr3t"
ADDRESS = f"http://me:{SECRET}@127.0.0.1:9/?token={SECRET}#{SECRET}"
TRAIN = ["train", *(item for item in SMALL if item != "--no-mlflow"), "--steps", "1"]
EVAL = ["eval", "--n", "1", "--k", "1", "--limit", "1"]


def run_command(cwd: Path, *arguments: str, uri: str | None = None) -> Done:
    """Run a command; require that it prints no secret and leaves none in any file."""
    variables = dict.fromkeys(("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"), SECRET)
    if uri is not None:
        variables["MLFLOW_TRACKING_URI"] = uri
    done = bandpo(*arguments, cwd=cwd, **variables)
    assert SECRET not in done.out + done.err
    for path in cwd.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    return done


@pytest.mark.slow
def test_a_secret_of_the_environment_or_a_flag_is_stored_and_printed_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("bandpo_cli.cli.doctor._check_imports", lambda _: None)  # no output of its own
    done = run_command(tmp_path, *TRAIN, "--name", "a", uri=ADDRESS)
    assert " ".join(done.out.split()).count("bandpo sync a") == 1, done.out
    for arguments in (
        ["show", "a"], ["sync", "a"], [*EVAL, "--name", "e"], ["doctor"],
        ["export", "verl", "--out", "job", "--config", "runs/a/config.yaml", "--allow-differences"],
        ["import", "verl", "job", "--name", "i"], ["import", "verl", "job", "--tracking-uri", ADDRESS],
    ):  # fmt: skip
        done = run_command(tmp_path, *arguments, uri=ADDRESS)
        fails = arguments[0] in ("sync", "import")  # nobody answers at the address
        assert done.code == (1 if fails else 0), (arguments, done)
    assert run_command(tmp_path, "sync", "a", "--tracking-uri", ADDRESS).code == 1
    for arguments in (TRAIN, EVAL, ["train", "--resume", "a", "--steps", "2"]):
        done = run_command(tmp_path, *arguments, "--tracking-uri", ADDRESS)
        assert (done.code, done.err.count("\n")) == (2, 1), done
        assert "set MLFLOW_TRACKING_URI" in done.err
