"""TensorBoard as a tracker: the event files as its own reader sees them."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.experiments import resume, sync, train
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, finite_metrics

SETTINGS = {
    "steps": 4,
    "task.max_number": 5,
    "sampling": {"prompts": 2, "samples": 2},
    "optim": {"updates": 1, "warmup_steps": 0},
    "evaluation": {"problems": 2, "samples": 2, "k": [2], "every": 2},
    "checkpoint.every": 2,
    "tracking": {"mlflow": False, "tensorboard": True},
}


def read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]], Any]:
    """Return the curves, the texts and the hyperparameters in `tensorboard/`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    curves = {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag.removesuffix("/text_summary"): events.Tensors(tag) for tag in tags["tensors"]}
    texts = {tag: [item.tensor_proto.string_val[0].decode() for item in texts[tag]] for tag in texts}
    (session,) = events.PluginTagToContent("hparams").keys() & {"_hparams_/session_start_info"}
    started = HParamsPluginData.FromString(events.PluginTagToContent("hparams")[session]).session_start_info
    return curves, texts, started.hparams


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    curves = defaultdict(list)
    for record in RunFolder(folder).read_metrics():
        for name, value in finite_metrics(record).items():
            curves[name].append((record["step"], pytest.approx(value, rel=1e-6)))
    return curves


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_each_step_once_and_the_values_of_its_folder(tmp_path):
    """The process ends after step 3 and resumes after step 2, with other times of step 3."""
    folder = train(SETTINGS, tmp_path, "first", [Stop(3)]).folder
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    (folder / "summary.json").unlink()
    assert [step for step, _ in read(folder)[0]["time/step"]] == [0, 1, 2, 3]
    assert resume("first", tmp_path).status == "FINISHED"
    assert len([*folder.glob("tensorboard/events*")]) == 2
    curves, texts, hyperparameters = read(folder)
    assert curves == expected(folder)
    assert [step for step, _ in curves["eval/countdown/pass_at_2"]] == [0, 2, 4]
    assert hyperparameters["bounds.method"].string_value == "band"
    assert hyperparameters["sampling.samples"].number_value == 2
    assert "optim.updates: 1" in texts["settings"][0]
    assert "status: FINISHED" in texts["summary"][-1]
    (report,) = sync(["first"], runs_dir=tmp_path)
    assert (report.tracker, report.result.metrics.new) == ("tensorboard", 0)
    assert len([*folder.glob("tensorboard/events*")]) == 2


class Stop(CallbackBase):
    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, report: Any) -> None:
        if report.step == self.last:
            report.stop("enough")


def test_the_report_of_a_sweep_is_a_text_and_a_resume_adds_a_point(tmp_path):
    (tmp_path / "sweep.yaml").touch()
    report = tmp_path / "report.md"
    for finished in (2, 4, 4):
        report.write_text(f"{finished} runs")
        point = Point(finished, 10**12, {"sweep/kl 0.05/accuracy": finished / 8})
        RunSender("tensorboard", tmp_path).send_sweep("bandpo", {"runs": 4}, point, "FINISHED", [report])
    curves, texts, _ = read(tmp_path)
    assert curves["sweep/kl 0.05/accuracy"] == [(2, 0.25), (4, 0.5)]
    assert texts["report"][-1] == "4 runs"
