"""`bandpo train --resume`: from every state that a crash can leave, on to the run that nothing had stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.storage.checkpoints import Progress, write_trainer_state
from bandpo_cli.storage.run_folder import RunFolder
from tests.cli.eval_command import WITHOUT_TORCH, Done, bandpo, good, refused

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    "--set", "sampling.prompts=4", "--set", "sampling.samples=4", "--set", "optim.updates=2",
    "--set", "evaluation.every=2", "--set", "evaluation.problems=4", "--set", "evaluation.samples=4",
    "--set", "evaluation.k=[1,4]", "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=null",
    "--seed", "3", "--no-mlflow",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing stopped: 6 steps, with every checkpoint that it wrote."""
    place = tmp_path_factory.mktemp("whole")
    good("train", "--steps", "6", *SMALL, "--name", "a", cwd=place)
    return place / "runs" / "a"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return the folder of such a run as far as it can be told without training it: its tensors are none."""
    run = RunFolder.create(tmp_path / "runs", "a")
    run.write_config(to_yaml(resolve([read_assignments(["steps=6", "seed=3", *SMALL[1:-3:2]])])))
    for step in range(7):
        run.append_metrics({"step": step, "time/step": 1.0})
    for step in (2, 4, 6):
        folder = run.checkpoint_dir(step)
        (folder / "trainer").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "trainer/optimizer.safetensors"):
            (folder / name).write_bytes(b"none")
        write_trainer_state(folder, Progress(step, 2 * step, 0, 4 * step, "abc"))
    run.write_summary({"status": "FINISHED", "steps": 6})
    (run.path / "plots").mkdir()
    return run.path


@pytest.fixture
def crashed(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be brought into the state that a crash left."""
    return Path(shutil.copytree(whole, tmp_path / "runs" / "a"))


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines(keepends=True)


def record(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, lines(folder))
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in found]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


CLOCKED = ("metrics.jsonl", "env.json", "summary.json")


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a run by path but for the lock; those with clocks, and pictures of clocks, empty."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        path.relative_to(folder).as_posix(): b""
        if path.name in CLOCKED or path.parent.name == "plots"
        else path.read_bytes()
        for path in paths
    }


def check_same(folder: Path, whole: Path) -> None:
    """Require the same run, and no trace of the crash outside of env.json."""
    assert record(folder) == record(whole)
    ours, theirs = tree(folder), tree(whole)
    assert sorted(ours) == sorted(theirs)
    assert not [name for name in ours if ours[name] != theirs[name]]
    for key, value in summary(whole).items():
        if not key.startswith("time/") and key != "last_step":
            assert summary(folder)[key] == value, key


