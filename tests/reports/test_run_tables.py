"""Data of a run agrees with its metrics.jsonl; a run that has to be excluded comes with the reason."""

import json
import math
from pathlib import Path

import pytest

from bandpo_cli.reports.run_tables import RunTables, read_runs
from bandpo_cli.reports.run_variants import VariantRun
from tests.reports.sweep_folders import edit_line, write_run


def _read(*folders: Path) -> RunTables:
    return read_runs(VariantRun("clip", seed, folder) for seed, folder in enumerate(folders))


def test_data_of_a_run_computed_by_hand(tmp_path):
    folder = write_run(tmp_path / "a", accuracy={0: 0.2, 2: 0.3, 4: 0.5})
    tables = _read(folder, write_run(tmp_path / "b", steps=20))
    (_, run), (_, long) = tables.runs.iterrows()
    assert (run["folder"], run["n"], run["steps"]) == (folder, {"countdown": "16"}, 4)
    assert tables.steps.loc[("clip", 0), "accuracy/countdown"].dropna().to_dict() == {0: 0.2, 2: 0.3, 4: 0.5}
    assert run["area/countdown"] == pytest.approx((0.25 * 2 + 0.4 * 2) / 4)
    assert (run["pass_at_4/countdown"], run["pass_at_16/countdown"]) == pytest.approx((0.6, 0.8))
    assert long["entropy"] == pytest.approx((0.5 - 0.05 * 19 + 0.5 - 0.05 * 20) / 2)  # the last tenth
    assert run["entropy"] == pytest.approx(0.3)  # a tenth of 4 steps is at least one
    assert (run["clipped"], run["seconds_per_step"]) == pytest.approx((0.02, 1.25))


def test_clipped_share_of_a_bin_weights_steps_by_tokens(tmp_path):
    folder = write_run(tmp_path / "a", steps=2)
    edit_line(folder, 1, **{"clip/active_fraction/p_0.1_0.5": 1.0, "clip/token_share/p_0.1_0.5": 0.1})
    edit_line(folder, 2, **{"clip/active_fraction/p_0.1_0.5": 0.0, "clip/token_share/p_0.1_0.5": 0.3})
    bins = _read(folder).bins.set_index("bin")
    assert bins["clipped"].to_dict() == {"0.1 – 0.5": pytest.approx(0.25), "0.9 – 1": 0.0}
    assert math.fsum(bins["tokens"]) == pytest.approx(1)


def test_values_that_are_not_usable_numbers_are_ignored(tmp_path):
    folder = write_run(tmp_path / "a")
    edit_line(folder, 4, **{"train/entropy": None, "clip/active_fraction": float("nan"), "time/step": "x"})
    edit_line(folder, 3, **{"clip/active_fraction": 10**400, "time/step": 1e308})
    run = _read(folder).runs.iloc[0]
    assert math.isnan(run["entropy"])
    assert (run["clipped"], run["seconds_per_step"]) == pytest.approx((0.02, 1.25))


def test_set_names_with_slashes_and_mean_at_n_are_read(tmp_path):
    folder = write_run(tmp_path / "a", sets=[])
    edit_line(folder, 4, **{"eval/a/b/mean_at_n": 0.5, "eval/a/b/pass_at_2": 0.6})
    with (folder / "metrics.jsonl").open("a") as file:  # the last record of a step counts
        file.write(json.dumps({"step": 4, "eval/a/b/mean_at_n": 0.7, "eval/a/b/pass_at_2": 0.6}) + "\n")
    run = _read(folder).average(["a/b"]).runs.iloc[0]
    assert run["n"] == {"a/b": "n"}
    assert run[["reward", "accuracy", "pass_at_2"]].tolist() == [0.7, 0.7, 0.6]
    assert math.isnan(run["area"])


def _written(name, text):
    return lambda folder: (folder / name).write_text(text)


def _deleted(name):
    return lambda folder: (folder / name).unlink()


def _edited(number, **changes):
    return lambda folder: edit_line(folder, number, **changes)


def _truncated(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])


STOPPED = '{"status": "FINISHED", "stopped_by": "stop.gap_above = 1: ..."}'
FAILED = '{"status": "FAILED", "error": "NonFiniteError: the loss is nan"}'


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_written("summary.json", FAILED), "failed at step 4 of 4: NonFiniteError: the loss is nan"),
        (lambda folder: folder.rename(folder.with_name("gone")), "its folder does not exist"),
        (_deleted("config.yaml"), "no config.yaml"),
        (_written("config.yaml", "a: ["), ": not readable as YAML"),
        (_deleted("summary.json"), "not finished: step 4 of 4, no summary.json"),
        (_written("summary.json", "[]"), "summary.json: expected a JSON object"),
        (_deleted("metrics.jsonl"), "metrics.jsonl ends at step 0 of 4"),
        (_written("summary.json", STOPPED), "ended at step 4 of 4: stop.gap_above = 1"),
        (_truncated, "metrics.jsonl ends at step 3 of 4"),
        (_written("metrics.jsonl", "{\n"), "damaged: metrics.jsonl, line 1"),
        (_edited(2, step="two"), "damaged: metrics.jsonl, line 3 is not a JSON object with a step"),
        (_edited(2, step=-1), "damaged: metrics.jsonl, line 3 is not"),
        (_edited(2, step=10**400), "damaged: metrics.jsonl, line 3 is not"),
        (_edited(4, **{"eval/countdown/mean_at_16": None}), "no evaluation at its last step"),
    ],
)
def test_reason_of_an_excluded_run(tmp_path, damage, reason):
    folder = write_run(tmp_path / "a")
    damage(folder)
    tables = _read(folder)
    (excluded,) = tables.excluded
    assert tables.runs.empty
    assert reason in excluded.reason
    assert "\n" not in excluded.reason
    assert (excluded.run, excluded.variant, excluded.seed) == ("a", "clip", 0)
