"""Components: checks of data and context length when they are built."""

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components


def test_completions_longer_than_the_context_are_refused() -> None:
    config = resolve([{"sampling": {"max_tokens": 500}}])  # the context length of the bundled model is 512
    with pytest.raises(ConfigError, match="come to 564 tokens; the model reads at most 512"):
        build_components(config, build_task(config.task))


def test_problems_with_long_prompts_are_dropped_and_counted() -> None:
    config = resolve([{"task": {"max_number": 10, "numbers": 3}, "sampling": {"max_prompt_tokens": 10}}])
    task = build_task(config.task)
    components = build_components(config, task)
    try:
        kept = [problem for problem in task.train_problems() if len(str(problem.prompt)) <= 10]
        seen = {problem.id for problem in components.stream.next(len(kept))}
    finally:
        components.close()
    dropped = len(task.train_problems()) - len(kept)
    assert seen == {problem.id for problem in kept}
    assert dropped > 0
    assert any(f"training: {dropped:,} of" in note for note in components.notes)
