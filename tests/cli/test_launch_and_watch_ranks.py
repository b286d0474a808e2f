"""The launcher of --nproc, with ranks that are small scripts: their errors, deaths and signals, and what is printed."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bandpo_cli.__main__ import main
from bandpo_cli.cli import launch_and_watch_ranks as launcher
from bandpo_cli.cli.launch_and_watch_ranks import (
    RankError,
    first_failure,
    launch,
    rank_variables,
    read_error,
    record_error,
)
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import LostRankError, RunError, UserError
from bandpo_cli.grading import workers
from bandpo_cli.processes.ranks import check_gpu_count, launched_ranks, ranks_to_start
from bandpo_cli.storage.run_record import usable_cores
from tests.processes.checks import check_ended

RESUME = "continue with: bandpo train --resume the-name --nproc 2"

START = """
import os, signal, sys, time
from pathlib import Path
from bandpo_cli.cli.signals import handle_forwarded_signals
from bandpo_cli.errors import LostRankError, RunError, UserError
from bandpo_cli.cli.launch_and_watch_ranks import record_error, silence_other_ranks

rank = os.environ["RANK"]
silence_other_ranks()

def write(name, text=""):
    Path(f"{name}.part-{rank}").write_text(text)
    os.replace(f"{name}.part-{rank}", name)  # whoever sees the file sees its content

def end(error, code):
    record_error(error, code)
    sys.exit(code)

def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.01)

