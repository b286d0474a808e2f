"""`python -m scripts.gpu_check`: the checks with small shapes on a CPU, and each way in which a line fails."""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import kernels, race, ranks, training
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.training import TrainedRun, step_limits
from scripts.gpu_check.work import Work


def measured(value: float) -> Callable[[Work], Measured]:
    """Return a check whose value must be at most 2 and at least 0."""

    def check(work: Work) -> Measured:
        measured = Measured({"value": value})
        measured.at_most("value", 2.0)
        measured.at_least("value", 0.0)
        return measured

    return check


def raising(error: Exception) -> Callable[[Work], Measured]:
    def check(work: Work) -> Measured:
        raise error

    return check


def endless(work: Work) -> Measured:
    time.sleep(60)
    return Measured()


CHECKS = {
    "good": measured(1.5), "absent": raising(Skipped("vllm is not installed")), "short": measured(3.5),
    "nan": measured(math.nan), "broken": raising(RuntimeError("CUDA error: an illegal memory access")),
    "endless": endless, "later": measured(1.5),
}  # fmt: skip


def run(checks, folder, monkeypatch, *arguments):
    """Return the exit code and the report of a call with these checks."""
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(gpu_check, "free_memory", lambda: None)  # a collection of all objects takes 0.4 s
    path = folder / "report.json"
    code = gpu_check.main(["--tiny", "--device", "cpu", "--json", str(path), *arguments])
    return code, json.loads(path.read_text())


def statuses(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(line["name"], line["status"], line["reason"]) for line in report["lines"]]


def test_lines_that_hold_or_do_not_apply_pass(tmp_path, monkeypatch, capsys):
    code, report = run(CHECKS, tmp_path, monkeypatch, "--checks", "good,absent")
    assert (code, report["passed"]) == (0, True)
    assert statuses(report) == [("good", "ok", ""), ("absent", "skipped", "vllm is not installed")]
    assert report["lines"][0]["values"] == {"value": 1.5}
    assert report["machine"]["torch"] == torch.__version__
    out = capsys.readouterr().out
    assert "required: value ≤ 2" in out
    assert re.search(r"absent +skipped .* vllm is not installed", out)
    with pytest.raises(SystemExit) as error:
        run(CHECKS, tmp_path, monkeypatch, "--checks", "god")
    assert error.value.code == 2


def test_a_line_that_falls_short_raises_or_takes_too_long_fails_alone(tmp_path, monkeypatch):
    """A value that is not a number falls short of both limits, and is null in the report."""
    names = "short,nan,broken,good,endless,later"
    code, report = run(CHECKS, tmp_path, monkeypatch, "--checks", names, "--budget", "0.3")
    assert (code, report["passed"]) == (1, False)
    used_up = "the 0.3 s for all checks were used up"
    assert statuses(report) == [
        ("short", "failed", "value is 3.5, required: value ≤ 2"),
        ("nan", "failed", "value is nan, required: value ≤ 2; value is nan, required: value ≥ 0"),
        ("broken", "failed", "RuntimeError: CUDA error: an illegal memory access"),
        ("good", "ok", ""), ("endless", "failed", used_up), ("later", "failed", used_up),
    ]  # fmt: skip
    assert report["lines"][1]["values"] == {"value": None}


RECORD = {
    "step": 1, "optim/loss": 0.1, "optim/grad_norm": 2.0, "sampler/logprob_gap_mean": 0.005, "time/step": 1.0,
    "perf/model_flop_utilisation": 0.3,
}  # fmt: skip


def names_of(measured: Measured) -> list[str]:
    """Return the values that fall short."""
    return [shortfall.partition(" is ")[0] for shortfall in measured.shortfalls]


