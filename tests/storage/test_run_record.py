"""Reading `summary.json`: one reader decides whether a run is finished, resumable, or damaged."""

from pathlib import Path

import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.storage import run_record
from bandpo_cli.storage.checkpoints import complete_checkpoints, model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import is_finished, read_stored_run, read_summary


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "a")


@pytest.mark.parametrize(
    ("summary", "status", "finished"),
    [
        ({"status": "FINISHED", "steps": 3}, "FINISHED", True),
        ({"status": "KILLED", "steps": 3}, "KILLED", False),
        ({"status": "FAILED", "steps": 3, "error": "x"}, "FAILED", False),
        ({"status": "lost"}, None, False),
        ({"status": ["FINISHED"]}, None, False),
        ({}, None, False),
    ],
)
def test_the_status_is_one_of_three_words(folder, summary, status, finished):
    folder.write_config("seed: 1\n")
    folder.append_metrics({"step": 3})
    assert (read_summary(folder.path), is_finished(folder.path)) == (None, False)
    assert read_stored_run(folder.path).status == "KILLED"
    folder.write_summary(summary)
    found = read_summary(folder.path)
    assert found is not None
    assert (found.status, found.content) == (status, summary)
    assert is_finished(folder.path) is finished
    assert read_stored_run(folder.path).status == (status or "KILLED")
    # `is_finished` does not compare the steps: resume and sweeps compare them with the settings themselves.
    folder.append_metrics({"step": 4})
    assert "steps" not in summary or read_stored_run(folder.path).status == "KILLED"


def test_a_run_that_ends_while_it_is_read_has_its_final_status(folder, monkeypatch):
    """Its summary is written before it releases the lock, so it has to be read after the lock."""
    folder.write_config("seed: 1\n")
    folder.append_metrics({"step": 1})

    def is_locked(path: Path) -> bool:
        folder.write_summary({"status": "FINISHED", "steps": 1})
        return False

    monkeypatch.setattr(run_record, "is_locked", is_locked)
    assert read_stored_run(folder.path).status == "FINISHED"


@pytest.mark.parametrize("content", [b"{", b" " * (2**20 + 1)])
def test_a_damaged_summary_raises_one_line_and_is_not_finished(folder, content):
    (folder.path / "summary.json").write_bytes(content)
    with pytest.raises(UserError, match=r"summary\.json") as error:
        read_summary(folder.path)
    assert "\n" not in str(error.value)
    assert not is_finished(folder.path)


def test_a_checkpoint_without_training_state_holds_a_model_and_is_not_complete(folder):
    for step in (20, 3):
        folder.checkpoint_dir(step).mkdir(parents=True)
        (folder.checkpoint_dir(step) / "config.json").write_text("{}")
    folder.checkpoint_dir(5).mkdir()
    assert model_checkpoints(folder) == {step: folder.checkpoint_dir(step) for step in (3, 20)}
    assert complete_checkpoints(folder).complete == {}
    assert list(complete_checkpoints(folder).damaged) == [3, 5, 20]
