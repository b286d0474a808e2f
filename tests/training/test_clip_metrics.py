"""Clip metrics by hand: which tokens count as clipped, their bin of the old probability, and the denominators."""

import pytest
import torch

from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.training.metrics import clip_metrics


def metrics_of(*tokens: tuple[float, float, float]) -> dict[str, float]:
    """Return the metrics of tokens given as (old probability, ratio, advantage) under the bounds 0.75 and 1.25."""
    probabilities, ratios, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    lower, upper = torch.full_like(ratios, 0.75), torch.full_like(ratios, 1.25)
    return clip_metrics(clip_state(ratios, lower, upper, advantages), probabilities.log())


def test_the_denominator_of_a_bins_share_is_its_tokens() -> None:
    """Four rare tokens, one of them clipped above; two likely ones, one of them clipped below."""
    metrics = metrics_of(
        (0.005, 2.0, 1.0), (0.005, 2.0, -1.0), (0.005, 1.0, 1.0), (0.005, 0.5, 1.0),
        (0.95, 0.5, -1.0), (0.95, 1.0, -1.0),
    )  # fmt: skip
    assert metrics["clip/active_fraction/p_0.001_0.01"] == 1 / 4
    assert metrics["clip/active_fraction/p_0.9_1"] == 1 / 2
    assert metrics["clip/token_share/p_0.001_0.01"] == pytest.approx(4 / 6)
    assert metrics["clip/token_share/p_0.5_0.9"] == 0
    assert "clip/active_fraction/p_0.5_0.9" not in metrics
    assert metrics["clip/active_fraction"] == pytest.approx(2 / 6)
    assert metrics["clip/upper_fraction"] == metrics["clip/lower_fraction"] == pytest.approx(1 / 6)
    assert metrics["clip/outside_fraction"] == pytest.approx(4 / 6)


def test_a_ratio_on_a_bound_is_inside() -> None:
    metrics = metrics_of((0.3, 0.75, -1.0), (0.3, 1.25, 1.0))
    assert {metrics[f"clip/{name}_fraction"] for name in ("active", "upper", "lower", "outside")} == {0.0}


def test_a_bin_holds_its_upper_edge() -> None:
    """exp(log 0.5) is 0.5 exactly, the upper edge of the bin from 0.1."""
    metrics = metrics_of((0.5, 1.0, 1.0), (0.5 + 1e-9, 1.0, 1.0))
    assert (metrics["clip/token_share/p_0.1_0.5"], metrics["clip/token_share/p_0.5_0.9"]) == (0.5, 0.5)
