"""`bandpo export verl`: what it prints, and one line for each mistake, without anything written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.eval_command import Done, bandpo
from tests.text_model import save_text_model

SMALL = ["--set", "task.max_number=5", "--set", "task.numbers=3", "--set", "optim.warmup_steps=0"]


def export(*arguments: str) -> Done:
    return bandpo("export", *arguments, cwd=Path.cwd(), COLUMNS="200")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_written_and_described(place: Path) -> None:
    code, out, err = export("verl", *SMALL, "--out", "job", "--nodes", "2", "--gpus-per-node", "4")
    assert (code, err) == (0, "")
    assert "GPUs: 8, vLLM engines: 8" in out
    assert "run  bash job/run.sh" in out
    names = {"README.md", "config.yaml", "heldout.parquet", "model", "reward.py", "run.sh", "train.parquet"}
    assert {path.name for path in (place / "job").iterdir()} == names
    assert [path.name for path in place.iterdir()] == ["job"]
    assert "trainer.nnodes=2" in (place / "job" / "run.sh").read_text("utf-8")


def test_differences_are_refused_or_allowed(place: Path) -> None:
    settings = ["--set", "optim.warmup_steps=8", "--set", "sampling.engine=transformers"]
    different = [*SMALL, *settings, "--gpus-per-node", "1"]
    code, _, err = export("verl", *different, "--out", "job")
    assert code == 2
    assert err.count("\n") == 1
    for part in ("optim.warmup_steps = 8", "sampling.engine = transformers", "--allow-differences"):
        assert part in err
    assert list(place.iterdir()) == []
    code, out, _ = export("verl", *different, "--out", "job", "--allow-differences")
    assert code == 0
    assert "differs  optim.warmup_steps = 8" in out


MISTAKES = {
    "no such method in verl": (
        ["--set", "bounds.method=dcpo", "--allow-differences"],
        "verl has no such policy loss",
    ),
    "GPUs": (
        ["--gpus-per-node", "7"],
        "256 completions (sampling.prompts / optim.updates × sampling.samples)",
    ),
    "too few problems": (
        ["--set", "sampling.prompts=4096", "--set", "sampling.max_sequences=9"],
        "training problems, and verl drops",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(arguments: list[str], message: str, place: Path) -> None:
    code, out, err = export("verl", *SMALL, *arguments, "--out", "job")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(place.iterdir()) == []


def test_an_existing_folder_is_named(place: Path) -> None:
    (place / "job").mkdir()
    code, _, err = export("verl", *SMALL, "--out", "job")
    assert code == 2
    assert "--out job: exists already" in err
    (place / "file").touch()
    code, _, err = export("verl", *SMALL, "--out", "file/job", "--gpus-per-node", "1")
    assert (code, "--out file/job: cannot be written" in err) == (2, True)


@pytest.mark.parametrize(
    "setting", ["grader: missing_module:reward", "rewards: [number, missing_module:reward]"]
)
def test_a_custom_grader_that_cannot_be_imported_is_refused(setting: str, place: Path) -> None:
    save_text_model(place / "model", ["1+1"], layers=1)
    rows = [{"question": f"{index}+1?", "answer": str(index + 1)} for index in range(80)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = f"task={{name: data, train: rows.jsonl, {setting}}}"
    arguments = ["--set", task, "--set", "model.path=model", "--set", "optim.warmup_steps=0"]
    code, _, err = export("verl", *arguments, "--out", "job", "--gpus-per-node", "1")
    assert (code, "missing_module" in err) == (2, True)
    assert not (place / "job").exists()


def test_help_and_a_missing_folder() -> None:
    code, out, _ = export("verl", "--help")
    assert code == 0
    for part in ("bandpo export verl -c paper/base", "--allow-differences", "--gpus-per-node"):
        assert part in out
    code, _, err = export("verl")
    assert (code, "--out" in err) == (2, True)
