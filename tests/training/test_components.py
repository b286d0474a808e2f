"""Components: checks of data and context length when they are built."""

from dataclasses import replace

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError, RunError
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.components import build_components
from tests.sampling.stub_engine import forked_engines


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


@pytest.mark.slow
def test_a_prompt_limit_that_drops_every_problem_is_refused() -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": 3}}])
    with pytest.raises(ConfigError, match="max_prompt_tokens = 3: all "):
        build_components(config, build_task(config.task))


@pytest.mark.slow
def test_an_engine_that_samples_ahead_has_a_process_of_its_own() -> None:
    """It reports no entropies, which are those of older weights, and ends with the components."""
    config = resolve([{"sampling": {"max_lag": 1}, "task": {"max_number": 5}, "evaluation": {"problems": 2}}])
    with forked_engines():
        components = build_components(config, build_task(config.task))
    try:
        assert not components.sampler.shares_weights
        assert not components.params.entropy
        components.sampler.sync(components.policy.model, 3)
        ((completion,),) = components.sampler.sample([[2, 3]], replace(components.params, samples=1), seed=1)
        assert completion.policy_version == 3
        assert not completion.entropies
    finally:
        components.close()
    with pytest.raises(RunError, match="closed"):
        components.sampler.sample([[2, 3]], components.params, seed=1)