def test_a_step_falls_short_by_its_metrics(tmp_path):
    for changed, names in (
        ({}, []), ({"optim/loss": math.nan}, ["finite_updates"]), ({"optim/grad_norm": 0.0}, ["grad_norm"]),
        ({"sampler/logprob_gap_mean": 0.2}, ["sampler/logprob_gap_mean"]),
        ({"perf/model_flop_utilisation": 0.01}, ["perf/model_flop_utilisation"]),
    ):  # fmt: skip
        records = [dict(RECORD), {**RECORD, **changed}]
        assert names_of(step_limits(Work("cpu", False, tmp_path), TrainedRun(tmp_path, records))) == names


def ranks_run(folder: Path, texts: str = "ab", **changed: float) -> TrainedRun:
    """Return a run of three steps whose completions are these letters."""
    rows = pandas.DataFrame({"problem_id": range(len(texts)), "text": list(texts)})
    (folder / "samples").mkdir(parents=True)
    for step in (1, 3):
        rows.to_parquet(folder / "samples" / f"step-{step:06d}.parquet")
    return TrainedRun(folder, [{**RECORD, "optim/loss": 1e-8, **changed}] * 3)


@pytest.mark.parametrize(
    ("two", "resumed", "names"),
    [
        ({}, {}, []),
        ({"optim/loss": 1e-7}, {"optim/loss": 1e-7}, []),  # a sum that is almost 0
        ({"optim/loss": 0.01}, {"optim/loss": 0.01}, ["loss_difference"]),
        ({"optim/grad_norm": 2.1}, {"optim/grad_norm": 2.1}, ["grad_norm_difference"]),
        ({"texts": "ac"}, {"texts": "ac"}, ["completions_equal"]),
        ({"texts": "a"}, {"texts": "a"}, ["completions_equal"]),
        ({}, {"texts": "ac"}, ["resumed_completions_equal"]),
        ({}, {"train/reward": 0.5}, ["resumed_metrics_difference"]),
    ],
)
def test_two_ranks_that_differ_from_one_fall_short(two, resumed, names, tmp_path):
    changes = zip("123", ({}, two, resumed), strict=True)
    runs = (ranks_run(tmp_path / name, **changed) for name, changed in changes)
    assert names_of(ranks.compare(Work("cpu", True, tmp_path), *runs)) == names


def test_log_probs_that_differ_fall_short(tmp_path, monkeypatch):
    work, exact = Work("cpu", True, tmp_path), kernels._tiled
    assert not kernels.check_logprobs(work, "0.5b").shortfalls
    monkeypatch.setattr(kernels, "_tiled", lambda inputs: 1.1 * exact(inputs))
    expected = ["max_difference_nats", "hidden_gradient_difference", "weight_gradient_difference"]
    assert names_of(kernels.check_logprobs(work, "0.5b")) == expected


@pytest.mark.parametrize(
    ("states", "again", "names"),
    [
        ("abab", {}, []),
        ("abcb", {}, ["state_equal"]),
        ("abac", {}, ["next_state_equal"]),
        ("abab", {"texts": "ac"}, ["completions_equal"]),
        ("abab", {"train/reward": 0.5}, ["metrics_difference"]),
    ],
)
def test_a_resume_that_changes_anything_falls_short(states, again, names, tmp_path, monkeypatch):
    """The states of the weights and the optimizer are letters: two of the uninterrupted run, two after the resume."""
    saved, resumed = ranks_run(tmp_path / "saved"), ranks_run(tmp_path / "again", **again)
    letters = iter(states)

    def train_steps(work, config, name, observe, checkpoint=None):
        for step in (2, 3):
            observe(None, None if checkpoint and step == 2 else SimpleNamespace(step=step))
        return {"resume-saved": saved, "resume-again": resumed}[name]

    monkeypatch.setattr(training, "train_steps", train_steps)
    monkeypatch.setattr(training, "fingerprints", lambda components: next(letters))
    assert names_of(training.check_resume(Work("cpu", True, tmp_path))) == names


