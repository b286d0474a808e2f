"""Scheduled radius: its values per step, the settings that are refused, and what a run without one writes."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import DELTA_SCHEDULES, BandSettings, MethodSettings, TrustRegionSettings


def radii(steps: int, **bounds: Any) -> list[float]:
    """Return the radius of each step of a run, as the training loop asks for it."""
    settings = resolve([{"bounds": bounds, "steps": steps}]).bounds
    return [settings.scheduled(step, steps)["delta"] for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        # 0.2 less a quarter of 0.2 − 0.04 per step
        ({"delta_schedule": "linear"}, [0.16, 0.12, 0.08, 0.04]),
        # 0.04 + 0.16·(1 + cos(π·s))/2 at s = ¼, ½, ¾, 1; cos(π/4) = √½
        ({"delta_schedule": "cosine"}, [0.12 + 0.08 * math.sqrt(0.5), 0.12, 0.12 - 0.08 * math.sqrt(0.5), 0.04]),
        # 0.04 + 0.16·(9/16, 4/16, 1/16, 0)
        ({"delta_schedule": "polynomial"}, [0.13, 0.08, 0.05, 0.04]),
        # 0.04 + 0.16·(27/64, 8/64, 1/64, 0)
        ({"delta_schedule": "polynomial", "delta_power": 3}, [0.1075, 0.06, 0.0425, 0.04]),
        # at its end after two steps
        ({"delta_schedule": "linear", "delta_steps": 2}, [0.12, 0.04, 0.04, 0.04]),
        # half of the way
        ({"delta_schedule": "linear", "delta_steps": 8}, [0.18, 0.16, 0.14, 0.12]),
        # a radius that grows
        ({"delta_schedule": "linear", "delta": 0.01, "delta_end": 0.05}, [0.02, 0.03, 0.04, 0.05]),
    ],
)  # fmt: skip
def test_radius_per_step_in_closed_form(bounds, expected):
    assert radii(4, **{"delta": 0.2, "delta_end": 0.04, **bounds}) == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(list(DELTA_SCHEDULES)), st.floats(1e-4, 2), st.floats(1e-4, 2), st.integers(2, 60))
def test_radius_is_monotonic_and_ends_at_delta_end(schedule, start, end, steps):
    values = [start, *radii(steps, delta=start, delta_end=end, delta_schedule=schedule)]
    assert values[-1] == end
    towards_end = math.copysign(1, end - start)
    assert all((b - a) * towards_end >= -1e-12 for a, b in pairwise(values))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["delta_schedule=linear"], ["delta_schedule = 'linear'", "needs delta_end"]),
        (["delta_end=0.01"], ["delta_end = 0.01", "needs a schedule", "linear, cosine, polynomial"]),
        (["delta_steps=9"], ["delta_steps = 9", "needs a schedule"]),
        (["delta_power=2"], ["delta_power = 2", "needs a schedule"]),
        (["delta_schedule=cosine", "delta_end=0.1", "delta_power=3"], ["delta_power = 3", "only to delta_schedule"]),
        (["delta_schedule=lineer", "delta_end=0.1"], ["bounds.delta_schedule = 'lineer'", "did you mean 'linear'"]),
        (["delta_schedule=linear", "delta_end=.inf"], ["bounds.delta_end = inf", "finite"]),
        (["method=clip", "delta_schedule=linear"], ["bounds.delta_schedule", "no such setting of 'clip'"]),
    ],
)  # fmt: skip
def test_invalid_schedules_are_one_line_that_names_the_key(settings, words):
    with pytest.raises(ConfigError) as raised:
        resolve([read_assignments(f"bounds.{setting}" for setting in settings)])
    assert "\n" not in str(raised.value)
    assert [word for word in words if word not in str(raised.value)] == []


def test_every_method_with_a_trust_region_can_schedule_its_radius():
    classes = MethodSettings.classes()
    regions = [name for name, entry in METHODS.items() if entry.trust_region]
    assert "band" in regions
    for name, cls in classes.items():
        has_key = "delta_schedule" in cls.model_fields
        assert issubclass(cls, TrustRegionSettings) == has_key == (name in regions)
        assert cls().scheduled(1, 10) == {}, "nothing is scheduled by default"
    for name in regions:
        settings = {"method": name, "delta": 0.2, "delta_end": 0.1, "delta_schedule": "linear"}
        assert radii(2, **settings) == pytest.approx([0.15, 0.1])


def test_the_settings_of_a_constant_radius_have_no_key_of_the_schedule():
    stated = resolve([{"bounds": {"delta_schedule": "constant", "delta_end": None}}])
    assert list(stated.bounds.model_dump()) == ["method", "divergence", "delta", "max_ratio", "relax"]
    assert to_yaml(stated) == to_yaml(resolve([]))
    assert "  divergence: kl\n  delta: 0.05\n  max_ratio: 10.0\n  relax: null\nobjective:" in to_yaml(stated)


def test_a_schedule_is_in_the_resolved_settings_and_their_description():
    bounds = {"delta": 0.2, "delta_end": 0.02, "delta_schedule": "polynomial", "delta_steps": 1500}
    config = resolve([{"bounds": bounds}])
    assert resolve([{"bounds": config.model_dump()["bounds"]}]).bounds == config.bounds
    assert "δ = 0.2 → 0.02 (polynomial of power 2 over 1,500 steps)" in config.bounds.describe()
    assert config.bounds.slug() == "band-kl-0.2-to-0.02"
    over_run = BandSettings(delta=0.2, delta_end=0.02, delta_schedule="cosine")
    assert "δ = 0.2 → 0.02 (cosine over the run), ratio ≤ 10" in over_run.describe()
