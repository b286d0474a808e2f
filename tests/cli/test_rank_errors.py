"""Errors of ranks: the file that the launcher and torchrun read, and the process that prints them."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bandpo_cli.__main__ import main
from bandpo_cli.cli.launch_ranks import RankError, prints_errors, read_error, record_error
from bandpo_cli.errors import LostRankError, RunError, UserError
from bandpo_cli.grading import workers
from bandpo_cli.processes.ranks import launched_ranks


def test_the_ranks_of_a_machine_share_its_cores_for_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 12)
    assert workers.default_workers() == 8
    for key, value in (("RANK", "1"), ("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(key, value)
    assert workers.default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert workers.default_workers() == 1


def from_received(error: Exception) -> Exception:
    error.__cause__ = RuntimeError("rank 3")
    error.__cause__.__dict__["received"] = True
    return error


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (UserError("no such model"), 2, ""),
        (LostRankError("lost the connection"), 1, ""),
        (RunError("ValueError: x"), 1, "Traceback\n  line\nValueError: x"),
        (from_received(RunError("out of memory")), 1, ""),
    ],
)
def test_a_recorded_error_is_read_again_and_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, traceback: str
) -> None:
    path = tmp_path / "error.json"
    assert read_error(path) is None
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_error(error, code, traceback)
    record = read_error(path)
    assert record is not None
    lost, received = isinstance(error, LostRankError), error.__cause__ is not None
    assert record == RankError(str(error), code, traceback, lost, record.time_ns, received)
    assert record.time_ns > 0
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(path))
    report = str(ChildFailedError("train", {0: failure}))
    assert f"exitcode  : {code}" in report
    assert (traceback or str(error)).splitlines()[-1] in report
    for content in ("", "{", "[]", '{"rank": "a"}', '{"rank": {"text": "a"}}'):
        path.write_text(content)
        assert read_error(path) is None


def test_an_error_without_a_launcher_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    record_error(RunError("x"), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "printed"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "BANDPO_NPROC": "2"}, False),  # the parent process prints it
    ],
)
def test_who_prints_an_error(
    tmp_path: Path, environ: dict[str, str], printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of a command: in the file of its rank, and on the terminal at most once for all ranks."""
    path = tmp_path / "error.json"
    with (
        mock.patch.dict(os.environ, {**environ, "TORCHELASTIC_ERROR_FILE": str(path)}),
        mock.patch.object(sys, "argv", ["bandpo", "train", "--set", "optim.lrr=1"]),
        mock.patch("bandpo_cli.__main__.silence_other_ranks"),
        mock.patch("bandpo_cli.__main__.handle_forwarded_signals"),
    ):
        assert prints_errors() == printed
        assert launched_ranks() == (2 if "BANDPO_NPROC" in environ else None)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    record = read_error(path)
    assert record is not None
    assert "optim.lrr" in record.message
    assert "\n" not in record.message
    assert capsys.readouterr().err == (f"error: {record.message}\n" if printed else "")


def test_an_unexpected_error_is_recorded_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bandpo_cli.__main__.app", mock.Mock(side_effect=[ZeroDivisionError("x"), ZeroDivisionError("x")])
    )
    monkeypatch.setattr("bandpo_cli.__main__.silence_other_ranks", lambda: None)
    for rank, raised in (("0", ZeroDivisionError), ("1", SystemExit)):
        path = tmp_path / f"{rank}.json"
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("TORCHELASTIC_ERROR_FILE", str(path))):
            monkeypatch.setenv(name, value)
        with pytest.raises(raised):
            main()
        record = read_error(path)
        assert record is not None
        assert record.message == "ZeroDivisionError: x"
        assert record.traceback.startswith("Traceback (most recent call last)")
        assert json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == record.traceback
