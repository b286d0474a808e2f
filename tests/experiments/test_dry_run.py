"""Dry runs: they end as the start of training does; the trials of graders and errors of custom functions."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.trials import try_graders
from bandpo_cli.tasks.task import build_task
from tests.cli.eval_command import bandpo, succeed
from tests.cli.train_runs import SMALL

REWARDS = """
import json
def characters(text, answer, extra): return len(text) / 100
def field(text, answer, extra): return json.loads(text)["answer"] == answer
def length(text, answer, extra): return len(text)
def not_a_number(text, answer, extra): return float("nan")
def needs_gold(completions, gold): return [1.0]
"""
PROBLEMS = "question,answer\nWho?,Rome\n1+1?,2\n2+1?,3\n3+1?,4\n"

TRIALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "number": ({}, ["'Answer: 2' correct 1.0", "'number' cannot grade answers to 1 of 3 problems; the f"]),
    "gsm8k": ({"template": "hashes"}, ["'#### 2' correct 1.0", "cannot grade answers to 1 of 3 problems"]),
    "math-dapo": (
        {"template": "boxed"},
        ["'\\\\boxed{2}' malformed 0.0", "not read an answer in the form that"],
    ),
    "rewards:characters": ({"template": "plain"}, ["'2' wrong 0.01"]),
}
"""A grader, the settings of the task, the completion with its grade, and parts of the warnings."""
ERRORS = {
    "rewards:field": r"'Answer: 2': JSONDecodeError: .* \(rewards.py:4, in field\)",
    "rewards:length": r"must return .* not 9; scale it, or use TRL's .*trl: or .* \(rewards.py:5, in length\)",
    "rewards:not_a_number": r"with 'score', not nan \(rewards.py:6",
    "rewards:needs_gold": r"no column gold in the rows, which have answer, question \(rewards.py:7",
}


def trials(grader: str, **task: Any) -> list[str]:
    config = resolve([{"task": {"name": "data", "train": "problems.csv", "grader": grader, **task}}])
    ((_, completion, grade, warnings),) = try_graders(config, build_task(config.task))
    return [f"{completion!r} {grade.verdict} {grade.reward}", *warnings]


def test_graders_are_tried_on_the_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("problems.csv").write_text(PROBLEMS)
    for grader, (task, expected) in TRIALS.items():
        lines = trials(grader, **task)
        assert lines[0] == expected[0]
        assert [part for part, line in zip(expected, lines, strict=True) if part not in line] == [], lines
    for grader, message in ERRORS.items():
        with pytest.raises(ConfigError, match=message):
            trials(grader)


def test_a_problem_without_a_reference_has_a_dummy_completion_of_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("problems.csv").write_text("prompt\nWrite a line.\nWrite two.\n")
    assert trials("rewards:characters") == ["'This is a dummy completion.' wrong 0.27"]


CODE = """
from bandpo_cli.callbacks import CallbackBase
class Broken(CallbackBase):
    def __init__(self): raise ValueError("no licence")
def times(old_logprobs, width): return 1 / width, width
"""
STARTS = {
    "": None,
    "--set sampling.max_prompt_tokens=1": "prompts of 'training' are longer",
    "--max-tokens 9000": "the model reads at most",
    "--set model.device=cuda:7": "not usable on this machine",
    "--set model.attention=varlen": "model.attention = 'varlen' needs a GPU",
    "--set model.lora.rank=4 --set model.lora.target_modules=[x_proj]": "model.lora.target_modules",
    "--set model.lora.rank=4000": "the largest layer has rank",
    "--set model.prompts=chat": "no chat template",
    "--set model.chat_template_kwargs.a=1": "no chat template",
    "--callback mine:Broken": "no licence",
    "--callback mine:Missing": "mine:Missing",
    "--tracker mine:Broken": "name a subclass of bandpo_cli.tracking.trackers.Tracker",
    "--method mine:times": "width",
    "--sampler vllm": "the package vllm is not installed",
    "--set task.rewards=[{},{grader:rewards:missing}]": "rewards:missing",
    "--fork a@2 --set sampling.max_prompt_tokens=1": "prompts of 'training' are longer",
    "--fork damaged@2": "damaged/checkpoints/step-000002",
    "--resume other": "the run trained on other problems",
}
"""Flags of `train`, and a part of the error with exit code 2; None where the run starts."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with custom code and three runs, one with a damaged checkpoint, one with other problems."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "mine.py").write_text(CODE)
    (folder / "rewards.py").write_text(REWARDS)
    succeed("train", *SMALL, "--steps", "3", "--name", "a", cwd=folder)
    for name in ("damaged", "other"):
        shutil.copytree(folder / "runs/a", folder / "runs" / name)
        (folder / "runs" / name / "summary.json").unlink()
    (folder / "runs/damaged/checkpoints/step-000002/model.safetensors").write_bytes(b"")
    config = folder / "runs/other/config.yaml"
    config.write_text(config.read_text().replace("max_number: 5", "max_number: 6"))
    shutil.rmtree(folder / "runs/other/checkpoints/step-000003")
    return folder


def outcome(place: Path, *flags: str) -> tuple[object, str]:
    """Return exit code and error of a command."""
    name = () if "--resume" in flags else ("--name", "new")
    done = bandpo("train", *flags, *name, cwd=place)
    return done.code, done.err


@pytest.mark.slow
@pytest.mark.parametrize("flags", STARTS)
def test_what_a_dry_run_accepts_training_starts(place, flags):
    small = () if "--fork" in flags or "--resume" in flags else (*SMALL, "--steps", "1")
    words = [*small, *flags.split()]
    shutil.rmtree(place / "runs/new", ignore_errors=True)
    before = sorted(place.rglob("*"))
    dry = outcome(place, *words, "--dry-run")
    assert sorted(place.rglob("*")) == before
    assert dry == outcome(place, *words)
    assert dry[0] == (0 if STARTS[flags] is None else 2)
    assert (STARTS[flags] or "") in dry[1]


@pytest.mark.slow
@pytest.mark.skipif(
    "BANDPO_ODD_MODELS" not in os.environ, reason="needs a folder of models with odd properties"
)
def test_a_dry_run_judges_odd_models_as_training_does(tmp_path):
    (tmp_path / "sums.csv").write_text("question,answer\n" + "".join(f"{n}+1?,{n + 1}\n" for n in range(30)))
    flags = "--task sums.csv --steps 1 --max-tokens 4 --no-mlflow --set sampling.prompts=2 "
    flags += "--set sampling.samples=2 --set optim.updates=1 --set evaluation.every=0"
    for model in sorted(Path(os.environ["BANDPO_ODD_MODELS"]).iterdir()):
        words = (*flags.split(), "--model", str(model), "--set", "sampling.max_prompt_tokens=400")
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        assert outcome(tmp_path, *words, "--dry-run") == outcome(tmp_path, *words), model


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_checked_without_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("bandpo_cli.sampling.rollouts.load_policy", None)
    flags = "--max-tokens 400 --set sampling.prompts=10000 --set sampling.max_sequences=160000 --dry-run"
    done = succeed("train", *flags.split(), cwd=tmp_path)
    why = "the run does not fit into the memory of this machine"
    assert f"not checked: the weights ({why}), the results" in done.out
    assert "prompt      of problem countdown/" in done.out
