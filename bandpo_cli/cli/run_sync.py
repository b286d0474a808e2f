"""The runs of a `bandpo sync`, one after the other, each with its line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bandpo_cli.cli.lines import print_line, print_warning
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.storage.environment import redact_credentials
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.sweeps.folder import PLAN_FILE
from bandpo_cli.tracking.run_record import read_stored_run
from bandpo_cli.tracking.store import Store, check_reachable
from bandpo_cli.tracking.sync import SyncResult, store_for_run, sync_run
from bandpo_cli.tracking.tracker import CONNECT_TIMEOUT_S, short_error


@dataclass(frozen=True)
class RunToSync:
    """A run to send.

    Attributes:
        path: its folder.
        named: whether the user named it, and not a folder that it is in.
    """

    path: Path
    named: bool


def choose_runs(names: Sequence[str], every: bool, runs_dir: Path) -> list[RunToSync]:
    """Return the runs that `names` name, or every run in `runs_dir`; each once.

    Raises:
        UserError: none is named, a name is no run's, or names are given beside --all.
    """
    if every == bool(names):
        raise UserError(
            "give runs or --all, not both" if every else "name the runs to send, or give --all for every run"
        )
    found: dict[Path, RunToSync] = {}
    for chosen in _inside(runs_dir) if every else [each for name in names for each in _named(name, runs_dir)]:
        found.setdefault(chosen.path.resolve(), chosen)
    if not found:
        raise UserError(f"no runs in {runs_dir}; give another place with --runs-dir")
    return list(found.values())


def _named(name: str, runs_dir: Path) -> list[RunToSync]:
    for path in (runs_dir / name, Path(name)):
        if name and (path / PLAN_FILE).is_file():
            return _inside(path)
    return [RunToSync(RunFolder.open(runs_dir, name).path, named=True)]


def _inside(folder: Path) -> list[RunToSync]:
    """Return the runs of a runs folder or a sweep, those of the sweeps in it included."""
    paths = [path.parent for path in sorted(folder.glob("*/config.yaml"))]
    nested = [each for plan in sorted(folder.glob(f"*/{PLAN_FILE}")) for each in _inside(plan.parent)]
    return [*(RunToSync(path, named=False) for path in paths), *nested]


def run_sync(chosen: Sequence[RunToSync], uri: str | None, console: Console) -> None:
    """Send each run what its store lacks, and print a line for each.

    A store that cannot be reached is asked once. The other runs are sent before an error ends this.

    Raises:
        RunError: a store could not be reached or did not take a run.
        UserError: the folder of a run is damaged.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # seconds; a person waits here, no training
    away: dict[str, str] = {}
    damaged: list[str] = []
    for each in chosen:
        try:
            run = read_stored_run(each.path)
            if not each.named and run.tracking.get("mlflow") is False:
                print_line(console, "left out: tracking.mlflow is false; name it to send it", each.path.name)
                continue
            store = store_for_run(run, uri)
            if store.uri not in away:
                _sync_one(each.path, store, console)
        except UserError as error:
            damaged.append(str(error))
        except RunError as error:
            away[store.uri] = str(error)
    for line in damaged if away else damaged[:-1]:
        print_warning(console, line)
    if away:
        lines = "; ".join(away.values())
        raise RunError(
            f"{lines}. Nothing is lost, the run folders have everything: sync again when it is back"
        )
    if damaged:
        raise UserError(damaged[-1])


def _sync_one(path: Path, store: Store, console: Console) -> None:
    """Send one run. Raises RunError when the store does not answer or does not take it."""
    try:
        with console.status(f"sending {path.name} …"):
            check_reachable(store.uri, CONNECT_TIMEOUT_S)
            synced = sync_run(store, path)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow and the network raise ends as a line
        how = "cannot be reached" if isinstance(error, OSError) else f"did not take run {path.name}"
        raise RunError(f"MLflow at {redact_credentials(store.uri)} {how} ({short_error(error)})") from None
    print_line(console, _sync_text(synced), path.name)
    if synced.metrics.differing:
        print_warning(console, _conflict_text(synced.metrics.differing))


def _sync_text(synced: SyncResult) -> str:
    metrics = synced.metrics
    sent = [
        _count(metrics.new, "metric value"),
        _count(synced.params, "param"),
        _count(synced.tags, "tag"),
        _count(synced.files, "file"),
        f"status {synced.status}" if synced.ended else "",
    ]
    there = [
        _count(metrics.there, "metric value"),
        _count(synced.files_there, "file"),
        "" if synced.ended else f"status {synced.status}",
    ]
    line = f"sent {', '.join(filter(None, sent)) or 'nothing'}"
    line += f"; there already: {', '.join(filter(None, there))}" if any(there) else ""
    return f"{line}; still being written: its files and its end come later" if synced.writing else line


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}" if number else ""


def _conflict_text(number: int) -> str:
    return (
        f"{_count(number, 'value')} at MLflow {'differs' if number == 1 else 'differ'} from the run folder's: steps "
        "that a resume did again were sent before, and MLflow changes no value"
    )