def cut(folder: Path, last: int) -> None:
    """Leave of the record what a kill after the line of step `last` leaves; checkpoints are left alone."""
    (folder / "metrics.jsonl").write_text("".join(lines(folder)[: last + 1]))
    for name in ("summary.json", "plots"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def drop_checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")


def _before_the_first_line(folder: Path) -> None:
    cut(folder, -1)
    (folder / "metrics.jsonl").unlink()
    drop_checkpoints(folder, 2, 4, 6)
    shutil.rmtree(folder / "samples")


def _before_the_first_checkpoint(folder: Path) -> None:
    cut(folder, 1)
    drop_checkpoints(folder, 2, 4, 6)


def _in_a_step(folder: Path) -> None:
    """Its completions are written, its line is not; a further file was being written."""
    cut(folder, 4)
    drop_checkpoints(folder, 6)
    (folder / "samples" / "step-000006.parquet").rename(folder / "samples" / ".step-000006.parquet.7.tmp")
    (folder / ".summary.json.12.tmp").write_text("{")


def _in_a_checkpoint(folder: Path) -> None:
    """Half of its files are in the hidden folder."""
    cut(folder, 5)
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-000006").rename(checkpoints / ".step-000006.writing")
    shutil.rmtree(checkpoints / ".step-000006.writing" / "trainer")
    (checkpoints / ".step-000006.writing" / "model.safetensors").write_bytes(b"half")


def _between_a_checkpoint_and_its_line(folder: Path) -> None:
    cut(folder, 5)


def _in_a_line(folder: Path) -> None:
    last = lines(folder)[6]
    cut(folder, 5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(last[: len(last) // 2])


def _while_an_older_one_is_removed(folder: Path) -> None:
    cut(folder, 5)
    drop_checkpoints(folder, 6)
    shutil.copytree(folder / "checkpoints" / "step-000002", folder / "checkpoints" / ".step-000001.removing")
    (folder / "checkpoints" / ".step-000001.removing" / "model.safetensors").unlink()


def _in_the_resume_itself(folder: Path) -> None:
    """Later checkpoints are gone and the metrics are cut back; the later files are there still."""
    cut(folder, 2)
    drop_checkpoints(folder, 4, 6)


def _after_the_last_step(folder: Path) -> None:
    cut(folder, 6)


def _in_the_closing(folder: Path) -> None:
    """Some of the plots are there, one by half."""
    (folder / "summary.json").unlink()
    (folder / "plots" / "accuracy.png").unlink()
    (folder / "plots" / ".accuracy.png.3.tmp").write_bytes(b"half")


STATES = {
    crash.__name__.strip("_"): crash
    for crash in (
        _before_the_first_line,
        _before_the_first_checkpoint,
        _in_a_step,
        _in_a_checkpoint,
        _between_a_checkpoint_and_its_line,
        _in_a_line,
        _while_an_older_one_is_removed,
        _in_the_resume_itself,
        _after_the_last_step,
        _in_the_closing,
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_resume_after_a_crash(crashed: Path, whole: Path, tmp_path: Path, state: str) -> None:
    STATES[state](crashed)
    good("train", "--resume", "a", cwd=tmp_path)
    check_same(crashed, whole)


@pytest.mark.slow
def test_resume_prints_its_starting_point_and_continues(crashed: Path, whole: Path, tmp_path: Path) -> None:
    """Two leftovers at once, and by path; `--dry-run` says it and leaves every byte."""
    _in_a_checkpoint(crashed)
    (crashed / "checkpoints" / ".step-000001.removing").mkdir()
    before = {path: path.stat().st_mtime_ns for path in crashed.rglob("*")}
    looked = good("train", "--resume", str(crashed), "--dry-run", cwd=tmp_path)
    assert "after step 4" in looked.out
    assert "2 steps to go, 1 of them done again" in " ".join(looked.out.split())
    assert {path: path.stat().st_mtime_ns for path in crashed.rglob("*")} == before
    done = good("train", "--resume", str(crashed), cwd=tmp_path)
    assert "step 6/6" in done.out
    assert "step 4/6" not in done.out
    check_same(crashed, whole)
    (resume,) = json.loads((crashed / "env.json").read_text())["resumes"]
    assert resume["after_step"] == 4
    assert "--resume" in resume["command"]
    assert "versions" not in resume, "nothing has changed"


def test_a_complete_run_is_refused_and_not_changed(made: Path, tmp_path: Path) -> None:
    before = tree(made)
    line = refused("train", "--resume", "a", cwd=tmp_path)
    assert "run a is complete: 6 of 6 steps; to train further: --resume a --steps 12" in line
    assert tree(made) == before


@pytest.mark.slow
def test_a_complete_run_can_be_trained_further(crashed: Path, tmp_path: Path) -> None:
    """8 steps in two goes are the 8 steps of one."""
    good("train", "--steps", "8", *SMALL, "--name", "long", cwd=tmp_path)
    done = good("train", "--resume", "a", "--steps", "8", "--set", "checkpoint.keep_last=1", cwd=tmp_path)
    assert "step 8/8" in done.out
    assert record(crashed) == record(tmp_path / "runs" / "long")
    config = yaml.safe_load((crashed / "config.yaml").read_text())
    assert (config["steps"], config["checkpoint"]["keep_last"]) == (8, 1)
    assert summary(crashed)["of_steps"] == 8
    there = {path.name for path in (crashed / "checkpoints").iterdir()}
    assert "step-000008" in there
    assert len(there) <= 2, "the last and the best"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(crashed: Path, whole: Path, tmp_path: Path) -> None:
    cut(crashed, 5)
    drop_checkpoints(crashed, 6)
    (crashed / "checkpoints" / "step-000004" / "trainer" / "optimizer.safetensors").write_bytes(b"")
    done = good("train", "--resume", "a", cwd=tmp_path)
    said = " ".join(done.out.split())
    assert "warning: skipped: " in said
    assert "step-000004: trainer/optimizer.safetensors is damaged" in said
    assert "after step 2" in said
    check_same(crashed, whole)


@pytest.mark.slow
def test_steps_that_mlflow_lacks_are_sent_at_the_resume(crashed: Path, tmp_path: Path) -> None:
    """The run had no MLflow before: now it has all of it, each step once."""
    from mlflow import MlflowClient

    _in_a_step(crashed)
    good("train", "--resume", "a", "--mlflow", cwd=tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/entropy")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--lr"], ["--lr"]),
        (["--set", "optim.lr=1e-3"], ["optim.lr = 0.001 (the run has 5e-05)", "What may change", "tracking"]),
        (
            ["--seed", "4", "--delta", "0.1"],
            ["seed = 4 (the run has 3), bounds.delta = 0.1 (the run has 0.05)"],
        ),
        (["--method", "clip"], ["bounds.method = clip (the run has band)"]),
        (["--set", "grading.deadline=1"], ["grading.deadline"]),
        (["--name", "b"], ["leave out --name"]),
        (["--steps", "5"], ["it has done 5 already"]),
        (["--set", "optim.lrr=1"], ["optim.lrr", "did you mean 'lr'"]),
        (["--set", "checkpoint.best_metric=time/step"], ["best_metric", "metrics.jsonl"]),
    ],
)
def test_a_run_keeps_its_settings(made: Path, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    cut(made, 5)
    before = tree(made)
    line = refused("train", "--resume", "a", *arguments, cwd=tmp_path)
    for part in parts:
        assert part in line
    assert tree(made) == before


def test_the_same_settings_again_and_harmless_ones_are_taken(made: Path, tmp_path: Path) -> None:
    cut(made, 5)
    flags = ["--seed", "3", "--set", "grading.workers=1", "--set", "checkpoint.keep_best=0", "--no-mlflow"]
    good("train", "--resume", "a", "--config", "runs/a/config.yaml", *flags, "--dry-run", cwd=tmp_path)


def test_a_schedule_that_ends_cannot_be_made_longer(made: Path, tmp_path: Path) -> None:
    config = (made / "config.yaml").read_text().replace("schedule: constant", "schedule: cosine")
    (made / "config.yaml").write_text(config)
    assert "only a constant one can be extended" in refused(
        "train", "--resume", "a", "--steps", "12", cwd=tmp_path
    )
    assert "(its cosine schedule has ended)" in refused("train", "--resume", "a", cwd=tmp_path)


def _no_config(folder: Path) -> None:
    (folder / "config.yaml").unlink()


def _torn_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("seed: [")


def _strange_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("optim:\n  lrr: 1\n")


def _no_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def _half_the_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(lines(folder)[:3]))


def _a_line_twice(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join([*lines(folder)[:3], lines(folder)[2]]))


def _a_line_of_rubbish(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join([*lines(folder)[:3], "rubbish\n", *lines(folder)[3:]]))


def _no_checkpoint_of_a_whole_run(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def _an_evaluation(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    (folder / "eval.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        (_no_config, [], ["it has no config.yaml", "start a new run"]),
        (_torn_config, [], ["config.yaml", "not readable as YAML"]),
        (_strange_config, [], ["config.yaml", "optim.lrr", "did you mean 'lr'"]),
        (_no_metrics, [], ["metrics.jsonl", "checkpoint of step 2", "lines are missing"]),
        (_half_the_metrics, [], ["ends with step 2", "checkpoint of step 4", "lines are missing"]),
        (_a_line_twice, [], ["line 4: step 2 where step 3 belongs"]),
        (_a_line_of_rubbish, [], ["line 4", "is not a JSON object"]),
        (
            _no_checkpoint_of_a_whole_run,
            ["--steps", "8"],
            ["no complete checkpoint", "train anew", "--steps 8"],
        ),
        (_an_evaluation, [], ["bandpo eval --resume a"]),
    ],
)
def test_a_damaged_run_costs_one_line(
    made: Path, tmp_path: Path, damage: Callable[[Path], None], arguments: list[str], words: list[str]
) -> None:
    damage(made)
    before = tree(made)
    line = refused("train", "--resume", "a", *arguments, cwd=tmp_path)
    for word in words:
        assert word in line
    assert tree(made) == before


def test_user_errors_are_raised_before_torch_is_loaded(made: Path, tmp_path: Path) -> None:
    """And a run of another name is offered."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", "--resume", "a", "--seed", "9"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "seed = 9" in done.stderr
    assert "did you mean 'a'" in refused("train", "--resume", "aa", cwd=tmp_path)


def test_impossible_best_checkpoints_are_warned_about(tmp_path: Path) -> None:
    settings = ["--set", "checkpoint.every=7", "--set", "evaluation.every=20", "--steps", "100", "--dry-run"]
    assert "do not fall together before" in " ".join(good("train", *settings, cwd=tmp_path).out.split())
    settings[1] = "checkpoint.every=4"
    assert "do not fall together" not in " ".join(good("train", *settings, cwd=tmp_path).out.split())


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "bandpo_cli", "train", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_until(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_of(folder: Path) -> int:
    return len(lines(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_sigterm_ends_the_step_and_a_second_process_is_kept_out(tmp_path: Path) -> None:
    settings = ["--steps", "40", *SMALL, "--set", "checkpoint.every=50", "--set", "evaluation.every=20"]
    good("train", *settings, "--name", "whole", "--runs-dir", "there", cwd=tmp_path)
    process = start(tmp_path, *settings, "--name", "a", "--runs-dir", "there")
    folder = tmp_path / "there" / "a"
    wait_until(process, lambda: steps_of(folder) > 3)
    second = refused("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert f"is being written by process {process.pid} on " in second
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert "Traceback" not in err
    assert "once more to drop the step" in err
    assert "continue with: bandpo train --resume a --runs-dir there" in out
    done = summary(folder)
    last = done["steps"]
    assert (done["status"], done["of_steps"]) == ("KILLED", 40)
    assert record(folder)[-1]["step"] == last < 40
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    resumed = good("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert f"after step {last}" in " ".join(resumed.out.split())
    shutil.rmtree(folder / "checkpoints" / f"step-{last:06d}")  # the only trace there may be
    check_same(folder, tmp_path / "there" / "whole")


@pytest.mark.slow
def test_killed_again_and_again_at_random(tmp_path: Path) -> None:
    """Eight kills; the script does fifty by default."""
    script = Path(__file__).parents[2] / "benchmarks" / "random_kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "8", "--steps", "16", "--folder", tmp_path / "kills"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 kills of" in done.stdout
    assert "equal: metrics" in done.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_drops_the_step(tmp_path: Path) -> None:
    """A step of many seconds; the first Ctrl-C waits for its end, the second does not."""
    settings = [*SMALL, "--set", "sampling.prompts=256", "--set", "sampling.samples=64"]
    process = start(tmp_path, *settings, "--set", "evaluation.every=0", "--name", "a")
    folder = tmp_path / "runs" / "a"
    wait_until(process, (folder / "env.json").exists)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    first = ""
    while "once more" not in first:
        first = process.stderr.readline()
        assert first, "the step was over too soon, or the signal came too early"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert summary(folder)["status"] == "KILLED"
    assert steps_of(folder) == 0
    assert not (folder / "checkpoints").exists()
    assert "continue with: bandpo train --resume a" in out


@pytest.mark.slow
def test_a_signal_while_loading_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, *SMALL, "--name", "a")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("evaluation"):  # the statement's last line; then it loads
        pass
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM), out + err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_failed_run_prints_the_resume_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second checkpoint: the first one stays, and the run resumes from it."""
    import bandpo_cli.training.components as checkpoint

    usage = shutil.disk_usage(tmp_path)
    free = iter([usage.free, 0])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
        done: Done = bandpo("train", "--steps", "6", *SMALL, "--name", "a", cwd=tmp_path)
    assert done.code == 1
    assert "error: no room for the checkpoint of step-000004" in done.err
    assert len(done.err.splitlines()) == 1
    assert "continue with: bandpo train --resume a" in done.out
    folder = tmp_path / "runs" / "a"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert summary(folder)["status"] == "FAILED"
    good("train", "--resume", "a", cwd=tmp_path)
    assert [line["step"] for line in record(folder)] == [0, 1, 2, 3, 4, 5, 6]
