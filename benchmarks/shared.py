"""Helpers that several benchmarks share: command lines, random models, and runs of `bandpo` compared in rounds."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
"""Lines of metrics.jsonl."""


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help text is the docstring of a script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def seconds_of(action: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def random_qwen2(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, key_value_heads: int, **settings: Any
) -> Any:
    """Return a Qwen2 with random weights in float32 and tied embeddings."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        tie_word_embeddings=True,
        **settings,
    )
    return Qwen2ForCausalLM(shape).eval()


def save_random_model(folder: Path, *shape: int) -> None:
    """Write `random_qwen2(*shape)` with the tokenizer of the bundled model; its completions seldom end early."""
    from dataclasses import replace

    from bandpo_cli.config.run import ModelConfig
    from bandpo_cli.models.load import load_policy, save_policy

    bundled = load_policy(ModelConfig())
    model = random_qwen2(*shape, eos_token_id=bundled.stop_ids[0], pad_token_id=bundled.pad_id)
    save_policy(replace(bundled, model=model), folder)


def bandpo(*words: str, **environment: str) -> str:
    """Run the command line in a process of its own and return its output; end this program if the command fails."""
    command = [sys.executable, "-m", "bandpo_cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def train(*words: str, steps: int, **environment: str) -> Records:
    """Run `bandpo train` and return the metrics of the first `steps` steps.

    One more step is trained, because the last step of a run writes a checkpoint and samples nothing ahead.
    """
    with tempfile.TemporaryDirectory(prefix="bandpo-benchmark-") as folder:
        settings = ("--set", "evaluation.every=0", "--set", "checkpoint.every=0", "--no-mlflow")
        place = ("--runs-dir", folder, "--name", "run", "--steps", str(steps + 1))
        bandpo("train", *words, *settings, *place, **environment)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if 1 <= record["step"] <= steps]


def content_of_run(folder: Path) -> dict[str, Any]:
    """Return what a resume must reproduce: the metrics without the clock, and the bytes of the other files, by part."""
    from bandpo_cli.metric_names import without_clock

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    content: dict[str, Any] = {"metrics": [without_clock(json.loads(line)) for line in lines]}
    for part in ("samples", "tokens", "evals", "checkpoints"):
        paths = [path for path in (folder / part).rglob("*") if path.is_file()]
        content[part] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return content


def compare_runs(
    title: str,
    variants: Mapping[str, Callable[[], Records]],
    rounds: int,
    uncounted: int,
    columns: Sequence[str],
) -> None:
    """Train two variants in turn, so that a busy machine slows both, and print the medians of their steps.

    Args:
        variants: by name, what trains the first steps of a run and returns their metrics.
        uncounted: first steps of every run that do not count.
        columns: metrics of the table.
    """
    counted: dict[str, Records] = {name: [] for name in variants}
    ratios = []
    for number in range(rounds):
        seconds = {}
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            records = variants[name]()[uncounted:]
            counted[name] += records
            seconds[name] = statistics.median(record["time/step"] for record in records)
        first, second = (seconds[name] for name in variants)
        ratios.append(first / second)
        print(f"{title}, round {number + 1}: {first:.3f} s per step, {second:.3f} s", flush=True)
    print(f"\n{title}: {len(next(iter(counted.values())))} steps of each counted; medians")
    names = [column.removeprefix("time/") for column in columns]
    print(f"{'':22}" + "".join(f"{name:>{len(name) + 6}}" for name in names))
    for name, records in counted.items():
        values = (statistics.median(record.get(column, 0) for record in records) for column in columns)
        cells = zip(names, values, strict=True)
        print(f"{name:22}" + "".join(f"{value:{len(column) + 6},.3f}" for column, value in cells))
    first_name, second_name = variants
    print(
        f"steps per second, {second_name} / {first_name}: median over rounds {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )
