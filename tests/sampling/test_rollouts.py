"""Rollouts: which weights sampled them, what graders read, and the reward that each completion gets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.sampling.base import SamplingParams, StaleEngineError
from bandpo_cli.sampling.rollouts import EncodedPrompt, grade_groups, sample_completions
from bandpo_cli.types import Completion, Grade, Problem
from tests.sampling.test_prompts import tokenizer_of

END, TWO, PLUS = 2, 8, 9
PROBLEMS = [Problem(name, name, "", "test", "math") for name in ("first", "second")]
PROMPTS = [EncodedPrompt("be", (6,)), EncodedPrompt("brief", (7, 7))]
PARAMS = SamplingParams(samples=2, temperature=1.0, max_tokens=6, stop_ids=(END,))


def completion(*ids: int, version: int = 0) -> Completion:
    return Completion(ids, (-0.5,) * len(ids), "stop" if ids[-1] == END else "length", version)


COMPLETIONS = [
    [completion(TWO, END), completion(TWO, PLUS, TWO, PLUS, END)],
    [completion(PLUS, END), completion(PLUS, TWO, TWO, TWO, TWO, TWO)],
]


class RecordingGrader:
    """Gives the verdict correct to texts that begin with 2; keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        self.given += zip((problem.id for problem in problems), texts, strict=True)
        return [
            Grade(1.0, True, "correct") if text.startswith("2") else Grade(0.0, False, "wrong")
            for text in texts
        ]


def test_rewards_have_the_range_and_the_over_long_penalty_of_the_settings() -> None:
    """By hand: −1 to 1, and over the last 4 of 6 tokens a penalty that grows by 0.2 per token."""
    reward = RewardConfig(correct=1.0, wrong=-1.0, overlong_buffer=4, overlong_penalty=0.8)
    groups = grade_groups(tokenizer_of(None), RecordingGrader(), PROBLEMS, PROMPTS, COMPLETIONS, reward, 6)
    found = [[rollout.grade.reward for rollout in group.rollouts_G] for group in groups]
    assert found == [pytest.approx([1.0, 1.0 - 0.6]), pytest.approx([-1.0, -1.0 - 0.8])]
    verdicts = [(rollout.grade.correct, rollout.grade.verdict) for rollout in groups[0].rollouts_G]
    assert verdicts == [(True, "correct")] * 2


def test_graders_read_each_completion_without_special_tokens_beside_its_own_problem() -> None:
    grader = RecordingGrader()
    groups = grade_groups(tokenizer_of(None), grader, PROBLEMS, PROMPTS, COMPLETIONS, RewardConfig(), 6)
    assert grader.given == [
        ("first", "2"),
        ("first", "2 plus 2 plus"),
        ("second", "plus"),
        ("second", "plus 2 2 2 2 2"),
    ]
    for group, problem, prompt, completions in zip(groups, PROBLEMS, PROMPTS, COMPLETIONS, strict=True):
        assert group.problem is problem
        assert [rollout.completion for rollout in group.rollouts_G] == completions
        assert {(rollout.prompt, rollout.prompt_ids) for rollout in group.rollouts_G} == {
            (prompt.text, prompt.token_ids)
        }


def test_one_completion_of_an_old_version_stops_the_step() -> None:
    new, old = completion(TWO, version=4), completion(TWO, version=3)
    sampler: Any = SimpleNamespace(sample=lambda prompts, params, seed: [[new, new], [new, old]])
    with pytest.raises(StaleEngineError, match="weights of update 3, the policy is at 4"):
        sample_completions(sampler, PROMPTS, PARAMS, seed=1, version=4)
    sampler = SimpleNamespace(sample=lambda prompts, params, seed: [[new, new], [new, new]])
    assert sample_completions(sampler, PROMPTS, PARAMS, seed=1, version=4) == [[new, new], [new, new]]
