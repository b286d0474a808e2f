"""Which files of a run folder go to MLflow beside the numbers."""

from __future__ import annotations

from pathlib import Path

from bandpo_cli.tracking.run_folder import step_of

FILES = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")
MAX_SAMPLE_FILES = 20


def run_artifacts(folder: Path) -> list[Path]:
    """Return the files of the run in `folder` that MLflow is to have; checkpoints and token tables stay here.

    They are the record's own files, the evaluations, the plots and the completions. Of more than 20 files of
    completions only those of the first, the last and the evaluated steps go, and of these the latest 20.
    """
    files = [folder / name for name in FILES if (folder / name).is_file()]
    evaluations = sorted((folder / "evals").glob("step-*.json"))
    plots = sorted((folder / "plots").glob("*.png"))
    return files + evaluations + plots + _samples(folder, {step_of(path) for path in evaluations})


def _samples(folder: Path, evaluated: set[int | None]) -> list[Path]:
    samples = sorted((folder / "samples").glob("step-*.parquet"))
    if len(samples) <= MAX_SAMPLE_FILES:
        return samples
    chosen = [path for path in samples[1:-1] if step_of(path) in evaluated][2 - MAX_SAMPLE_FILES :]
    return [samples[0], *chosen, samples[-1]]
