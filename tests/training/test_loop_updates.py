"""From rollouts to updates: texts, rewards, advantages, groups, old log-probs, corrections, learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from bandpo_cli.bounds import ratio_bounds
from tests.training.by_hand import plain_logprobs, token_advantages
from tests.training.recording import Recording, Sampled, run, same_weights

NO_PENALTY: dict[str, Any] = {"reward": {"overlong_buffer": 0}}
ONE_STEP: dict[str, Any] = {"steps": 1, "evaluation": {"every": 1}, **NO_PENALTY}
"""One step with its token table; rewards depend on the grader alone."""


def tokens(recording: Recording, step: int) -> pd.DataFrame:
    return pd.read_parquet(recording.folder.path / "tokens" / f"step-{step:06d}.parquet")


def close(column: Any, expected: list[float], tolerance: float) -> None:
    assert len(column) == len(expected)
    assert list(column) == pytest.approx(expected, rel=tolerance, abs=tolerance)


def texts_by_hand(recording: Recording, ids: tuple[int, ...]) -> str:
    """Return token ids as text; in this vocabulary a token is a character, and the first two are special."""
    names = {number: name for name, number in recording.components.policy.tokenizer.get_vocab().items()}
    assert {names[0], names[1]} == {"<pad>", "<eos>"}
    return "".join(names[each].replace("Ġ", " ") for each in ids if each > 1)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_the_grader_receives_the_text_of_each_completion_with_its_own_problem(
    recorded: Recording, kind: str
) -> None:
    groups = [group for step in recorded.steps.values() for group in getattr(step, f"{kind}_groups")()]
    for group in groups:
        assert len({each.problem.id for each in group}) == 1
        for each in group:
            assert texts_by_hand(recorded, each.prompt_ids) == each.problem.prompt
            assert each.text == texts_by_hand(recorded, each.completion.token_ids)
    assert len({group[0].problem.id for group in groups}) == (20 if kind == "training" else 8)
    assert any(1 in each.completion.token_ids for group in groups for each in group)


@pytest.mark.parametrize("step", [2, 4, 5])
def test_every_completion_has_its_own_advantage(recorded: Recording, step: int) -> None:
    """All groups of the step in order, so that each update has its own; rewards are the shaped ones."""
    groups = recorded.steps[step].training_groups()
    expected = token_advantages(groups, recorded.config)
    assert len({round(value, 5) for value in expected}) > 8
    close(tokens(recorded, step)["advantage"], expected, 1e-5)


def test_advantages_are_only_centered_without_the_standard_deviation(
    tmp_path: Path, small_model: Path
) -> None:
    recording = run(tmp_path / "a", small_model, ONE_STEP, {"objective": {"advantage_std": False}})
    expected = []
    for group in recording.steps[1].training_groups():
        rewards = [2 * each.grade.reward - 1 for each in group]
        for each, reward in zip(group, rewards, strict=True):
            expected += [reward - sum(rewards) / 4] * len(each.completion.token_ids)
    close(tokens(recording, 1)["advantage"], expected, 1e-6)


@pytest.mark.parametrize("step", [2, 4, 5])
def test_old_logprobs_of_all_updates_are_those_of_the_weights_before_the_first(
    recorded: Recording, step: int
) -> None:
    groups, start = recorded.steps[step].training_groups(), recorded.weights_before(step)
    expected = plain_logprobs(recorded.components, start, groups, temperature=0.7)
    table = tokens(recorded, step)
    close(table["old_logprob"], expected, 1e-4)
    bounds = ratio_bounds(recorded.config.bounds)(torch.tensor(expected))
    close(table["lower"], bounds.lower.tolist(), 1e-3)
    close(table["upper"], bounds.upper.tolist(), 1e-3)
    moved = plain_logprobs(recorded.components, recorded.weights_before(step, 1), groups, temperature=0.7)
    assert max(abs(one - other) for one, other in zip(moved, expected, strict=True)) > 1e-2


@pytest.mark.parametrize("step", [2, 4, 5])
def test_each_update_uses_its_own_groups_and_the_current_weights(recorded: Recording, step: int) -> None:
    """The first update has ratios of 1; the second those of the weights after the first, at temperature 0.7."""
    groups, ratios = recorded.steps[step].training_groups(), tokens(recorded, step)["ratio"]
    first = sum(len(each.completion.token_ids) for group in groups[:2] for each in group)
    assert list(ratios[:first]) == pytest.approx([1.0] * first, abs=1e-5)
    before, after = (
        plain_logprobs(
            recorded.components, recorded.weights_before(step, update), groups[2:], temperature=0.7
        )
        for update in (0, 1)
    )
    expected = [math.exp(new - old) for new, old in zip(after, before, strict=True)]
    assert max(abs(ratio - 1) for ratio in expected) > 1e-2
    close(ratios[first:], expected, 1e-4)


@pytest.mark.parametrize("place", range(4))
def test_an_update_has_a_gradient_where_its_own_groups_have_spread(
    tmp_path: Path, small_model: Path, place: int
) -> None:
    recording = run(
        tmp_path / "a",
        small_model,
        ONE_STEP,
        {"optim": {"updates": 4}},
        uniform=lambda ids: {id_ for index, id_ in enumerate(ids) if index != place},
    )
    gradients = [update.largest_gradient for update in recording.steps[1].updates]
    assert [index for index, each in enumerate(gradients) if each > 0] == [place]


def dynamic(
    tmp_path: Path, model: Path, batches: int, spread: set[int]
) -> tuple[Recording, list[list[Sampled]]]:
    """Run one step in which only the groups at the places in `spread` differ in reward; return what was sampled."""
    recording = run(
        tmp_path / "a",
        model,
        ONE_STEP,
        {"sampling": {"dynamic": True, "dynamic_batches": batches}},
        uniform=lambda ids: {id_ for index, id_ in enumerate(ids) if index not in spread},
    )
    groups = recording.steps[1].training_groups()
    for index, group in enumerate(groups):
        assert (len({each.grade.reward for each in group}) > 1) == (index in spread)
    return recording, groups


def check_learned(recording: Recording, groups: list[list[Sampled]]) -> None:
    """Require that the updates of step 1 ran exactly these groups through the model, in this order."""
    table = tokens(recording, 1)
    close(table["advantage"], token_advantages(groups, recording.config), 1e-5)
    close(table["old_logprob"], plain_logprobs(recording.components, recording.initial, groups, 0.7), 1e-4)


def test_dynamic_sampling_trains_on_the_first_groups_with_spread(tmp_path: Path, small_model: Path) -> None:
    recording, groups = dynamic(tmp_path, small_model, batches=10, spread={1, 5, 6, 8, 9, 10})
    assert len(groups) == 12, "the third batch completes the step, so there is no fourth"
    check_learned(recording, [groups[index] for index in (1, 5, 6, 8)])


def test_dynamic_sampling_stops_at_the_batch_that_completes_the_step(
    tmp_path: Path, small_model: Path
) -> None:
    recording, groups = dynamic(tmp_path, small_model, batches=10, spread=set(range(20)))
    assert len(groups) == 4
    check_learned(recording, groups)


def test_dynamic_sampling_fills_up_with_the_first_groups_without_spread(
    tmp_path: Path, small_model: Path
) -> None:
    """Two updates of two groups: each has one of the two groups with spread, and runs that one alone."""
    recording, groups = dynamic(tmp_path, small_model, batches=3, spread={1, 6})
    assert len(groups) == 12
    check_learned(recording, [groups[index] for index in (1, 6)])
    assert all(update.largest_gradient > 0 for update in recording.steps[1].updates)


def by_parity(token: int) -> float:
    """Return a shift of log-probs: even tokens reported too likely, odd ones far too unlikely."""
    return 0.5 if token % 2 == 0 else -1.0


def test_importance_weights_of_another_engine_are_truncated_at_the_cap(
    tmp_path: Path, small_model: Path
) -> None:
    layer = {"objective": {"importance_cap": 1.7}}
    recording = run(tmp_path / "a", small_model, ONE_STEP, layer, shares_weights=False, shift=by_parity)
    groups, line = recording.steps[1].training_groups(), recording.line(1)
    shifts = [by_parity(token) for group in groups for each in group for token in each.completion.token_ids]
    weights = [min(math.exp(-shift), 1.7) for shift in shifts]
    assert line["sampler/importance_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert line["sampler/importance_max"] == pytest.approx(1.7)
    assert line["sampler/logprob_gap_mean"] == pytest.approx(sum(map(abs, shifts)) / len(shifts), rel=1e-4)
    assert line["sampler/logprob_gap_max"] == pytest.approx(1.0, rel=1e-4)
    check_learned(recording, groups)  # the ratio still uses the trainer's log-probs


@pytest.mark.parametrize(
    ("shares", "objective", "shift"),
    [
        (True, {}, by_parity),
        (False, {"importance_cap": None}, by_parity),
        (False, {"old_logprobs": "sampler"}, by_parity),
    ],
    ids=["shared-weights", "no-cap", "old-logprobs-of-the-sampler"],
)
def test_no_correction_without_another_engine_or_cap(
    tmp_path: Path, small_model: Path, shares: bool, objective: dict[str, Any], shift: Any
) -> None:
    layer = {"objective": objective}
    recording = run(tmp_path / "a", small_model, ONE_STEP, layer, shares_weights=shares, shift=shift)
    groups, line = recording.steps[1].training_groups(), recording.line(1)
    assert not [key for key in line if key.startswith("sampler/importance")]
    assert line["sampler/logprob_gap_max"] == pytest.approx(1.0, rel=1e-4)
    expected = plain_logprobs(recording.components, recording.initial, groups, 0.7)
    sampled = [logprob for group in groups for each in group for logprob in each.completion.logprobs]
    if "old_logprobs" in objective:
        expected = sampled
    elif shares:  # the first of the two updates takes the trainer's in any case
        first = sum(len(each.completion.token_ids) for group in groups[:2] for each in group)
        expected[first:] = sampled[first:]
    table = tokens(recording, 1)
    close(table["old_logprob"], expected, 1e-4)
    close(table["advantage"], token_advantages(groups, recording.config), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainers_own_model_is_corrected_for_in_16_bits_only(
    tmp_path: Path, small_model: Path, dtype: str
) -> None:
    """The real sampler, which draws from logits rounded to bfloat16: w = π_old/π_sampler of every token, by hand."""
    layer = {"model": {"dtype": dtype}}
    recording = run(tmp_path / "a", small_model, ONE_STEP, layer)
    groups, line = recording.steps[1].training_groups(), recording.line(1)
    if dtype == "float32":
        assert not [key for key in line if key.startswith("sampler/importance")]
        assert line["sampler/logprob_gap_max"] < 1e-4
        return
    reported = [logprob for group in groups for each in group for logprob in each.completion.logprobs]
    weights = [
        math.exp(old - new) for old, new in zip(tokens(recording, 1)["old_logprob"], reported, strict=True)
    ]
    assert max(weights) > 1.003, "no token differs, so nothing is tested"
    assert line["sampler/importance_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-6)
    assert line["sampler/importance_max"] == pytest.approx(max(weights), rel=1e-6)


@pytest.mark.parametrize(
    ("shares", "shift", "factor"),
    [(True, math.log(2), 1.0), (False, math.log(2), 0.5), (False, -3.0, 2.0)],
    ids=["shared-weights", "half", "capped"],
)
def test_the_correction_scales_the_gradient(
    tmp_path: Path, small_model: Path, shares: bool, shift: float, factor: float
) -> None:
    """With all log-probs off by the same amount, the gradient at ratio 1 is scaled by min(π/π_engine, 2)."""
    once = {"optim": {"updates": 1}, "evaluation": {"every": 0}}
    plain = run(tmp_path / "a", small_model, ONE_STEP, once).line(1)
    other = run(
        tmp_path / "b", small_model, ONE_STEP, once, shares_weights=shares, shift=lambda token: shift
    ).line(1)
    assert plain["optim/grad_norm"] > 0
    assert other["optim/grad_norm"] == pytest.approx(factor * plain["optim/grad_norm"], rel=1e-4)
    assert other["optim/loss"] == pytest.approx(factor * plain["optim/loss"], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_schedule_over_all_updates_of_the_run(
    recorded: Recording, tmp_path: Path, small_model: Path, schedule: str
) -> None:
    """10 updates: 3 of warm-up, then the schedule over the other 7."""
    changed = {"optim": {"schedule": schedule}, "evaluation": {"every": 0}}
    recording = recorded if schedule == "cosine" else run(tmp_path / "a", small_model, changed)
    falls: Callable[[float], float] = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: 1 - progress,
        "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    }[schedule]
    expected = [1e-3 * factor for factor in (1 / 3, 2 / 3, 1, *(falls(n / 7) for n in range(7)))]
    rates = [update.lr for step in range(1, 6) for update in recording.steps[step].updates]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert [recording.line(step)["optim/lr"] for step in range(1, 6)] == pytest.approx(expected[1::2])


def test_weights_change_only_at_updates(recorded: Recording) -> None:
    for number in range(1, 6):
        weights = [
            recorded.weights_before(number),
            *(each.weights for each in recorded.steps[number].updates),
        ]
        assert not any(same_weights(one, other) for one, other in pairwise(weights))
    assert same_weights(
        recorded.steps[5].updates[-1].weights, dict(recorded.components.policy.model.state_dict())
    )
