"""A run folder with every kind of file in it, for the tests of storage and of tracking."""

import pytest

from bandpo_cli.storage.run_folder import RunFolder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a small finished run in `tmp_path/runs/first`; the current folder is an empty one."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = RunFolder.create(tmp_path / "runs", "first")
    folder.write_config("seed: 3\n")
    folder.write_env({"versions": {"python": "3.11"}})
    folder.write_samples(10, [])
    folder.write_summary({"step": 3})
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "train/reward": step / 4})
    return folder
