"""Data sets on the hub and folders in its layout. Only the request to the hub is replaced by a fake."""

import json
from pathlib import Path
from unittest import mock

import datasets
import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.task import DataTask, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.plan import load_task
from bandpo_cli.registries import DATASETS
from bandpo_cli.tasks.question_answers import load_questions
from bandpo_cli.tasks.rows import read_rows
from bandpo_cli.tasks.task import build_task
from tests.tasks.stored_completions import jsonl

ROWS = [{"question": f"What is {n}+{n}?", "answer": f"It is {n}+{n}.\n#### {2 * n}"} for n in range(1500)]


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder(tmp_path: Path) -> Path:
    """Write a data set in the layout of the hub: files named after their splits."""
    path = tmp_path / "sums"
    path.mkdir()
    jsonl(path / "train.jsonl", *ROWS)
    jsonl(path / "test.jsonl", *ROWS[:7])
    return path


def test_folder_in_the_layout_of_the_hub(tmp_path):
    path = str(folder(tmp_path))
    assert list(read_rows(Source(path=path), "train")) == ROWS
    assert len(load_questions(Source(path=path), "train")[0]) == len(ROWS)
    assert load_questions(Source(path=path), "heldout")[1] == ["sums: 7 evaluation problems"]


def test_downloaded_copy_of_a_known_dataset_keeps_its_subset_and_splits(tmp_path):
    """A cloned repository of a data set has several subsets, which its card lists."""
    configs = []
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        files = [{"split": split, "path": f"{subset}/{split}.jsonl"} for split in ("train", "test")]
        configs.append({"config_name": subset, "data_files": files})
        for file in files:
            jsonl(tmp_path / file["path"], {"question": subset + file["split"], "answer": 1})
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    source = Source(name="gsm8k", path=str(tmp_path))
    other = source.model_copy(update={"subset": "socratic", "split": "test"})
    for asked, part, prompt in ((source, "train", "maintrain"), (source, "heldout", "maintest"),
                                (other, "train", "socratictest")):  # fmt: skip
        assert [q.prompt for q in load_questions(asked, part)[0]] == [prompt]


def test_folders_written_by_save_to_disk(tmp_path):
    single = datasets.Dataset.from_list(ROWS)
    single.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": single}).save_to_disk(tmp_path / "both")
    assert list(read_rows(Source(path=str(tmp_path / "single")), "train")) == ROWS
    assert list(read_rows(Source(path=str(tmp_path / "both")), "train")) == ROWS
    with pytest.raises(ConfigError, match=r"split 'dev': no such split; it has train"):
        list(read_rows(Source(path=str(tmp_path / "both"), split="dev"), "train"))


@pytest.fixture
def requests(monkeypatch):
    """Return the list of requests to the hub, which answers with the row in `ROW`."""
    requests = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
        requests.append((path, name, split))
        return datasets.Dataset.from_list([{**ROW, "id": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


ROW = {}
VERL = {"prompt": "q", "solution": "34", "source_prompt": [{"role": "user", "content": "Solve: q"}]}
KNOWN = {
    "gsm8k": ({"question": "q", "answer": "w\n#### 18"}, "18"),
    "math": ({"problem": "q", "level": "Level 5", "type": "Algebra", "solution": "so \\boxed{2}"}, "2"),
    "dapo-math-17k": ({**VERL, "reward_model": {"ground_truth": "34", "style": "rule"}}, "34"),
    "deepscaler": ({"problem": "q", "answer": "-\\frac{2}{3}", "solution": ""}, "-\\frac{2}{3}"),
    "aime24": ({"problem": "q", "solution": "\\boxed{1}", "answer": "025"}, "025"),
    "aime25": ({"problem": "q", "answer": "70"}, "70"),
    "aime26": ({"problem_idx": 1, "problem": "q", "answer": 277}, "277"),
    "amc23": ({"question": "q", "answer": "27"}, "27"),
    "hmmt25": (
        {"problem_idx": 2, "problem": "q", "answer": "\\frac{1}{576}", "problem_type": []},
        "\\frac{1}{576}",
    ),
    "brumo25": (
        {"problem_idx": 3, "problem": "q", "answer": "2^{99}", "problem_type": ["Algebra"]},
        "2^{99}",
    ),
    "math500": ({"problem": "q", "solution": "\\boxed{3}", "answer": "3", "level": 2}, "3"),
    "minerva": ({"question": "q", "answer": "1.6"}, "1.6"),
    "olympiadbench": ({"question": "q", "solution": ["s"], "final_answer": ["$2$"], "context": None}, "2"),
}
"""A row of each known data set in the form that its card on the hub describes, and its answer."""


def test_known_datasets_are_requested_and_read_as_their_cards_describe(requests, monkeypatch):
    assert {*KNOWN} == {*DATASETS}
    for name, (row, answer) in KNOWN.items():
        known = DATASETS[name]
        monkeypatch.setitem(globals(), "ROW", row)
        requests.clear()
        if known.eval_split:
            load_questions(Source(name=name), "heldout")
        if known.train_split:
            load_questions(Source(name=name), "train")
        splits = [split for split in (known.eval_split, known.train_split) if split]
        assert requests == [(known.hub_id, known.subset, split) for split in splits]
        ((question,), _) = load_questions(Source(name=name, split="any"), "heldout")
        assert (question.prompt, question.answer, question.grader) == ("q", answer, known.grader)
        assert requests[-1][2] == "any"


def test_default_sources_of_dapo(requests, monkeypatch):
    columns = dict.fromkeys(("question", "problem", "prompt"), "q")
    monkeypatch.setitem(globals(), "ROW", {**columns, "answer": "1", "solution": "1"})
    task = build_task(DataTask(name="dapo-math-17k"))
    assert list(task.heldout_sets()) == ["aime24", "aime25", "amc23"]
    assert len(requests) == 3, "evaluation does not read the training set"
    with pytest.raises(ConfigError, match="every problem is held out for evaluation"):
        task.train_problems()
    assert requests[-1] == ("open-r1/DAPO-Math-17k-Processed", "all", "train")


GSM8K = "{name: gsm8k, path: FILE}"
UNREACHABLE = [
    ({"name": "gsm8k"}, "openai/gsm8k", f"'task.train={GSM8K}' --set 'task.heldout={GSM8K}' --model FOLDER"),
    ({"name": "data", "train": [{"path": "o/x", "split": "a"}]}, "o/x", "{path: FILE}' --model FOLDER"),
    ({"name": "gsm8k", "train": ["sums.jsonl"]}, "openai/gsm8k", f"copies: --set 'task.heldout={GSM8K}' --m"),
]


def test_unreachable_hub_is_reported_in_one_line_with_all_local_copies(monkeypatch):
    error = ConnectionError("Couldn't reach 'x' on the Hub (LocalEntryNotFoundError)\nand more")
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=error))
    for task, hub_id, hint in UNREACHABLE:
        with pytest.raises(ConfigError) as caught:
            load_task(resolve([{"task": task, "model": {"path": "some/model"}}]))
        assert all(text in str(caught.value) for text in ("Couldn't reach", hub_id, hint)), caught.value


def test_offline_mode_of_the_library(monkeypatch):
    """The error of the library in offline mode, of any class."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*split 'train': cannot be loaded"):
        load_questions(Source(path="nobody/nothing"), "train")
