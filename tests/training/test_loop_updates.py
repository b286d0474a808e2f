"""From rollouts to updates: texts, rewards, advantages, groups, old log-probs, corrections, learning rates."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.training.recording import Recording, run, same_weights

NO_PENALTY: dict[str, Any] = {"reward": {"overlong_buffer": 0}}
ONE_STEP: dict[str, Any] = {"steps": 1, "evaluation": {"every": 1}, **NO_PENALTY}
"""One step with its token table; rewards depend on the grader alone."""


def tokens(recording: Recording, step: int) -> pd.DataFrame:
    return pd.read_parquet(recording.folder.path / "tokens" / f"step-{step:06d}.parquet")


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
