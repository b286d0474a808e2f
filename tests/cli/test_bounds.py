"""`bandpo bounds`: output, error messages, and start-up without torch."""

import csv
import io
import json
import math
import sys
from itertools import product
from pathlib import Path

import pytest

from bandpo_cli.methods.weights_and_gates import AspoSettings, ClipCovSettings
from tests.cli.eval_command import bandpo

KEYS = [
    "prob", "divergence", "delta", "lower", "upper", "prob_lower", "prob_upper", "lower_saturated", "upper_saturated",
]  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: bandpo("bounds", *arguments, cwd=tmp_path, COLUMNS="80")


def test_json_has_the_documented_keys_in_order(run):
    radii = ["--delta", "0.05", "--delta", "0.1"]
    result = run("0.9", "0.08", "-d", "kl", "--divergence", "tv", *radii, "--format", "json")
    rows = json.loads(result.out)
    assert result.code == 0
    assert all(list(row) == KEYS for row in rows)
    order = [(row["divergence"], row["delta"], row["prob"]) for row in rows]
    assert order == [*product(("kl", "tv"), (0.05, 0.1), (0.9, 0.08))]
    assert rows[1]["lower"] == pytest.approx(0.261695843479, rel=1e-11)
    assert rows[1]["upper"] == pytest.approx(2.41055379376, rel=1e-11)
    assert rows[1]["prob_upper"] == rows[1]["upper"] * 0.08


def test_the_ratio_is_capped_only_with_max_ratio_and_saturated_at_the_ends_of_the_simplex(run):
    def row(*arguments):
        return json.loads(run(*arguments, "--format", "json").out)[0]

    assert row("1e-6")["upper"] > 1e4
    capped = row("1e-6", "--max-ratio", "10")
    assert (capped["upper"], capped["upper_saturated"]) == (10.0, False)
    edge = row("0.01", "-d", "tv", "--delta", "0.01")
    assert (edge["lower"], edge["lower_saturated"], edge["upper_saturated"]) == (0.0, True, False)
    assert not row("0.00001")["lower_saturated"], "the ratio underflows, but p > 0 for every radius"
    certain = row("1")
    assert (certain["upper"], certain["prob_upper"], certain["upper_saturated"]) == (1.0, 1.0, True)


def test_csv_and_json_have_the_same_values(run):
    arguments = ["0.1", "1", "-d", "js", "--compare", "clip,none"]
    rows = json.loads(run(*arguments, "--format", "json").out)
    table = list(csv.DictReader(io.StringIO(run(*arguments, "--format", "csv").out)))
    assert list(table[0]) == KEYS
    for row, cells in zip(rows, table, strict=True):
        assert float(cells["upper"]) == (row["upper"] if row["upper"] is not None else float("inf"))
        assert cells["delta"] == ("" if row["delta"] is None else str(row["delta"]))


def test_the_table_fits_80_columns_and_shows_every_method(run):
    arguments = ["0.000123456", "0.08", "0.9", "-d", "kl", "-d", "reverse-kl", "--delta", "0.001"]
    result = run(*arguments, "--compare", "clip,clip-higher,dcpo")
    assert max(map(len, result.out.splitlines())) <= 80
    methods = ("kl, delta 0.001", "reverse-kl, delta 0.001", "clip", "clip-higher", "dcpo")
    for word in (*methods, "Δp", "lower", "upper", "saturated"):
        assert word in result.out
    assert "…" not in result.out


def test_probabilities_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("# made by hand\n0.1, 0.2\n0.3  # the last\n"))
    rows = json.loads(run("0.6", "-", "--format", "json").out)
    assert [row["prob"] for row in rows] == [0.6, 0.1, 0.2, 0.3]
    for text, part in (("0.1\n0.2 x\n", "standard input, line 2: 'x'"), ("# none", "no probability in it")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert part in run("-").err


def test_match_computes_delta(run):
    (found,) = json.loads(run("--match", "clip-higher", "--at", "0.1", "--format", "json").out)
    (row,) = json.loads(run("0.1", "--delta", repr(found["delta"]), "--format", "json").out)
    assert row["upper"] == pytest.approx(1.28, rel=1e-9)
    result = run("--match", "clip-higher", "--at", "0.9", "-d", "tv")
    assert result.code == 0
    assert "none: a Band never passes the simplex, r ≤ 1/p = 1.11111" in result.out


def test_masks_are_compared_as_intervals(run):
    """DPPO's region is the Band without a cap; the interval of GMPO is e^±0.4, of ASPO and Clip-Cov that of a clip."""
    arguments = ["0.001", "0.3", "--compare", "ripo,dppo,gmpo,aspo,clip-cov", "--format", "json"]
    rows = {(row["divergence"], row["prob"]): row for row in json.loads(run(*arguments).out)}
    aspo, clip_cov = AspoSettings(), ClipCovSettings()
    for prob in (0.001, 0.3):
        band, width = rows["kl", prob], math.sqrt(0.05 / prob)
        for name, ends in (
            ("dppo kl", (band["lower"], band["upper"])),
            ("ripo", (max(1 - width, 0.5), min(1 + width, 10))),
            ("gmpo", (math.exp(-0.4), math.exp(0.4))),
            ("aspo", (1 - aspo.eps_low, 1 + aspo.eps_high)),
            ("clip-cov", (1 - clip_cov.eps_low, 1 + clip_cov.eps_high)),
        ):
            row = rows[name, prob]
            assert (row["lower"], row["upper"]) == pytest.approx(ends, rel=1e-12)
    assert rows["dppo kl", 0.001]["delta"] == 0.05
    assert rows["dppo kl", 0.001]["upper"] > 10
    assert "dppo kl, delta 0.05" in run("0.1", "--compare", "dppo").out


@pytest.mark.slow
def test_plot(run):
    arguments = ["-d", "kl", "-d", "js", "--delta", "0.05", "--delta", "0.1", "--compare", "clip,dcpo,none"]
    assert run("0.1", *arguments, "--plot", "out.pdf").code == 0
    assert Path("out.pdf").read_bytes().startswith(b"%PDF")
