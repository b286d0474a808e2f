"""Configs of the paper: nothing is inherited from the defaults, docs/paper.md has every value, and headers are true."""

from __future__ import annotations

import json
import re
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from bandpo_cli.config.layers import Layer, flatten, merge, read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.experiments.memory import memory_report_on
from bandpo_cli.models.memory import MemoryEstimate

ROOT = Path(__file__).parents[2]
PAPER, METHOD_FILES = ROOT / "configs" / "paper", sorted((ROOT / "configs" / "methods").glob("*.yaml"))
MODELS = sorted((PAPER / "models").glob("*.yaml"))
OVERLAYS = {
    "Settings": (),
    "With dynamic sampling": (PAPER / "dynamic-sampling.yaml",),
    "DAPO": (PAPER / "dapo.yaml",),
}
"""Sections of docs/paper.md with the files that they describe, on top of base.yaml and a model's file."""

NOT_COMPUTED = {
    "tracking": "what is sent where",
    "checkpoint": "when the state is written",
    "model.device": "the hardware",
    "model.trust_remote_code": "a permission",
    "model.revision": "null; the paper does not name the commits",
    "grading.workers": "the hardware",
    "grading.memory_gb": "the hardware",
    "grading.batch": "used only by functions that take lists",
    "task.rewards": "used only with several graders, and task.grader is stated",
    "objective.importance": "used only with an importance_cap",
    "objective.importance_floor": "used only with an importance_cap",
    "sampling.vllm.memory_fraction": "the hardware",
    "sampling.vllm.kv_cache_gb": "the hardware; only on a CPU",
    "sampling.vllm.sleep": "the hardware",
    "task.heldout_fraction": "used only where task.heldout is empty",
}
"""Settings, or complete sections, that do not decide what a run with task.heldout computes, with the reason."""


@cache
def layer(file: Path) -> Layer:
    """Return the settings of a file; read once, because YAML is slow."""
    return read_layer(file)


def stated(*files: Path) -> dict[str, Any]:
    """Return the settings that the files state, merged in this order and by dotted key."""
    return flatten(reduce(lambda base, over: merge(base, over, RunConfig), map(layer, files), {}))


def resolved(*files: Path) -> dict[str, Any]:
    """Return all settings of the files and the defaults, as in the config.yaml of a run."""
    return flatten(resolve(map(layer, files)).model_dump(mode="json"))


def without_effect(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_COMPUTED)


COMBINATIONS = [
    *((PAPER / "base.yaml", model, *overlay) for model, overlay in product(MODELS, OVERLAYS.values())),
    *((PAPER / "base.yaml", MODELS[0], method) for method in METHOD_FILES),
]


@pytest.mark.parametrize("files", COMBINATIONS, ids=lambda files: "+".join(file.stem for file in files))
def test_no_setting_that_decides_what_is_computed_is_a_default(files: tuple[Path, ...]) -> None:
    present = stated(*files)
    assert [key for key in resolved(*files) if key not in present and not without_effect(key)] == []


def test_the_settings_without_effect_exist() -> None:
    keys = resolved(PAPER / "base.yaml", MODELS[0])
    assert [name for name in NOT_COMPUTED if not any(f"{key}.".startswith(f"{name}.") for key in keys)] == []


def table(heading: str) -> dict[str, Any]:
    """Return the last two columns of the table below a heading of docs/paper.md: key and value."""
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line[1:-1].split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    header, _, *body = rows
    assert [cell.strip("` ") for cell in header[-2:]] == ["key here", "value here"]
    assert {len(row) for row in body} == {5}
    return {row[3].strip("`"): yaml.safe_load(row[4].strip("` ")) for row in body}


@pytest.mark.parametrize("heading", OVERLAYS)
def test_values_of_the_documentation_are_those_of_the_files(heading: str) -> None:
    documented, files = table(heading), stated(PAPER / "base.yaml", MODELS[0], *OVERLAYS[heading])
    assert {key: files.get(key, "not stated") for key in documented} == documented


def test_the_documentation_has_every_setting_that_the_files_state() -> None:
    base = {key for key in stated(PAPER / "base.yaml") if not without_effect(key)}
    assert base - set(table("Settings")) == set()
    for heading, files in OVERLAYS.items():
        if files:
            assert set(stated(*files)) == set(table(heading))


def test_an_overlay_states_only_what_differs_from_the_base() -> None:
    base = stated(PAPER / "base.yaml")
    same = {"sampling.dynamic_batches"}  # stated again, because it has an effect there
    for files in OVERLAYS.values():
        repeated = {
            key for file in files for key, value in stated(file).items() if base.get(key, "none") == value
        }
        assert repeated <= same


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The shapes in the config.json of each model on the hub."""

PARAMETERS = {"3B": 3.09e9, "1.5B": 1.78e9, "7B": 7.62e9, "8B": 8.03e9}
"""The numbers of parameters on the models' cards."""

GPU_SIZES = [16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288]
GIB = 2**30


@pytest.mark.parametrize("model", MODELS, ids=lambda file: file.stem)
def test_the_header_of_a_model_names_the_smallest_gpu_that_fits(tmp_path: Path, model: Path) -> None:
    """The GB of a GPU count as 10⁹ bytes, less than any card of that size has."""
    header = re.match(
        r"# Needs one GPU of (\d+) GB: (\d+) GiB at the peak, of which .* take (\d+) GiB\.\n",
        model.read_text("utf-8"),
    )
    assert header is not None
    size, peak, held = map(int, header.groups())
    path = layer(model)["model"]["path"]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES[path], "max_position_embeddings": 32768}))
    config = resolve([*map(layer, (PAPER / "base.yaml", model)), {"model": {"path": str(tmp_path)}}])
    report = memory_report_on(config, "a GPU", size * 10**9, on_gpu=True)
    estimate = report.estimate
    count = next(number for name, number in PARAMETERS.items() if f"-{name}" in path)
    assert estimate.parameters == pytest.approx(count, rel=0.005)
    assert report.fits
    assert round(report.peak / GIB) == peak
    assert round(sum(estimate.always.values()) / GIB) == held
    assert report.engine > 1.5 * estimate.always["weights"]  # the engine's weights, and room for its cache
    assert not fits(config, estimate, GPU_SIZES[GPU_SIZES.index(size) - 1] * 10**9)
    assert fits(config, estimate, size * 10**9)


def fits(config: RunConfig, estimate: MemoryEstimate, available: int) -> bool:
    """Return whether a run fits, by hand: the trainer's memory, and an update or the engine, leave 5% free."""
    engine = config.sampling.vllm.memory_fraction * available
    used = sum(estimate.always.values()) + max(sum(estimate.update.values()), engine)
    return used < 0.95 * available
