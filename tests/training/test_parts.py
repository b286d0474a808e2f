"""What is found out only with the model at hand, still before anything is written: one line each."""

from __future__ import annotations

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.registry import build_task
from bandpo_cli.training.components import build_components


def test_answers_beyond_the_models_context_are_refused() -> None:
    config = resolve([{"sampling": {"max_tokens": 500}}])  # the embedded model reads 512
    with pytest.raises(ConfigError, match="come to 564 tokens; the model reads at most 512"):
        build_components(config, build_task(config.task))


def test_problems_with_long_prompts_are_left_out_and_counted() -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": 10}}])
    task = build_task(config.task)
    parts = build_components(config, task)
    try:
        kept = [problem for problem in task.train_problems() if len(str(problem.prompt)) <= 10]
        seen = {problem.id for problem in parts.stream.next(len(kept))}
    finally:
        parts.close()
    left_out = len(task.train_problems()) - len(kept)
    assert seen == {problem.id for problem in kept}
    assert left_out > 0
    assert any(f"training: {left_out:,} of" in note for note in parts.notes)


def test_a_limit_that_leaves_nothing_says_so() -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": 3}}])
    with pytest.raises(ConfigError, match="max_prompt_tokens = 3: all "):
        build_components(config, build_task(config.task))