def wait_forever():
    write(f"pid-{rank}", str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(launcher, "POLL_INTERVAL_S", 0.02)
    (tmp_path / "runs" / "the-name").mkdir(parents=True)
    (tmp_path / "runs" / "the-name" / "config.yaml").touch()
    return tmp_path


def start(script: str, count: int = 2) -> int:
    """Launch ranks that execute `script`, for a run whose folder has been written."""
    folder = Path("runs", "the-name")
    return launch(count, RunConfig(), "train", folder, Path("runs"), ["-c", f"{START}\n{script}"])


def send_when(number: int, *paths: Path) -> threading.Thread:
    """Send a signal to this process once the files `paths` exist."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ranks_have_their_place_and_rank_0_prints(in_folder, capfd):
    script = (
        "write(f'place-{rank}', ' '.join(os.environ[key] for key in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', "
        "'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'BANDPO_RUN_NAME')))\n"
        "print('printed by', rank); print('error of', rank, file=sys.stderr); os.write(1, b'native' + rank.encode())"
    )
    assert start(script, 3) == 0
    places = [(in_folder / f"place-{rank}").read_text() for rank in range(3)]
    assert places == [f"{rank} 3 {rank} 3 127.0.0.1 the-name" for rank in range(3)]
    out, err = capfd.readouterr()
    assert sorted(out.replace("native0", "").split()) == ["0", "by", "printed"]
    assert "native0" in out
    assert err == "error of 0\n"


@pytest.mark.slow
def test_warnings_of_other_ranks_are_printed_once(in_folder, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "WARNING_S", 600.0)
    script = (
        "import logging; warn = logging.getLogger('bandpo_cli').warning; logging.lastResort = None\n"
        "if rank == '0': wait_for('warned-1'); wait_for('warned-2')\n"
        "warn('every %s', 'rank')\n"
        "if rank != '0': [warn('the kernel of odd\\x1bname is slow') for _ in range(3)]\n"
        "if rank == '2': warn('http://me:secret@host fails')\n"
        "write(f'warned-{rank}')\n"
        "if rank == '0': end(RunError('the run failed'), 1)"
    )
    with pytest.raises(RunError, match="the run failed"):
        start(script, 3)
    lines = sorted(line.partition(": rank ")[2] for line in capfd.readouterr().err.splitlines())
    assert [line[3:] for line in lines] == ["the kernel of odd\\x1bname is slow", "http://***@host fails"]
    assert lines[1].startswith("2: ")


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_named(in_folder, monkeypatch, capfd):
    """Rank 0 notices nothing, as a rank that waits on a GPU; it also ignores SIGTERM. Rank 1 has a child process."""
    monkeypatch.setattr(launcher, "ENDING_S", 0.3)
    script = (
        "import subprocess\n"
        "if rank == '0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); wait_forever()\n"
        "wait_for('pid-0'); write('pid-child', str(subprocess.Popen(['sleep', '600']).pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(RunError) as error:
        start(script)
    killed = "rank 1 was killed by SIGKILL (as the system does when memory runs out)"
    assert str(error.value) == f"{killed}; {RESUME}"
    check_ended([int((in_folder / "pid-0").read_text())])
    check_ended([int((in_folder / "pid-child").read_text())])
    assert capfd.readouterr() == ("", "")


FAILURES = [
    # Rank 0 has ended long before rank 1, whose error was the cause.
    ("if rank == '0': end(LostRankError('lost'), 1)\ntime.sleep(0.3); end(RunError('no memory'), 1)",
     RunError("rank 1: no memory"), ""),
    # A mistake that all ranks find is reported once.
    ("time.sleep(0.2 * (rank == '0')); end(UserError('no such model'), 2)", UserError("no such model"), ""),
    ("if rank == '1': record_error(RunError('ZeroDivisionError: x'), 1, 'Traceback: x'); sys.exit(1)",
     RunError(f"rank 1: ZeroDivisionError: x; {RESUME}"), "Traceback: x\n"),
    ("os._exit(7 * int(rank))", RunError(f"rank 1 ended with exit code 7; {RESUME}"), ""),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("script", "error", "printed"), FAILURES, ids=["lost", "mistake", "trace", "code"])
def test_the_first_error_is_reported_once(in_folder, script, error, printed, capfd):
    with pytest.raises(type(error)) as raised:
        start(script)
    assert str(raised.value) == str(error)
    assert capfd.readouterr() == ("", printed)


@pytest.mark.slow
def test_a_complete_run_waits_for_no_hanging_rank(in_folder, monkeypatch):
    monkeypatch.setattr(launcher, "OTHERS_S", 0.3)
    assert start("wait_for('pid-1') if rank == '0' else wait_forever()") == 0
    check_ended([int((in_folder / "pid-1").read_text())])


STOPS_AT_THE_END_OF_A_STEP = """
received = []
signal.signal(signal.SIGUSR2, lambda *_: received.append("SIGINT"))
signal.signal(signal.SIGVTALRM, lambda *_: received.append("SIGTERM"))
write(f"ready-{rank}")
wait_for("ready-0")
wait_for("ready-1")
write("ready")
while rank == "0" and not received:
    time.sleep(0.01)
time.sleep(0.2)
write(f"received-{rank}", " ".join(received))
"""


@pytest.mark.slow
def test_rank_0_alone_receives_the_first_signal(in_folder, capfd):
    before = signal.getsignal(signal.SIGINT)
    sender = send_when(signal.SIGINT, in_folder / "ready")
    assert start(STOPS_AT_THE_END_OF_A_STEP) == 0
    sender.join()
    assert [(in_folder / f"received-{rank}").read_text() for rank in range(2)] == ["SIGINT", ""]
    assert capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_signal_ends_rank_0_while_it_waits_for_another_rank(in_folder):
    """Rank 0 notices the signal when the other rank has ended, as in a collective."""
    script = (
        "signals = []\n"
        "def note(*_):\n    signals.append(1); write(f'signal-{len(signals)}')\n"
        "if rank == '1': wait_forever()\n"
        "for n in (signal.SIGUSR2, signal.SIGPROF): signal.signal(n, note)\n"
        "wait_for('pid-1'); write('ready'); wait_for('signal-2')\n"
        "while True:\n"
        "    try:\n        os.kill(int(Path('pid-1').read_text()), 0); time.sleep(0.01)\n"
        "    except ProcessLookupError: sys.exit(130)"
    )
    senders = [send_when(signal.SIGINT, in_folder / name) for name in ("ready", "signal-1")]
    assert start(script) == 130
    for sender in senders:
        sender.join()


@pytest.mark.slow
def test_a_signal_while_the_ranks_load_ends_them(in_folder, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "OTHERS_S", 0.2)
    script = (
        "handle_forwarded_signals()\n"
        "try:\n    wait_forever()\nexcept KeyboardInterrupt:\n    os._exit(130)"  # as `main` does
    )
    sender = send_when(signal.SIGTERM, in_folder / "pid-0", in_folder / "pid-1")
    assert start(script) == 143
    sender.join()
    assert capfd.readouterr().err == "stopped\n"
    check_ended([int((in_folder / "pid-1").read_text())])


def test_no_process_is_left_when_the_launcher_fails(in_folder, monkeypatch):
    def fail(*_: object) -> None:
        while not {"pid-0", "pid-1"} <= {path.name for path in in_folder.iterdir()}:
            time.sleep(0.01)
        raise ZeroDivisionError

    monkeypatch.setattr(launcher, "_watch", fail)
    with pytest.raises(ZeroDivisionError):
        start("wait_forever()")
    for rank in range(2):
        check_ended([int((in_folder / f"pid-{rank}").read_text())])


def ended(rank: int, code: int, error: RankError | None, killed: bool = False) -> Any:
    """Return the attributes of a rank that has ended."""
    return SimpleNamespace(rank=rank, code=code, error=error, killed=killed)


def failed(message: str, time_ns: int = 0, lost: bool = False, received: bool = False) -> RankError:
    return RankError(message, 1, lost_rank=lost, time_ns=time_ns, received=received)


@pytest.mark.parametrize(
    ("ranks", "signals", "cause"),
    [
        ([ended(0, 0, None), ended(1, 0, None)], [], None),
        ([ended(0, 1, failed("a", 5)), ended(1, 1, failed("b", 3))], [], 1),
        ([ended(0, 1, failed("rank 1: b", 3, received=True)), ended(1, 1, failed("b", 5))], [], 1),
        ([ended(0, 1, failed("a", 1)), ended(1, -9, None)], [], 1),
        ([ended(0, 1, failed("a", 1)), ended(1, -9, None, killed=True)], [], 0),
        ([ended(0, 1, failed("l", 1, lost=True)), ended(1, 1, failed("b", 2))], [], 1),
        ([ended(0, 1, failed("l", 1, lost=True)), ended(1, 3, None)], [], 1),
        ([ended(0, -signal.SIGABRT, None), ended(1, -9, None)], [], 1),
        ([ended(0, 1, failed("l", 1, lost=True)), ended(1, -signal.SIGABRT, None)], [], 1),
        ([ended(0, 130, None), ended(1, 1, failed("l", 1, lost=True))], [signal.SIGINT], 1),
        ([ended(0, 130, None), ended(1, 0, None)], [signal.SIGINT], None),
        ([ended(0, 130, None), ended(1, 0, None)], [], 0),
        ([ended(0, -signal.SIGTERM, None), ended(1, 0, None)], [signal.SIGTERM], None),
        ([ended(0, -signal.SIGTERM, None), ended(1, 0, None)], [], 0),
        ([ended(0, -signal.SIGKILL, None), ended(1, 0, None)], [signal.SIGTERM], 0),
    ],
)
def test_the_cause_of_a_failure(ranks, signals, cause):
    found = first_failure(ranks, signals)
    assert (None if found is None else found.rank) == cause


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (failed("a"), failed("a"), "a"),
        (failed("a"), failed("rank 0: a", received=True), "a"),
        (failed("rank 1: b", received=True), failed("b", 5), "rank 1: b"),
        (None, failed("rank 0: a", received=True), "rank 0: a"),
    ],
)
def test_the_failed_rank_is_named_once(first, second, message):
    ranks = [ended(0, int(first is not None), first, first is None), ended(1, 1, second)]
    with pytest.raises(RunError, match=f"^{message}$"):
        launcher._exit_code(ranks, [], RESUME)


@pytest.mark.parametrize(
    ("count", "environ", "threads"),
    [(2, {}, max(1, usable_cores() // 2)), (10_000, {}, 1), (2, {"OMP_NUM_THREADS": "3"}, 3)],
)
def test_the_threads_of_a_rank_are_its_share(count, environ, threads):
    assert rank_variables(0, count, 1, "a", environ)["OMP_NUM_THREADS"] == str(threads)


def test_only_the_first_process_starts_ranks(monkeypatch):
    assert [ranks_to_start(nproc) for nproc in (1, 2)] == [None, 2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks_to_start(2) is None
    with pytest.raises(UserError, match="--nproc 4: torchrun has started 2 ranks"):
        ranks_to_start(4)
    monkeypatch.setenv("BANDPO_NPROC", "2")
    assert ranks_to_start(2) is None


def test_more_ranks_than_gpus_are_refused_and_allowed_on_a_cpu(monkeypatch):
    check_gpu_count("auto", 8, "--nproc 8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpu_count("auto", 2, "--nproc 2")
    check_gpu_count("cpu", 3, "--nproc 3")
    with pytest.raises(UserError, match="--nproc 3: every rank needs its own GPU, and this machine has 2"):
        check_gpu_count("auto", 3, "--nproc 3")


def test_the_ranks_of_a_machine_share_its_cores_for_grading(monkeypatch):
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
def test_a_recorded_error_is_read_again_and_by_torchrun(tmp_path, monkeypatch, error, code, traceback):
    path = tmp_path / "error.json"
    assert read_error(path) is None
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_error(error, code, traceback)
    record = read_error(path)
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


def test_an_error_without_a_launcher_is_not_recorded(tmp_path, monkeypatch):
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
def test_who_prints_an_error(tmp_path, environ, printed, capsys):
    path = tmp_path / "error.json"
    with (
        mock.patch.dict(os.environ, {**environ, "TORCHELASTIC_ERROR_FILE": str(path)}),
        mock.patch.object(sys, "argv", ["bandpo", "train", "--set", "optim.lrr=1"]),
        mock.patch("bandpo_cli.__main__.silence_other_ranks"),
        mock.patch("bandpo_cli.__main__.handle_forwarded_signals"),
    ):
        assert launched_ranks() == (2 if "BANDPO_NPROC" in environ else None)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    record = read_error(path)
    assert "optim.lrr" in record.message
    assert "\n" not in record.message
    assert capsys.readouterr().err == (f"error: {record.message}\n" if printed else "")


def test_an_unexpected_error_is_recorded_with_its_traceback(tmp_path, monkeypatch):
    errors = [ZeroDivisionError("x") for _ in range(2)]
    monkeypatch.setattr("bandpo_cli.__main__.app", mock.Mock(side_effect=errors))
    monkeypatch.setattr("bandpo_cli.__main__.silence_other_ranks", lambda: None)
    for rank, raised in (("0", ZeroDivisionError), ("1", SystemExit)):
        path = tmp_path / f"{rank}.json"
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("TORCHELASTIC_ERROR_FILE", str(path))):
            monkeypatch.setenv(name, value)
        with pytest.raises(raised):
            main()
        record = read_error(path)
        assert record.message == "ZeroDivisionError: x"
        assert record.traceback.startswith("Traceback (most recent call last)")
        assert json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == record.traceback
