"""Rank processes, without torch: rank and world size of this process, its output and its error file.

torchrun sets the variables of the environment that are read here, and `bandpo train --nproc` sets the same ones and
those of `LAUNCHER_VARIABLE` and `RUN_NAME_VARIABLE`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bandpo_cli.errors import LostRankError, is_received, one_line, redact_credentials

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file for the error of a rank; torchrun prints its content in its report."""

LAUNCHER_VARIABLE = "BANDPO_NPROC"
"""Environment variable with the number of ranks in the processes that `--nproc` has started: their parent process
forwards signals to them and prints their error."""

RUN_NAME_VARIABLE = "BANDPO_RUN_NAME"
"""Environment variable with the name that the parent process chose for the run."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank, as its file holds it.

    Attributes:
        message: one line.
        code: exit code.
        traceback: of an exception that is neither a mistake of the user nor a known failure of a run; '' otherwise.
        lost_rank: the error is that another rank has ended.
        time_ns: nanoseconds since 1970.
        received: the error was raised on another rank, whose number the message has.
    """

    message: str
    code: int
    traceback: str = ""
    lost_rank: bool = False
    time_ns: int = 0
    received: bool = False


def rank_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks of which this process is one; 1 without torchrun."""
    return int(environ.get("WORLD_SIZE", "1")) if "RANK" in environ else 1


def local_rank_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine; 1 without torchrun."""
    return max(1, int(environ.get("LOCAL_WORLD_SIZE", "1"))) if rank_count(environ) > 1 else 1


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is rank 0, or has no other ranks."""
    return rank_count(environ) == 1 or environ["RANK"] == "0"


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that `--nproc` has started, in one of them; None elsewhere."""
    return int(environ.get(LAUNCHER_VARIABLE, "0")) or None


def launched_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the name that the parent process chose for the run; None without one."""
    return environ.get(RUN_NAME_VARIABLE)


def prints_errors() -> bool:
    """Return whether this process prints its error: rank 0 does, unless the parent process prints it for all ranks."""
    return is_main_process() and launched_ranks() is None


class RankWarnings(logging.Handler):
    """Reports the warnings of a rank, each text once."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report one warning."""
        _report_warning(one_line(redact_credentials(record.getMessage())))


@cache
def _report_warning(line: str) -> None:
    """Write a warning to a file for the launcher; with torchrun, print it unless rank 0 does, which has a console."""
    with suppress(OSError):
        if launched_ranks() is not None:
            with open(f"{os.environ[ERROR_FILE_VARIABLE]}.warnings", "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        elif not is_main_process():
            os.write(2, f"warning: rank {os.environ['RANK']}: {line}\n".encode())


def silence_other_ranks() -> None:
    """Discard what this process prints if it is a rank other than 0: all standard output, and what Python writes to
    standard error. Its warnings (`RankWarnings`) and crashes in native code are still reported.
    """
    if rank_count() > 1:
        logging.getLogger("bandpo_cli").addHandler(RankWarnings(logging.WARNING))
    if is_main_process():
        return
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open for the life of the process
    os.dup2(null.fileno(), 1)
    sys.stdout = sys.stderr = null


def record_error(error: BaseException, code: int, traceback: str = "") -> None:
    """Write the error of this process, with the traceback of an unexpected one, to the file that its launcher reads."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    is_lost = isinstance(error, LostRankError)
    record = RankError(str(error), code, traceback, is_lost, time.time_ns(), is_received(error))
    # The form that torchrun reads: it prints `py_callstack`.
    extra = {"py_callstack": traceback or record.message, "timestamp": str(record.time_ns // 10**9)}
    message = {"message": record.message, "errorCode": code, "extraInfo": extra}
    temporary = Path(f"{path}.tmp")
    with suppress(OSError):  # the error itself is more important; the exit code reports that there was one
        temporary.write_text(json.dumps({"message": message, "rank": asdict(record)}), encoding="utf-8")
        temporary.replace(path)  # the launcher finds it complete or not at all


def read_error(path: Path) -> RankError | None:
    """Return the error that `record_error` has written to `path`; None where there is no such file."""
    try:
        return RankError(**json.loads(path.read_text(encoding="utf-8"))["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
