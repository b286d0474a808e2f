"""The record of a report: exact settings, environments and values of the runs, and the paragraph made from them."""

import html
import json
import re

import pytest

from tests.reports.sweep_folders import CLIP, KL, report_of, report_on, write_sweep, write_variant

ENVIRONMENT = {
    "command": "bandpo train --method clip",
    "versions": {"python": "3.12.1", "torch": "2.13.0"},
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "hardware": {"cpu": "EPYC", "usable_cores": 2, "gpus": [{"name": "H100", "memory_gib": 79.1}]},
}


@pytest.fixture
def report(tmp_path, without_plots):
    """Return a report of runs that differ in method, learning rate, seed and machine; one has no env.json."""
    kl = (*KL, "optim.lr=4e-5", "tracking.uri=http://server")
    without_gpu = {"git": None, "hardware": ENVIRONMENT["hardware"] | {"gpus": []}}
    runs = [write_variant(tmp_path, "clip", (*CLIP, "optim.lr=1e-5"), seed) for seed in (0, 1)]
    for run, changes in zip(runs, ({}, without_gpu), strict=True):
        (run.folder / "env.json").write_text(json.dumps(ENVIRONMENT | changes))
    runs.append(write_variant(tmp_path, "kl", kl, accuracy={0: 0.2, 4: 0.5}))
    return report_on(runs, tmp_path, "clip")


def test_the_record_has_exact_settings_values_and_environments(report):
    record = json.loads(report.files["report.json"].read_text())
    assert record["settings"]["sampling.samples"] == 16
    own = {"seed", "optim.lr", "bounds.method", "tracking.uri", "checkpoint.every"}
    assert not own & record["settings"].keys()
    first, second, third = record["runs"]
    assert (first["run"], first["variant"], first["seed"], first["steps"]) == ("clip-0", "clip", 0, 4)
    assert (third["settings"]["bounds.delta"], third["settings"]["optim.lr"]) == (0.05, 4e-5)
    assert first["environment"] == ENVIRONMENT
    assert (second["environment"]["git"], third["environment"]) == (None, {})
    assert (first["values"]["accuracy"], third["values"]["accuracy"]) == (0.4, 0.5)
    assert first["seconds"] == pytest.approx(4 * 1.25)
    units = {metric["key"]: metric["unit"] for metric in record["metrics"]}
    assert (units["accuracy"], units["entropy"], units["seconds_per_step"]) == ("share", "nats", "s")
    assert {"python", "bandpo", "numpy", "scipy"} <= record["environment"]["versions"].keys()
    assert record["environment"]["command"]


def test_the_paragraph_has_the_facts_and_gives_differences_as_ranges(report):
    for text in (
        "The policy was the model bundled with bandpo for the task countdown (auto), trained for 4 steps. ",
        "16 completions of at most 8 tokens for each of 64 prompts at temperature 1. ",
        "Policy loss: clip (eps_low 0.2, eps_high 0.2; arXiv 1707.06347); "
        "band (divergence kl, delta 0.05, max_ratio 10; arXiv 2603.04918). ",
        "AdamW with learning rate 1e-5 to 4e-5 (constant after 5 updates of linear warm-up), betas 0.9 and 0.999, ",
        "each of at most 128 held-out problems of countdown at temperature 1. ",
        "The report has 3 runs with seeds 0, 1. ",
        "Hardware: 1 × H100, 2 cores of EPYC (2 of 3 runs). ",
        "python 3.12.1, torch 2.13.0, commit 0123456789ab with changes",
    ):
        assert text in report.methods
    assert "t-tests" not in report.methods  # there is one common seed, so nothing was tested
    assert not re.search(r"[{}]|\.\.|None|null|LoRA|Groups|Further|continued|http:", report.methods)
    assert report.methods in html.unescape(report.files["report.html"].read_text())
    assert report.methods.replace("_", "\\_") in report.files["report.md"].read_text()


@pytest.mark.usefixtures("without_plots")
def test_numbers_of_the_paragraph_come_from_the_records(tmp_path):
    sizes = ("model.lora.rank=7", "sampling.samples=5", "evaluation.problems=33")
    further = ("sampling.max_lag=2", "objective.top_entropy=0.2", "objective.dual_clip=null")
    run = write_variant(tmp_path, "clip", (*sizes, *further, "sampling.dynamic=true", *CLIP))
    methods = report_on([run], tmp_path).methods
    assert "LoRA adapters had rank 7. " in methods
    assert "settings: sampling.max_lag 2, objective.dual_clip null, objective.top_entropy 0.2. " in methods
    assert "Groups of completions with equal rewards were replaced by those of further prompts. " in methods
    assert "sampled 5 completions" in methods
    assert "at most 33 held-out" in methods
    assert "The report has 1 run with seed 0. " in methods
    assert "Hardware" not in methods
    assert "paired" not in methods


@pytest.mark.usefixtures("without_plots")
def test_there_is_one_form_of_the_record(tmp_path):
    report = report_of(write_sweep(tmp_path / "s", {"clip": {0: 0.4, 1: 0.42}, "kl 0.02": {0: 0.5, 1: 0.53}}))
    assert json.loads(report.files["report.json"].read_text()) == json.loads(json.dumps(report.as_json()))
    assert "compared with clip over common seeds by paired t-tests" in report.methods
    assert "equivalence within ±0.02 of held-out accuracy, by two one-sided t-tests" in report.methods
