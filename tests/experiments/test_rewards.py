"""Weighted rewards and failing graders in complete runs: records, resume, and what a failed run leaves."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError, GraderFailedError
from bandpo_cli.experiments import evaluate, resume, train
from bandpo_cli.experiments.eval_plan import plan_evaluation_resume
from bandpo_cli.experiments.plan import plan_training
from bandpo_cli.metric_names import without_clock
from bandpo_cli.storage.run_folder import EvalFolder
from tests.cli.train_runs import record

SMALL: dict[str, Any] = {
    "steps": 1,
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 1},
    "evaluation": {"problems": 4, "samples": 2, "k": [2], "every": 2},
    "checkpoint": {"every": 1},
    "grading": {"workers": 1},
    "tracking": {"mlflow": False},
}
PLUSES = """
def pluses(prompts, completions, numbers, **kwargs):
    # The mean over the call shows that one call has all completions of a step.
    counts = [turns[0]["content"].count("+") for turns in completions]
    return [None if "*" in turns[0]["content"] else count - len(counts) for turns, count in zip(completions, counts)]
def none(completions):
    return [None for _ in completions]
"""
BROKEN = "def judge(text, answer, extra):\n    return text + 1\n"
REPAIRED = "def judge(text, answer, extra):\n    return True\n"
UNSTABLE = """
import time
def judge(text, answer, extra):
    if "*" in text:
        raise ConnectionError("the judge does not answer")
    if text.startswith("4"):
        time.sleep(60)
    return "+" in text
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pluses_reward.py").write_text(PLUSES)
    monkeypatch.chdir(tmp_path)


def run_with(*rewards: dict[str, Any], name: str = "a", **settings: Any) -> Path:
    config = resolve([SMALL, {"task": {"rewards": list(rewards)}}, settings])
    return train(config, name=name).folder


@pytest.mark.slow
def test_the_records_of_weighted_rewards_also_after_a_resume():
    """The values are computed again from the texts in the samples; only the reward of an evaluation has all entries."""
    zero = {"grader": "pluses_reward:pluses", "weight": 0, "name": "zero"}
    rewards = (
        {"weight": 2}, {"grader": "pluses_reward:pluses", "weight": 0.5}, zero, {"grader": "pluses_reward:none"}
    )  # fmt: skip
    folder = run_with(*rewards, steps=2)
    samples = pd.read_parquet(folder / "samples" / "step-000001.parquet")
    applies = ~samples.text.str.contains("*", regex=False)
    assert applies.any()
    pluses = (samples.text.str.count(r"\+") - len(samples)).where(applies)
    assert samples["reward/answer"].equals(samples.accuracy)
    assert samples["reward/pluses"].equals(pluses.astype(float))
    assert samples["reward/zero"].equals(samples["reward/pluses"])
    assert samples["reward/none"].isna().all()
    expected = 2 * samples.accuracy + 0.5 * pluses.fillna(0)
    assert samples.reward.tolist() == pytest.approx(expected.tolist())
    first, line, last = record(folder)
    assert line["train/reward"] == pytest.approx(samples.reward.mean())
    assert line["train/reward/answer"] == pytest.approx(samples.accuracy.mean())
    assert line["train/reward/pluses"] == pytest.approx(pluses.mean())
    assert line["train/accuracy"] == samples.accuracy.mean()
    assert "train/reward/none" not in line
    assert "grade/not_applicable_fraction" not in line
    plain = train(resolve([SMALL]), name="plain", stop_requested=lambda: True)
    (of_task,) = map(without_clock, plain.records)
    assert of_task.pop("eval/countdown/reward") == of_task["eval/countdown/mean_at_2"] > 0
    weighted = first.pop("eval/countdown/reward")
    assert weighted < 2 * first["eval/countdown/mean_at_2"], "the second entry is negative"
    assert of_task == first
    run_with(*rewards, name="shorter")
    assert without_clock(resume("shorter", settings=[{"steps": 2}]).records[2]) == last


@pytest.mark.slow
@pytest.mark.parametrize("reward", [{}, {"wrong": -1.0, "overlong_buffer": 2}])
def test_answers_that_were_not_graded_are_in_no_mean(reward):
    Path("unstable.py").write_text(UNSTABLE)
    timeout_reward = "wrong" if reward else "none"
    folder = run_with(
        *({"weight": 0.5}, {"grader": "unstable:judge"}),
        evaluation={"every": 0},
        grading={"deadline": 1, "timeout_reward": timeout_reward},
        reward=reward,
    )
    samples = pd.read_parquet(folder / "samples" / "step-000001.parquet")
    failed = samples.text.str.contains("*", regex=False)
    slow = ~failed & samples.text.str.startswith("4")
    assert failed.any()
    assert slow.any()
    ungraded = failed | slow if timeout_reward == "none" else failed
    assert samples.reward.isna().equals(ungraded)
    assert samples["reward/judge"].isna().equals(ungraded)
    (line,) = record(folder)
    assert line["train/ungraded_fraction"] == ungraded.mean()
    assert line["train/reward"] == pytest.approx(samples.reward.mean())
    assert line["train/accuracy"] == samples.accuracy.mean()
    spread = samples.groupby("problem_id", sort=False).reward.nunique() > 1
    assert line["train/uniform_group_fraction"] == 1 - spread.mean()


