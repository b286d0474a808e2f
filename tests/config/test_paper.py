"""Configs of the paper: nothing that decides what is computed is inherited from the defaults."""

from __future__ import annotations

from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import Layer, flatten, merge, read_layer, resolve

ROOT = Path(__file__).parents[2]
PAPER, METHOD_FILES = ROOT / "configs" / "paper", sorted((ROOT / "configs" / "methods").glob("*.yaml"))
MODELS = sorted((PAPER / "models").glob("*.yaml"))
OVERLAYS = ((), (PAPER / "dynamic-sampling.yaml",), (PAPER / "dapo.yaml",))
"""Files on top of base.yaml and a model's file."""

NOT_COMPUTED = {
    "tracking": "what is sent where",
    "checkpoint": "when the state is written",
    "model.device": "the hardware",
    "model.trust_remote_code": "a permission",
    "model.revision": "null; the paper does not name the commits",
    "grading.workers": "the hardware",
    "grading.memory_gb": "the hardware",
    "grading.batch": "used only by functions that take lists",
    "grading.while_sampling": "when the same grades are computed",
    "task.rewards": "used only with several graders, and task.grader is stated",
    "objective.importance": "used only with an importance_cap",
    "objective.importance_floor": "used only with an importance_cap",
    "objective.all_token_metrics": "metrics alone",
    "sampling.vllm.memory_fraction": "the hardware",
    "sampling.vllm.kv_cache_gb": "the hardware; only on a CPU",
    "sampling.vllm.sleep": "the hardware",
    "sampling.weight_transfer": "the hardware; only with sampling.max_lag",
    "task.heldout_fraction": "used only where task.heldout is empty",
}
"""Settings, or complete sections, that do not decide what a run with task.heldout computes, with the reason."""


@cache
def layer(file: Path) -> Layer:
    """Return the settings of a file; read once, because YAML is slow."""
    return read_layer(file)


def stated(*files: Path) -> dict[str, Any]:
    """Return the settings that the files state, merged in this order and by dotted key."""
    return flatten(reduce(merge, map(layer, files), {}))


def resolved(*files: Path) -> dict[str, Any]:
    """Return all settings of the files and the defaults, as in the config.yaml of a run."""
    return flatten(resolve(map(layer, files)).model_dump(mode="json"))


def without_effect(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_COMPUTED)


COMBINATIONS = [
    *((PAPER / "base.yaml", model, *overlay) for model, overlay in product(MODELS, OVERLAYS)),
    *((PAPER / "base.yaml", MODELS[0], method) for method in METHOD_FILES),
    (PAPER / "base.yaml", PAPER / "models" / "r1-distill-qwen-7b.yaml", PAPER / "lora-7b.yaml"),
]


@pytest.mark.parametrize("files", COMBINATIONS, ids=lambda files: "+".join(file.stem for file in files))
def test_no_setting_that_decides_what_is_computed_is_a_default(files: tuple[Path, ...]) -> None:
    present = stated(*files)
    assert [key for key in resolved(*files) if key not in present and not without_effect(key)] == []


def test_the_settings_without_effect_exist() -> None:
    keys = resolved(PAPER / "base.yaml", MODELS[0])
    assert [name for name in NOT_COMPUTED if not any(f"{key}.".startswith(f"{name}.") for key in keys)] == []


def test_an_overlay_states_only_what_differs_from_the_base() -> None:
    base = stated(PAPER / "base.yaml")
    same = {"sampling.dynamic_batches"}  # stated again, because it has an effect there
    for files in OVERLAYS:
        repeated = {
            key for file in files for key, value in stated(file).items() if base.get(key, "none") == value
        }
        assert repeated <= same
