"""`bandpo eval --task FILE` with a small language model of random weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bandpo_cli.storage.tables import read_eval_table
from tests.cli.eval_command import record_of, samples_of, succeed, usage_error
from tests.cli.train_runs import sets
from tests.text_model import THINKING, save_text_model

SHORT = ["--n", "4", "--max-tokens", "12", "--set", "evaluation.batch=8", "--no-mlflow"]


def write_questions(path: Path, count: int, first: int = 0, more: Sequence[str] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    questions = [*(f"How many are {i} and {i}?" for i in range(first, first + count)), *more]
    rows = [{"question": question, "answer": str(i)} for i, question in enumerate(questions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and three files of questions, two of them with the same name."""
    folder = tmp_path_factory.mktemp("tasks")
    write_questions(folder / "sums.jsonl", 5)
    write_questions(folder / "a" / "test.jsonl", 3)
    write_questions(folder / "b" / "test.jsonl", 3, first=50)
    corpus = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    save_text_model(folder / "model", corpus, vocabulary=300, hidden=64)
    return folder


@pytest.mark.slow
def test_several_files_are_several_sets(place):
    succeed(
        "eval", "--model", "model", "--task", "sums.jsonl", "--task", "a/test.jsonl", "--task", "b/test.jsonl", *SHORT,
        "--name", "three", cwd=place,
    )  # fmt: skip
    record = record_of(place / "runs" / "three")
    counts = {label: (value["problems"], value["completions"]) for label, value in record["sets"].items()}
    assert counts == {"sums": (5, 20), "a-test": (3, 12), "b-test": (3, 12)}
    assert record["model"] == {"path": str(place / "model"), "run": None, "step": None}
    paths = [source["path"] for source in record["config"]["task"]["heldout"]]
    assert paths == [str(place / name) for name in ("sums.jsonl", "a/test.jsonl", "b/test.jsonl")]
    table = samples_of(place / "runs" / "three")
    assert list(table["task"].drop_duplicates()) == ["sums", "a-test", "b-test"]
    assert table["prompt"].str.startswith("<|im_start|>user\n").all(), "the chat template was applied"
    assert (table["length"] <= 12).all()
    assert (table["logprob_sum"] < 0).all()


@pytest.mark.slow
def test_training_and_evaluations_have_the_arguments_of_the_chat_template(place):
    model = Path(shutil.copytree(place / "model", place / "thinking"))
    (model / "chat_template.jinja").write_text(THINKING)
    common = ["--model", "thinking", "--task", "sums.jsonl"]
    off = ["--set", "model.chat_template_kwargs.enable_thinking=false"]
    shown = succeed("train", *common, *off, "--dry-run", cwd=place).out
    changed = shown.split("{'enable_thinking': False} changes these lines of it:\n")[1].splitlines()
    assert [*map(str.strip, changed[:3])] == ["+ <think>", "+", "+ </think>"]
    small = ["--steps", "1", "--max-tokens", "4", *sets("sampling.prompts=4 sampling.samples=2")]
    succeed("train", *common, *off, *small, "--name", "t", "--no-mlflow", cwd=place)
    succeed("eval", *common, *off, *SHORT, "--name", "of-model", cwd=place)
    succeed("eval", "--model", "t", *SHORT, "--name", "of-run", cwd=place)
    tables = [place / "runs" / "t" / "samples" / "step-000001.parquet"]
    tables += [place / "runs" / name / "samples.parquet" for name in ("of-model", "of-run")]
    for table in tables:
        prompts = pq.read_table(table).column("prompt").to_pylist()
        assert all(prompt.endswith("assistant\n<think>\n\n</think>\n\n") for prompt in prompts)
    ignored = ["--set", "model.chat_template_kwargs.enable_thinkin=false"]
    for command in (["train", *common, "--dry-run"], ["train", *common], ["eval", *common, *SHORT]):
        part = "chat_template_kwargs.enable_thinkin = False"
        usage_error(*command, *ignored, cwd=place, parts=[part, "mean 'enable_thinking'?); leave it out"])


@pytest.mark.slow
def test_samples_of_a_set_do_not_depend_on_other_sets(place):
    tables = {}
    for name, tasks in (("alone", ["a/test.jsonl"]), ("second", ["sums.jsonl", "a/test.jsonl"])):
        flags = [f"--task={task}" for task in tasks]
        succeed("eval", "--model", "model", *flags, *SHORT, "--name", name, cwd=place)
        tables[name] = read_eval_table(place / "runs" / name / "samples.parquet")
    assert tables["alone"] == [row for row in tables["second"] if row["task"] == "test"]


@pytest.mark.slow
def test_too_long_prompts_are_excluded_and_counted(place):
    write_questions(place / "long.jsonl", 5, more=["so many words " * 60])
    settings = sets("task.template=plain sampling.max_prompt_tokens=100")
    words = ["--task", "long.jsonl", *settings, "--name", "long"]
    done = succeed("eval", "--model", "model", *SHORT, *words, cwd=place)
    assert "warning: long: 1 of 6 problems left out" in done.out
    assert record_of(place / "runs" / "long")["sets"]["long"]["problems"] == 5
    arguments = ["--model", "model", "--task", "long.jsonl", "--set", "sampling.max_prompt_tokens=1"]
    usage_error("eval", *arguments, *SHORT, cwd=place, parts=["all 6 prompts"])
    parts = ["prompts of 'training' are longer", "of which the template takes"]
    usage_error("train", *arguments, "--set", "task.system=Be brief.", "--dry-run", cwd=place, parts=parts)


def test_more_tokens_than_the_context_are_refused_and_nothing_is_written(place):
    before = [*place.glob("runs/*")]
    words = ["eval", "--model", "model", "--task", "sums.jsonl", "--max-tokens", "5000"]
    usage_error(*words, cwd=place, parts=["the model reads at most 4,096"])
    (place / "folder.jsonl").mkdir(exist_ok=True)
    usage_error("eval", "--model", "model", "--task", "folder.jsonl", cwd=place)
    assert [*place.glob("runs/*")] == before


@pytest.mark.slow
def test_template_and_system_message_of_a_run_apply_to_another_file(place):
    small = "task.heldout=a/test.jsonl sampling.prompts=2 sampling.samples=2 sampling.max_tokens=8 optim.updates=1 "
    texts = ["--set", "task.template='Q {question} A'", "--set", "task.system=Be brief."]
    words = [*sets(small + "evaluation.samples=2 evaluation.k=[1,2]"), *texts, "--name", "run", "--no-mlflow"]
    succeed("train", "--model", "model", "--task", "sums.jsonl", "--steps", "1", *words, cwd=place)
    succeed("eval", "--model", "run", "--name", "own", "--no-mlflow", cwd=place)
    trained = json.loads((place / "runs" / "run" / "evals" / "step-000001.json").read_text())
    assert record_of(place / "runs" / "own")["sets"] == trained["sets"]
    succeed("eval", "--model", "run", "--task", "b/test.jsonl", "--name", "other", "--no-mlflow", cwd=place)
    done = succeed("eval", "--model", "run", "--task", "sums.jsonl", "--no-mlflow", cwd=place)
    # The other three are in the file of held-out problems.
    assert "sums: 2 of 5 problems are training problems of the run" in done.out + done.err
    assert "sums (5 problems)" in done.out
    prompts = samples_of(place / "runs" / "other")["prompt"]
    assert prompts.str.startswith("<|im_start|>system\nBe brief.").all()
    assert prompts.str.contains("Q How many are 5").all()
