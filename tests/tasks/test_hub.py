"""Data sets on the hub and folders in its layout. Only the request to the hub is replaced by a fake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from bandpo_cli.config.task import DataTask, Source
from bandpo_cli.datasets import DATASETS
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.questions import load_questions
from bandpo_cli.tasks.rows import read_hub
from bandpo_cli.tasks.task import build_task

ROWS = [{"question": f"What is {n}+{n}?", "answer": f"It is {n}+{n}.\n#### {2 * n}"} for n in range(2500)]


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder(tmp_path: Path) -> Path:
    """Write a data set in the layout of the hub: files named after their splits."""
    path = tmp_path / "sums"
    path.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:7])):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_folder_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    path = str(folder(tmp_path))
    assert list(read_hub(path, None, "train", "")) == ROWS
    assert len(load_questions(Source(path=path), "train").questions) == len(ROWS)
    heldout = load_questions(Source(path=path), "heldout")
    assert (heldout.label, len(heldout.questions)) == ("sums", 7)


def test_downloaded_copy_of_a_known_dataset_keeps_its_subset_and_splits(tmp_path: Path) -> None:
    """A cloned repository of a data set has several subsets, which its card lists."""
    path = tmp_path / "gsm8k"
    for subset in ("main", "socratic"):
        (path / subset).mkdir(parents=True)
        for split in ("train", "test"):
            (path / subset / f"{split}.jsonl").write_text(
                json.dumps({"question": subset + split, "answer": 1})
            )
    files = "\n".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "\n".join(f"  - split: {split}\n    path: {subset}/{split}.jsonl" for split in ("train", "test"))
        for subset in ("main", "socratic")
    )
    (path / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n")
    source = Source(name="gsm8k", path=str(path))
    assert [q.prompt for q in load_questions(source, "train").questions] == ["maintrain"]
    assert [q.prompt for q in load_questions(source, "heldout").questions] == ["maintest"]
    other = Source(name="gsm8k", path=str(path), subset="socratic", split="test")
    assert [q.prompt for q in load_questions(other, "train").questions] == ["socratictest"]


def test_unknown_split_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sums', split 'dev': .*dev.*; do this") as caught:
        list(read_hub(str(folder(tmp_path)), None, "dev", "do this"))
    assert "\n" not in str(caught.value)


def test_folders_written_by_save_to_disk(tmp_path: Path) -> None:
    single = datasets.Dataset.from_list(ROWS)
    single.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": single}).save_to_disk(tmp_path / "both")
    assert list(read_hub(str(tmp_path / "single"), None, "train", "")) == ROWS
    assert list(read_hub(str(tmp_path / "both"), None, "train", "")) == ROWS
    with pytest.raises(ConfigError, match=r"split 'dev': no such split; it has train"):
        list(read_hub(str(tmp_path / "both"), None, "dev", ""))


def fake_load_dataset(row: dict[str, Any], calls: list[tuple[Any, ...]]) -> Any:
    def load_dataset(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
        calls.append((path, name, split))
        return datasets.Dataset.from_list([{**row, "id": 1}])

    return load_dataset


def rows_of_known_datasets() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, row, answer) of each known data set, in the form that its card on the hub describes."""
    yield "gsm8k", {"question": "q", "answer": "w\n#### 18"}, "18"
    yield "math", {"problem": "q", "level": "Level 5", "type": "Algebra", "solution": "so \\boxed{2}"}, "2"
    verl = {"prompt": "q", "solution": "34", "source_prompt": [{"role": "user", "content": "Solve: q"}]}
    yield "dapo-math-17k", {**verl, "reward_model": {"ground_truth": "34", "style": "rule"}}, "34"
    yield "aime24", {"problem": "q", "solution": "\\boxed{1}", "answer": "025"}, "025"
    yield "aime25", {"problem": "q", "answer": "70"}, "70"
    yield "amc23", {"question": "q", "answer": "27"}, "27"
    yield "math500", {"problem": "q", "solution": "\\boxed{3}", "answer": "3", "level": 2}, "3"
    yield "minerva", {"question": "q", "answer": "1.6"}, "1.6"
    yield "olympiadbench", {"question": "q", "solution": ["s"], "final_answer": ["$2$"], "context": None}, "2"


def test_each_known_dataset_has_a_row() -> None:
    assert {name for name, _, _ in rows_of_known_datasets()} == set(DATASETS)


@pytest.mark.parametrize(("name", "row", "answer"), list(rows_of_known_datasets()))
def test_known_datasets_are_requested_and_read_as_their_cards_describe(
    name: Any, row: dict[str, Any], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset(row, calls))
    known = DATASETS[name]
    if known.eval_split:
        load_questions(Source(name=name), "heldout")
    if known.train_split:
        load_questions(Source(name=name), "train")
    splits = [split for split in (known.eval_split, known.train_split) if split]
    assert calls == [(known.hub_id, known.subset, split) for split in splits]
    (question,) = load_questions(Source(name=name, split="any"), "heldout").questions
    assert (question.prompt, question.answer, question.grader) == ("q", answer, known.grader)
    assert calls[-1][2] == "any"


def test_default_sources_of_dapo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def numbered(path: str, name: str | None, split: str) -> datasets.Dataset:
        calls.append((path, name, split))
        columns = ("question", "problem", "prompt")
        return datasets.Dataset.from_list([{**dict.fromkeys(columns, path), "answer": "1", "solution": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", numbered)
    task = build_task(DataTask(name="dapo-math-17k"))
    assert list(task.heldout_sets()) == ["aime24", "aime25", "amc23"]
    assert len(calls) == 3, "evaluation does not read the training set"
    assert len(task.train_problems()) == 1
    assert calls[-1] == ("open-r1/DAPO-Math-17k-Processed", "all", "train")


def raise_connection_error(*_: Any, **__: Any) -> Any:
    raise ConnectionError("Couldn't reach 'x' on the Hub (LocalEntryNotFoundError)\nand more")


@pytest.mark.parametrize(
    ("source", "part", "hint"),
    [
        (Source(name="gsm8k"), "train", "--set 'task.train={name: gsm8k, path: FILE}'"),
        (Source(name="aime24"), "heldout", "--set 'task.heldout={name: aime24, path: FILE}'"),
        (Source(path="some/where"), "train", "--set task.train=FILE"),
    ],
)
def test_unreachable_hub_is_reported_in_one_line_with_a_hint(
    source: Source, part: Any, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", raise_connection_error)
    with pytest.raises(ConfigError) as caught:
        load_questions(source, part)
    message = str(caught.value)
    assert "\n" not in message
    assert "Couldn't reach" in message
    assert hint in message
    assert (source.path or DATASETS["gsm8k" if part == "train" else "aime24"].hub_id) in message


def test_offline_mode_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the library in offline mode, of any class."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*split 'train': cannot be loaded"):
        load_questions(Source(path="nobody/nothing"), "train")
