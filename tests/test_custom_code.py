"""Modules of custom code: the order of the folders, copies in run folders, and the file that a name means."""

import json
import os
import sys
from pathlib import Path

import pytest

from bandpo_cli.config.layers import read_config
from bandpo_cli.custom_code import FOLDERS_VARIABLE, add_code_folder, code_first_in, code_from, load_function
from bandpo_cli.storage.run_record import changed_code, keep_code


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return folders by name, the current one among them; each has a module whose function returns the name."""
    monkeypatch.setenv(FOLDERS_VARIABLE, "")
    named = {name: tmp_path / name for name in ("current", "config", "run")}
    for name, folder in named.items():
        folder.mkdir()
        (folder / "module_in_folders.py").write_text(f"def place():\n    return '{name}'\n")
    monkeypatch.chdir(named["current"])
    return named


def place() -> str:
    return str(load_function("module_in_folders:place")())


def test_the_run_folder_comes_first_in_a_resume_then_the_current_folder(folders):
    """Modules with one name in several folders are not confused, also within one process."""
    add_code_folder(folders["config"])
    path = [*sys.path]
    assert place() == "current"
    with code_from(folders["run"]):
        assert place() == "run"
    assert place() == "current"
    (folders["current"] / "module_in_folders.py").unlink()
    assert place() == "config"
    assert sys.path == path


def test_a_file_beside_a_config_file_is_a_module(folders):
    (folders["current"] / "module_in_folders.py").unlink()
    (folders["config"] / "run.yaml").write_text("steps: 3\n")
    with pytest.raises(ValueError, match=r"searched the current folder .*/current and the Python path"):
        load_function("module_beside_config:place")
    read_config(Path("../config/run.yaml"))
    assert place() == "config"
    with pytest.raises(ValueError, match=r"current folder .*/current, .*/config and the Python path"):
        load_function("module_beside_config:place")


def test_child_processes_search_the_same_folders(folders):
    before = os.environ[FOLDERS_VARIABLE]
    assert str(folders["run"]) in code_first_in(folders["run"])[FOLDERS_VARIABLE]
    with code_from(folders["run"]):
        assert os.environ[FOLDERS_VARIABLE].startswith(f"{folders['run']}:")
    assert os.environ[FOLDERS_VARIABLE] == before


def test_copies_are_kept_and_compared(folders):
    """Names with a signature and in lists count; packages, installed modules and other texts do not."""
    run = folders["run"]
    (run / "module_in_folders.py").unlink()
    Path("graders.py").write_text("def judge(): ...\n")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    bounds = {"method": "module_in_folders:place", "options": {"text": "Answer: 3", "name": "package:f"}}
    rewards = [{"grader": "trl:graders:judge"}, {"grader": "json:loads"}]
    settings = json.dumps({"bounds": bounds, "task": {"rewards": rewards}})
    keep_code(settings, run)
    assert sorted(path.name for path in run.iterdir()) == ["graders.py", "module_in_folders.py"]
    assert changed_code(settings, run) == []
    Path("graders.py").write_text("def judge(): return 1\n")
    keep_code(settings, run)
    with code_from(run):
        (warning,) = changed_code(settings, run)
    assert "current/graders.py differs from the copy in the run folder" in warning
