"""Helpers that write small run folders and sweeps in the format of `bandpo train` and `bandpo sweep`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.reports.compare_variants import Report
from bandpo_cli.reports.run_variants import Selection, VariantRun, read_sweep
from bandpo_cli.reports.write_report import write_report
from bandpo_cli.storage.run_folder import RunFolder, slug

CLIP, KL = ("bounds.method=clip",), ("bounds.divergence=kl", "bounds.delta=0.05")


def write_run(
    folder: Path,
    settings: Iterable[str] = CLIP,
    seed: int = 0,
    accuracy: Mapping[int, float] | None = None,
    steps: int = 4,
    sets: Iterable[str] = ("countdown",),
    status: str | None = "FINISHED",
    reward: Mapping[int, float] | None = None,
    **record: Any,
) -> Path:
    """Write a run with an evaluation at each step of `accuracy`, and its mean `reward`; `record` is added to the record
    of every step.
    """
    accuracy = {0: 0.2, steps: 0.4} if accuracy is None else accuracy
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = RunFolder.create(folder.parent, folder.name)
    run.write_config(to_yaml(resolve([read_assignments([f"seed={seed}", f"steps={steps}", *settings])])))
    for step in range(steps + 1):
        line = {"step": step}
        if step:
            line |= {
                "train/entropy": 0.5 - 0.05 * step, "clip/active_fraction": 0.02,
                "clip/active_fraction/p_0.1_0.5": 0.1, "clip/token_share/p_0.1_0.5": 0.2,
                "clip/active_fraction/p_0.9_1": 0.0, "clip/token_share/p_0.9_1": 0.8,
                "time/step": 1.75, "time/checkpoint": 0.25, "time/eval": 0.25,
            }  # fmt: skip
            line |= record
        for label in sets if step in accuracy else ():
            value = accuracy[step]
            line |= {f"eval/{label}/mean_at_16": value, f"eval/{label}/pass_at_4": value + 0.1}
            line |= {} if reward is None else {f"eval/{label}/reward": reward[step]}
            line |= {f"eval/{label}/pass_at_16": value + 0.3, f"eval/{label}/maj_at_16": value}
        run.append_metrics(line)
    if status is not None:
        error = None if status == "FINISHED" else "NonFiniteError: the loss is nan"
        run.write_summary({"status": status, "error": error, "steps": steps})
    return folder


def write_sweep(folder: Path, finals: Mapping[str, Mapping[int, float]]) -> Path:
    """Write a sweep with these final accuracies by variant and seed. The variant `clip` uses clip, others are Bands."""
    runs = []
    for index, (variant, by_seed) in enumerate(finals.items()):
        band = ("bounds.divergence=kl", f"bounds.delta={0.01 * (index + 1)}")
        settings = CLIP if variant == "clip" else band
        for seed, final in by_seed.items():
            name = f"{variant.replace(' ', '-')}-s{seed}"
            write_run(folder / name, settings, seed, {0: 0.2, 4: final})
            runs.append({"name": name, "variant": variant, "seed": seed})
    write_plan(folder, {"name": folder.name, "baseline": "clip", "axes": "ignored", "runs": runs})
    return folder


def write_variant(
    place: Path, variant: str, settings: Iterable[str] = CLIP, seed: int = 0, **run: Any
) -> VariantRun:
    """Write a run of a variant to a folder in `place`."""
    return VariantRun(variant, seed, write_run(place / slug(f"{variant}-{seed}"), settings, seed, **run))


def report_on(runs: Iterable[VariantRun], place: Path, baseline: str | None = None, **options: Any) -> Report:
    """Write the report of runs to the folder `out` in `place`."""
    return write_report(Selection("t", baseline, [*runs]), place / "out", **options)


def report_of(folder: Path, out: Path | None = None, fit: bool = False, **changes: Any) -> Report:
    """Write the report of a sweep, with changes of its selection."""
    return write_report(replace(read_sweep(folder), **changes), out or folder / "report", fit=fit)


def write_plan(folder: Path, plan: Any) -> None:
    """Write `plan` to the `sweep.yaml` of `folder`."""
    (folder / "sweep.yaml").write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")


def edit_line(folder: Path, number: int, **changes: Any) -> None:
    """Change values in line `number` of the metrics.jsonl of a run."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