def test_a_side_of_the_race_trains_the_blocks_that_it_is_asked_for(monkeypatch):
    """The first step of a block and the wait before it are not counted."""
    ours, theirs = Pipe()
    now = [0.0]
    monkeypatch.setattr(race, "free_memory", lambda: None)
    monkeypatch.setattr(race, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def side() -> None:
        lane = race.Lane(theirs, on_gpu=False)
        lane.wait()
        lane.wait("ready")
        for step in range(1, 2 * race.STEPS + 1):
            now[0] += step
            lane.end_step({"sync": float(step)})

    thread = threading.Thread(target=side)
    thread.start()
    ours.send(None)
    assert ours.recv() == "ready"
    for block in range(2):
        now[0] += 100
        ours.send(None)
        found = ours.recv()
        steps = range(block * race.STEPS + 2, (block + 1) * race.STEPS + 1)
        assert found["phases"] == [{"sync": float(step)} for step in steps]
        assert found["seconds"] == [*steps]
    ours.send(None)
    thread.join()


def test_the_race_compares_medians_and_reports_the_spread():
    def block(side: str, *seconds: float) -> tuple[str, dict[str, Any]]:
        phases = [dict.fromkeys(race.PHASES[side], 0.25) for _ in seconds]
        return side, {"seconds": [*seconds], "phases": phases, "reserved_gib": 0.0}

    values = race.race_values([block("bandpo", 1.0, 2.0), block("trl", 4.0, 5.0, 4.0), block("bandpo", 2.0)])
    assert (values["bandpo_s"], values["trl_s"], values["time_over_trl"]) == (2.0, 4.0, 0.5)
    assert (values["time_over_trl_low"], values["time_over_trl_high"]) == (1 / 5, 2 / 4)
    assert values["bandpo_steps_s"] == "1.000 2.000 | 2.000"
    assert values["trl_generate_s"] == values["bandpo_update_s"] == 0.25


def test_the_race_names_the_package_that_is_missing(tmp_path, monkeypatch):
    for missing in ("trl", "vllm"):
        monkeypatch.setattr(race, "is_missing", missing.__eq__)
        with pytest.raises(Skipped, match=f"^{missing} is not installed$"):
            race.check_race(Work("cpu", True, tmp_path))


@pytest.mark.slow
def test_an_error_of_a_side_ends_the_race(tmp_path):
    side = race.Side("another", Work("cpu", True, tmp_path), "0.5b", 1)
    try:
        with pytest.raises(RuntimeError, match=r"^another: KeyError"):
            side.call()
    finally:
        side.close()


@pytest.mark.slow
def test_checks_run_with_small_shapes_on_a_cpu(tmp_path, monkeypatch):
    """The checks that start no process of ranks or engines, and the checks that do not apply to a CPU."""
    names = "operator head-0.5b attention first-shapes compiled step-0.5b memory-0.5b prime-rl-4b-lora resume"
    checks = {name: gpu_check.CHECKS[name] for name in names.split()}
    code, report = run(checks, tmp_path, monkeypatch)
    assert code == 0, report
    lines = {line["name"]: line for line in report["lines"]}
    memory = lines.pop("memory-0.5b")["reason"]
    assert re.fullmatch(r"the estimate is \S+ GiB; the peak is measured on a GPU only", memory)
    assert {line["status"] for line in lines.values()} == {"ok"}
    times = {"time/sample", "time/logprobs", "time/update", "perf/trained_tokens_per_s"}
    assert times <= lines["step-0.5b"]["values"].keys()
    assert lines["head-0.5b"]["values"]["fastest"] in ("tiles_1_mib", "tiles_2_mib", "tiles_32_mib")
    assert {"new_over_known", "new_over_known_with_cudnn"} <= lines["first-shapes"]["values"].keys()
    assert lines["prime-rl-4b-lora"]["values"]["prime_rl_tokens_per_s"] == 6229
    assert lines["resume"]["values"]["next_state_equal"] is True
