"""Calls of the sampler by the training loop: prompts, settings, seeds, versions, weights, and their order; learning."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from tests.training.recording import Recording, execute, prepare_run, run, same_weights

TWO_BATCHES: dict[str, Any] = {
    "steps": 2,
    "reward": {"overlong_buffer": 0},
    "sampling": {"dynamic": True, "dynamic_batches": 2},
}
"""With `uniform=set` no group has spread, so that every step samples both batches."""


def flat(seeds: dict[int, list[int]]) -> list[int]:
    return [seed for of_step in seeds.values() for seed in of_step]


@pytest.fixture(scope="module")
def two_batches(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Recording:
    return run(tmp_path_factory.mktemp("two") / "a", small_model, TWO_BATCHES, uniform=set)


def test_every_training_batch_has_a_different_seed(two_batches):
    training, evaluation = two_batches.seeds("training"), two_batches.seeds("evaluation")
    assert [len(training[step]) for step in (1, 2)] == [2, 2]
    assert len(set(flat(training))) == 4
    assert not set(flat(training)) & set(flat(evaluation))


@pytest.mark.slow
def test_a_seed_depends_on_run_seed_step_and_batch_only(two_batches, tmp_path, small_model):
    other_settings = {"optim": {"lr": 1e-2}, "steps": 1, "evaluation": {"every": 1}}
    same = run(tmp_path / "b", small_model, TWO_BATCHES, other_settings, uniform=set)
    other = run(tmp_path / "c", small_model, TWO_BATCHES, {"seed": 8, "steps": 1}, uniform=set)
    assert two_batches.seeds("training")[1] == same.seeds("training")[1]
    assert two_batches.seeds("evaluation")[0] == same.seeds("evaluation")[0]
    for kind in ("training", "evaluation"):
        assert not set(flat(two_batches.seeds(kind))) & set(flat(other.seeds(kind)))


def test_evaluations_repeat_their_seeds_and_no_two_batches_share_one(recorded):
    seeds = {step: seed for step, seed in recorded.seeds("evaluation").items() if seed}
    assert list(seeds) == [0, 2, 4, 5]
    assert seeds[0] == seeds[2] == seeds[4] == seeds[5]
    assert len(set(seeds[0])) == len(seeds[0]) == 5


def test_training_and_evaluation_sample_with_their_own_settings(recorded):
    stop_ids = recorded.components.policy.stop_ids
    training = SamplingParams(samples=4, temperature=0.7, max_tokens=6, stop_ids=stop_ids, entropy=True)
    evaluation = SamplingParams(samples=3, temperature=1.3, max_tokens=6, stop_ids=stop_ids)
    calls = [call for step in recorded.steps.values() for call in step.training]
    assert len(calls) == 5
    for call in calls:
        assert call.params == training
        assert [len(group) for group in call.completions_PG] == [4] * len(call.prompts_P) == [4] * 4
    for step in (0, 2, 4, 5):
        assert {call.params for call in recorded.steps[step].evaluation} == {evaluation}


def test_evaluation_batches_hold_complete_problems_of_one_set(recorded):
    """Batches of 7 completions are 2 problems of 3; sets of 5 and 3 problems, each in its own batches."""
    components = recorded.components
    sizes = {"first": (2, 2, 1), "second": (2, 1)}
    expected = []
    for label, problems in components.heldout.items():
        prompts = [
            tuple(components.policy.tokenizer(str(problem.prompt))["input_ids"]) for problem in problems
        ]
        for size in sizes[label]:
            expected.append(prompts[:size])
            prompts = prompts[size:]
    for step in (0, 2, 4, 5):
        assert [call.prompts_P for call in recorded.steps[step].evaluation] == expected


def test_training_takes_the_problems_of_the_stream_in_order(recorded):
    components = recorded.components
    problems = components.stream.take(0, 20)
    prompts = [tuple(components.policy.tokenizer(str(problem.prompt))["input_ids"]) for problem in problems]
    sampled = [call.prompts_P for step in range(1, 6) for call in recorded.steps[step].training]
    assert [ids for batch in sampled for ids in batch] == prompts
    assert len(set(prompts)) == 20
    assert components.stream.position == 20


def test_sync_follows_the_updates_once_with_the_new_weights_and_their_version(recorded):
    assert not recorded.steps[0].syncs
    for number in range(1, 6):
        step = recorded.steps[number]
        (sync,) = step.syncs
        assert sync.version == 2 * number
        assert sync.model is recorded.components.policy.model
        assert same_weights(sync.weights, step.updates[-1].weights)
        assert not same_weights(sync.weights, recorded.weights_before(number))
        assert not same_weights(sync.weights, step.updates[0].weights)


def test_completions_have_the_version_of_their_weights(recorded):
    def versions(groups: list[list[Any]]) -> set[int]:
        return {item.completion.policy_version for group in groups for item in group}

    assert versions(recorded.steps[0].evaluation_groups()) == {0}
    for number in range(1, 6):
        step = recorded.steps[number]
        assert versions(step.training_groups()) == {2 * (number - 1)}
        assert versions(step.evaluation_groups()) <= {2 * number}


def with_grading_after_sampling(order: list[str]) -> list[str]:
    """Return the calls with those of the last run of `sample` and `grade` as if each batch was graded at once.

    An evaluation grades in another thread, while it samples: each batch after it was sampled.
    """
    end = len(order) - order[::-1].index("grade")
    start = end
    while start and order[start - 1] in ("sample", "grade"):
        start -= 1
    calls = order[start:end]
    assert all(
        calls[:place].count("sample") >= calls[:place].count("grade") for place in range(len(calls) + 1)
    )
    return [*order[:start], *["sample", "grade"] * calls.count("grade"), *order[end:]]


def test_the_calls_of_a_step_come_in_order(recorded):
    update = ["sample", "grade", "sleep", "update", "update", "write samples"]
    evaluation = ["sample", "grade"] * 5 + ["write eval"]
    assert with_grading_after_sampling(recorded.steps[0].order) == [*evaluation, "append metrics"]
    for number in (1, 3):
        assert recorded.steps[number].order == [*update, "sync", "append metrics"]
    for number in (2, 4, 5):
        order = with_grading_after_sampling(recorded.steps[number].order)
        assert order == [*update, "write tokens", "sync", *evaluation, "append metrics"]


def test_a_step_with_two_batches_samples_both_before_the_engine_sleeps(two_batches):
    for step in (1, 2):
        order = two_batches.steps[step].order
        assert order[:6] == ["sample", "grade", "sample", "grade", "sleep", "update"]


def test_a_stale_engine_stops_the_run_and_is_not_evaluated(tmp_path, small_model):
    recording = prepare_run(tmp_path / "a", small_model, {"evaluation": {"every": 1}}, stale=True)
    with pytest.raises(StaleEngineError, match="weights of update 0, the policy is at 2"):
        execute(recording)
    assert [line["step"] for line in recording.folder.read_metrics()] == [0]
    assert not (recording.folder.path / "evals" / "step-000001.json").exists()


@pytest.mark.slow
def test_a_few_steps_teach_the_bundled_model(tmp_path, monkeypatch):
    """Of the answers to new problems 25% have no multiplication in the first step, and 83% in the fifth step."""
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text("def sums(text, answer, extra):\n    return '*' not in text\n")
    settings: dict[str, Any] = {
        "steps": 5,
        "optim": {"lr": 2e-4, "warmup_steps": 0},
        "sampling": {"prompts": 16},
    }
    task = {"max_number": 5, "rewards": [{"weight": 0}, "sums:sums"]}
    config = resolve([settings, {"task": task, "evaluation": {"every": 0}, "checkpoint": {"every": 0}}])
    folder = RunFolder.create(tmp_path, "a")
    with closing(build_components(config, build_task(config.task))) as components:
        rewards = [report.record["train/reward"] for report in train(config, components, folder)]
    assert rewards[0] <= 0.35
    assert rewards[-1] >= 0.6
