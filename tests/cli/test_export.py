"""`bandpo export verl`: what it prints, and one line for each mistake, without anything written."""

import json
from pathlib import Path

import pytest

import bandpo_cli
from tests.cli.eval_command import Done, bandpo, usage_error
from tests.text_model import save_text_model

SMALL = ["--set", "task.max_number=5", "--set", "task.numbers=3", "--set", "optim.warmup_steps=0"]


def export(*arguments: str) -> Done:
    return bandpo("export", *arguments, cwd=Path.cwd(), COLUMNS="200")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_written_and_described(place):
    code, out, err = export("verl", *SMALL, "--out", "job", "--nodes", "2", "--gpus-per-node", "4")
    assert (code, err) == (0, "")
    assert "GPUs: 8, vLLM engines: 8" in out
    assert "run      cd job && sbatch cluster.sh" in out
    names = {"README.md", "config.yaml", "heldout.parquet", "model", "reward.py", "run.sh", "train.parquet"}
    names |= {"cluster.sh", f"bandpo-{bandpo_cli.__version__}-py3-none-any.whl"}
    assert {path.name for path in (place / "job").iterdir()} == names
    assert [path.name for path in place.iterdir()] == ["job"]
    assert "trainer.nnodes=2" in (place / "job" / "run.sh").read_text("utf-8")


def test_differences_are_refused_or_allowed(place):
    settings = ["--set", "optim.warmup_steps=8", "--set", "sampling.engine=transformers"]
    different = [*SMALL, *settings, "--gpus-per-node", "1"]
    parts = ("optim.warmup_steps = 8", "sampling.engine = transformers", "--allow-differences")
    usage_error("export", "verl", *different, "--out", "job", cwd=place, parts=parts)
    assert list(place.iterdir()) == []
    code, out, _ = export("verl", *different, "--out", "job", "--allow-differences")
    assert code == 0
    assert "\n         sampling.engine = transformers" in out  # the second difference


def test_an_existing_folder_is_named(place):
    (place / "job").mkdir()
    (place / "file").touch()
    for out, message in (("job", "exists already"), ("file/job", "cannot be written")):
        words = ["export", "verl", *SMALL, "--out", out, "--gpus-per-node", "1"]
        usage_error(*words, cwd=place, parts=[f"--out {out}: {message}"])


@pytest.mark.parametrize("setting", ["grader: missing_module:f", "rewards: [number, missing_module:f]"])
def test_a_custom_grader_that_cannot_be_imported_is_refused(setting, place):
    save_text_model(place / "model", ["1+1"], layers=1)
    rows = [{"question": f"{index}+1?", "answer": str(index + 1)} for index in range(80)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = f"task={{name: data, train: rows.jsonl, {setting}}}"
    arguments = ["--set", task, "--set", "model.path=model", "--set", "optim.warmup_steps=0"]
    words = ["export", "verl", *arguments, "--out", "job", "--gpus-per-node", "1"]
    usage_error(*words, cwd=place, parts=["missing_module"])
    assert not (place / "job").exists()
