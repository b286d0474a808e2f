"""No name leads outside the runs folder, whether it comes from the user, a sweep's plan or a file in a run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from bandpo_cli.config.task import task_from_arguments
from bandpo_cli.errors import UserError
from bandpo_cli.experiments.plan import choose_run_name
from bandpo_cli.reports.run_variants import read_sweep, select_runs
from bandpo_cli.storage.checkpoints import check_model_path, resolve_model
from bandpo_cli.storage.run_folder import EvalFolder, RunFolder, create_folder
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.sweeps import sweep_plan
from tests.fuzz.mutate import NAMES
from tests.fuzz.outcome import accepts

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet="./\\~aA0_-+=,@ \x00\n", max_size=20),
    st.lists(st.sampled_from(["..", ".", "a", "", "/", "\\", "~"])).map("/".join),
)


@given(name=TEXTS)
@example(name="a" * 200)
@example(name="a" * 201)
def test_any_name_is_refused_or_creates_a_folder_in_the_runs_folder(tmp_path_factory, name):
    check_refused_or_created_in_runs(tmp_path_factory.getbasetemp() / "names", name)


def test_unusual_folder_names(tmp_path):
    for name in NAMES:
        check_refused_or_created_in_runs(tmp_path, name)


def check_refused_or_created_in_runs(place: Path, name: str) -> None:
    runs = place / "deep" / "runs"
    before = set(place.rglob("*"))
    made: list[Path] = []
    if not accepts(lambda: made.append(create_folder(runs, choose_run_name(runs, name, "d"))), name):
        assert set(place.rglob("*")) == before
        return
    (path,) = made
    assert path.is_dir()
    assert path.parent == runs
    assert path.resolve().parent == runs.resolve()
    assert set(place.rglob("*")) - before <= {place / "deep", runs, path}
    path.rmdir()


def test_references_are_resolved_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    create_folder(runs, "real")
    openers: list[Callable[[Path, str], Any]] = [
        RunFolder.open,
        SweepFolder.open,
        EvalFolder.open,
        lambda folder, name: resolve_model(name, folder),
        lambda folder, name: select_runs([Path(name)], folder),
    ]
    calls: list[Callable[[str], Any]] = [
        *(functools.partial(opener, runs) for opener in openers),
        *((lambda name, opener=opener: opener(Path(name), "real")) for opener in openers),
        check_model_path,
        lambda name: task_from_arguments([name]),
        lambda name: choose_run_name(Path(name), None, "default"),
    ]
    for name in NAMES:
        for call in calls:
            accepts(lambda call=call, name=name: call(name), name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["real", "runs"]


@pytest.fixture(autouse=True)
def _no_model_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "check_config", lambda config: None)


def create_sweep_of_two_runs(place: Path) -> Path:
    request = sweep_plan.plan_sweep(None, {"bounds.method": "clip,none"}, [], {}, [], place)
    return SweepFolder.create(place, "s", request.runs, None, {}).path


@pytest.mark.parametrize(
    "name",
    ["../../x", "../s", "/tmp/x", "a/b", "..", ".", "", "plans", "report", "a\nb", "x" * 300, 5, None, ["a"]],
    ids=repr,
)
def test_an_untrusted_plan_cannot_name_a_path_outside_the_sweep(tmp_path, name):
    folder = create_sweep_of_two_runs(tmp_path / "runs")
    plan = yaml.safe_load((folder / "sweep.yaml").read_text())
    plan["runs"][0]["name"] = name
    (folder / "sweep.yaml").write_text(yaml.safe_dump(plan))
    for written in (tmp_path / "x.yaml", folder / "x.yaml"):  # files that such a name could find
        written.write_text("seed: 0\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"sweep\.yaml|plans/5\.yaml"):
        SweepFolder.open(tmp_path / "runs", "s")
    if isinstance(name, str):
        with pytest.raises(UserError, match="not a valid folder name"):
            read_sweep(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_instead_of_a_run_is_archived_and_not_followed(tmp_path):
    folder = SweepFolder.open(tmp_path, create_sweep_of_two_runs(tmp_path).name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    name = folder.runs[0].name
    (folder.path / name).symlink_to(elsewhere)
    folder.archive_attempt(name)
    assert not (folder.path / name).exists()
    assert (elsewhere / "kept").read_text() == "kept"
    assert (folder.path / "attempts" / f"{name}-1").is_symlink()