@pytest.mark.slow
def test_a_failing_grader_stops_the_run_and_its_repair_resumes_it():
    Path("failing_judge.py").write_text(BROKEN)
    message = r"all 16 answers are grader errors.*'failing_judge:judge'.*failing_judge.py:2, in judge"
    with pytest.raises(GraderFailedError, match=message):
        run_with({}, {"grader": "failing_judge:judge"})
    folder = Path("runs/a")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("FAILED", 0)
    assert [line["step"] for line in record(folder)] == [0]
    (folder / "failing_judge.py").write_text(REPAIRED)
    assert resume("a").status == "FINISHED"
    assert [line["step"] for line in record(folder)] == [0, 1]


def test_answers_of_a_failed_evaluation_are_graded_again(caplog):
    Path("failing_eval.py").write_text(BROKEN)
    rows = [{"question": f"{n}?", "answer": n, "completions": ["a", "b"]} for n in range(3)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [{"tracking": {"mlflow": False}, "evaluation": {"k": [2]}}]
    file = "runs/e/grader_errors/failing_eval-judge.txt"
    message = rf"all 6 answers are .*'failing_eval:judge': TypeError: .* \(failing_eval.py:2, in judge\); .*: {file};"
    with pytest.raises(GraderFailedError, match=message):
        evaluate(samples="a.jsonl", grader="failing_eval:judge", settings=settings, name="e")
    assert json.loads(Path("runs/e/eval.json").read_text())["status"] == "failed"
    stored = Path(file).read_text()
    parts = ("return text + 1\n", "TypeError: can only", "Completion 1 of 1 in the call:\n\na\n")
    for part in (*parts, "Reference: 0"):
        assert part in stored
    Path("failing_eval.py").write_text(REPAIRED.replace("return", "assert text == 'a', 'not a'; return"))
    result = evaluate(plan_evaluation_resume(EvalFolder(Path("runs/e"))))
    assert result.scores["a"].metrics["mean_at_2"].value == 0.5
    assert "failed on 3 of 6 answers (50.0%)" in caplog.text
    assert "AssertionError: not a" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["the evaluation set 'a' has only 1 problem: one problem moves its accuracy by 100%"]),
        ({"evaluation": {"every": 0}}, []),
        ({"sampling": {"prompts": 16}}, ["has only 1 problem", "8 training problems for 16 prompts per step"]),
        ({"task": {"heldout_fraction": 0.5}, "sampling": {"prompts": 2}}, ["evaluation set 'a' has only 6 problems"]),
    ],
)  # fmt: skip
def test_few_problems_are_pointed_out(settings, expected):
    rows = [{"question": f"{n} + {n}?", "answer": 2 * n} for n in range(9)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": {"name": "data", "train": "a.jsonl"}, "model": {"path": "a/b"}, "optim": {"updates": 2}}
    plan = plan_training(resolve([task, {"sampling": {"prompts": 4}}, settings]))
    assert len(plan.warnings) == len(expected)
    for warning, part in zip(plan.warnings, expected, strict=True):
        assert part in warning


@pytest.mark.slow
def test_the_coin_decides_the_reward_of_training_and_the_true_grader_the_evaluation(tmp_path):
    """Coins are a function of seed, step and completion: a resume tosses the same, and the texts do not matter."""
    control = {"task": {"rewards": [{"weight": 0}, "random"]}}
    full = train(resolve([SMALL, control, {"steps": 2, "optim": {"lr": 1e-9}}]), name="full").folder
    true = train(resolve([SMALL, {"steps": 2, "optim": {"lr": 1e-9}}]), name="true").folder
    for line, other in zip(record(full), record(true), strict=True):
        evaluation = {key: value for key, value in line.items() if key.startswith("eval/")}
        assert evaluation == {key: value for key, value in other.items() if key.startswith("eval/")}
        assert line.get("train/accuracy") == other.get("train/accuracy")
        assert line.get("train/reward") == line.get("train/reward/random")
    coins = pd.concat([pd.read_parquet(full / "samples" / f"step-00000{step}.parquet") for step in (1, 2)])
    coins = coins["reward"]
    assert set(coins) == {0.0, 1.0}
    assert 8 <= coins.sum() <= 24, "32 tosses"
    train(resolve([SMALL, control, {"steps": 1, "optim": {"lr": 1e-9}}]), name="part")
    resumed = resume("part", settings=[{"steps": 2}]).folder
    again = pd.read_parquet(resumed / "samples" / "step-000002.parquet")["reward"]
    assert again.tolist() == coins.iloc[16:].tolist()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("coin", "reward"), [(0.0, 0.0), (1.0, 1.0)])
def test_the_coin_has_the_configured_probability(coin, reward):
    folder = run_with({"weight": 0}, {"grader": "random"}, grading={"coin": coin})
    assert record(folder)[-1]["train/reward"] == reward


def test_any_readable_answer_has_the_reward_of_the_format():
    folder = run_with({"weight": 0}, {"grader": "format"})
    line = record(folder)[-1]
    assert line["train/reward"] == pytest.approx(1 - line["grade/malformed_fraction"])
    assert line["train/accuracy"] < line["train/reward"]


@pytest.mark.parametrize(
    "task",
    [
        {"rewards": ["random"]},
        {"name": "gsm8k", "grader": "format"},
        {"name": "data", "train": [{"path": "a.jsonl", "grader": "random"}]},
    ],
)
def test_a_control_cannot_decide_what_is_correct(task):
    with pytest.raises(ConfigError, match="is a control, which cannot decide what is correct; ") as raised:
        resolve([{"task": task}])
    assert "\n" not in str(raised.value)
