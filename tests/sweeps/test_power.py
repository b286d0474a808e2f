"""Planning from a pilot: variance components of known truth, a plan by hand, and one error line for a bad pilot."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.verdicts import observations
from bandpo_cli.sweeps.estimate import START_S
from bandpo_cli.sweeps.power import plan_power, variance_components
from tests.cli.eval_command import succeed
from tests.reports.sweep_folders import write_sweep


def write_pilot(folder: Path, values: dict[str, list[list[float]]]) -> Path:
    """Write a sweep of runs with 16 completions per problem and these shares of correct ones, [seeds][problems]."""
    write_sweep(folder, {name: {s: 0.4 for s, _ in enumerate(rows)} for name, rows in values.items()})
    for name, rows in values.items():
        for seed, row in enumerate(rows):
            by_problem = {str(index): {"mean_at_16": value} for index, value in enumerate(row)}
            path = folder / f"{name.replace(' ', '-')}-s{seed}" / "evals" / "step-000004.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"sets": {"countdown": {"by_problem": by_problem}}}))
    return folder


def test_components_of_known_truth():
    rng, spreads = np.random.default_rng(0), (0.1, 0.2, 0.3)
    found = []
    for _ in range(2000):
        shapes = zip(spreads, ((6, 1), (1, 20), (6, 20)), strict=True)
        seed, problem, cell = (spread * rng.standard_normal(shape) for spread, shape in shapes)
        found.append(variance_components(0.05 + seed + problem + cell, 0.0)[:3])
    assert np.mean(found, axis=0) == pytest.approx(np.square(spreads), rel=0.04)


CLIP = [[0.5, 0.25, 0.0, 0.75], [0.5, 0.5, 0.25, 0.75]]
BAND = [[0.75, 0.25, 0.25, 0.75], [0.5, 0.25, 0.25, 1.0]]


def test_a_plan_by_hand(tmp_path):
    """Differences of two seeds on four problems: ¼, 0, ¼, 0 and 0, −¼, 0, ¼; their means are ⅛ and 0."""
    pilot = write_pilot(tmp_path / "pilot", {"clip": CLIP, "kl": BAND})
    size, parts, rows = plan_power(pilot, 0.1, tmp_path, jobs=2)
    assert size == "2 variants with 2 seeds and 4 problems"
    # The rest is ±(0.0625, 0.0625, 0.0625, −0.1875): 2 · (3 · 0.0625² + 0.1875²) / 3 degrees of freedom.
    assert parts.cell == pytest.approx(2 * (3 * 0.0625**2 + 0.1875**2) / 3)
    assert parts.seed == pytest.approx(max(0.0, 0.125**2 / 2 - parts.cell / 4))
    within = [np.mean([p * (1 - p) for row in rows for p in row]) / 15 for rows in (CLIP, BAND)]
    assert parts.completions == pytest.approx(sum(within))
    assert [row.problems for row in rows] == [2, 4, 8, 16, 32]
    row = rows[1]
    spread = math.sqrt(parts.seed + parts.cell / 4)
    assert row.seeds == observations(0.1 / spread)
    assert row.low < row.seeds < row.high
    # 4 steps of 1.75 s, of which 0.25 s evaluation; two runs at a time.
    assert row.seconds == pytest.approx(row.seeds * (START_S + 6.0 + 1.0))
    assert rows[2].seconds == pytest.approx(rows[2].seeds * (START_S + 6.0 + 2.0))
    assert [row.seeds for row in rows] == sorted((row.seeds for row in rows), reverse=True)


def test_a_conclusion_on_other_problems_needs_enough_of_them(tmp_path):
    """A difference that is ½ on half of the problems and 0 on the others, up to a little noise."""
    rng = np.random.default_rng(1)
    clip = [[0.25 + rng.uniform(0, 0.05) for _ in range(20)] for _ in range(3)]
    band = [[value + index % 2 / 2 for index, value in enumerate(row)] for row in clip]
    band[0][0] += 0.05
    pilot = write_pilot(tmp_path / "pilot", {"clip": clip, "kl": band})
    *_, rows = plan_power(pilot, 0.1, tmp_path, jobs=1)
    assert [row.seeds for row in rows] == [2] * 5
    assert [row.problems for row in rows if row.seeds_elsewhere] == [80, 160]  # 7.85 · 0.26² / 0.1² = 54


def test_a_pilot_of_one_variant_has_twice_its_variance(tmp_path):
    _, parts, rows = plan_power(write_pilot(tmp_path / "pilot", {"clip": CLIP}), 0.1, tmp_path, jobs=1)
    alone = variance_components(np.array(CLIP), 0.0)
    assert parts[:3] == pytest.approx([2 * value for value in alone[:3]])
    assert [row.runs for row in rows] == [2 * row.seeds for row in rows]


def test_failed_runs_are_named_and_forks_have_the_time_of_their_own_steps(tmp_path):
    pilot = write_pilot(tmp_path / "pilot", {"clip": [*CLIP, CLIP[0]], "kl": [*BAND, BAND[0]]})
    for run in pilot.glob("*-s?"):
        (run / "env.json").write_text('{"parent": {"run": "a", "step": 3}}')
    (pilot / "kl-s2" / "summary.json").write_text('{"status": "FAILED", "error": "a disk is full"}')
    size, _, rows = plan_power(pilot, 0.1, tmp_path, jobs=1)
    assert size.endswith("with 2 seeds and 4 problems, without kl-s2 (failed at step 4 of 4: a disk is full)")
    assert rows[1].seconds == pytest.approx(rows[1].runs * (START_S + 1.75))  # of step 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"clip": CLIP[:1], "kl": BAND[:1]},
            "share 1 seed and 4 problems; the spread needs two or more of e",
        ),
        ({"clip": [[0.5], [0.25]], "kl": [[0.5], [0.5]]}, "share 2 seeds and 1 problem"),
        ({"clip": CLIP, "kl": CLIP}, "the same in every seed; they show no spread"),
    ],
)
def test_a_pilot_without_a_spread(tmp_path, values, words):
    with pytest.raises(UserError, match=words):
        plan_power(write_pilot(tmp_path / "pilot", values), 0.02, tmp_path, jobs=1)


def test_a_damaged_or_missing_evaluation_is_named(tmp_path):
    pilot = write_pilot(tmp_path / "pilot", {"clip": CLIP, "kl": BAND})
    path = pilot / "kl-s1" / "evals" / "step-000004.json"
    path.write_text('{"sets": {"countdown": {"by_problem": {"0": {}}}}}')
    with pytest.raises(UserError, match=r"kl-s1/evals/step-000004\.json: .* has no accuracy by problem"):
        plan_power(pilot, 0.02, tmp_path, jobs=1)
    path.unlink()
    with pytest.raises(UserError, match=r"kl-s1/evals/step-0*4\.json is missing.*; give a sweep that fini"):
        plan_power(pilot, 0.02, tmp_path, jobs=1)


def test_what_the_command_prints(tmp_path):
    write_pilot(tmp_path / "runs" / "pilot", {"clip": CLIP, "kl": BAND})
    printed = succeed("sweep", "--power", "0.1", "--pilot", "pilot", "--jobs", "2", cwd=tmp_path).out
    assert "pilot  2 variants with 2 seeds and 4 problems; standard deviations of a difference:\n" in printed
    assert re.search(r"^of a problem in a seed +0\.177$", printed, re.MULTILINE)
    assert re.search(r"^ +4 +\d+ +\d+ to [\d,]+ +(\d+|–) +\d+ +\d:\d\d:\d\d$", printed, re.MULTILINE)
