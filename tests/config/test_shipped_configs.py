"""Shipped config files: each resolves, and those of the paper have its settings and inherit none that matters."""

from collections import Counter
from functools import reduce
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli import methods
from bandpo_cli.config.layers import flatten, merge, read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.methods import MethodEntry
from bandpo_cli.storage.sweep_folder import SweepRun
from bandpo_cli.sweeps.sweep_plan import SweepConfig, plan_runs, plan_tuned_runs

CONFIGS = Path(__file__).parents[2] / "configs"
SWEEPS = [file for file in sorted((CONFIGS / "sweeps").glob("*.yaml")) if "seeds:" in file.read_text("utf-8")]
FILES = sorted(set(CONFIGS.rglob("*.yaml")) - set(SWEEPS))
PAPER = CONFIGS / "paper"
MODELS = sorted((PAPER / "models").glob("*.yaml"))
METHODS = sorted((CONFIGS / "methods").glob("*.yaml"))


def config_of(*files: Path) -> RunConfig:
    """Return the config of these files, merged in this order."""
    return resolve(map(read_layer, files))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_each_file_resolves_and_names_its_requirements(file):
    config_of(file)
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert file.parent.name == "methods" or "Needs " in file.read_text(encoding="utf-8")


def runs_of(sweep: Path, radius: float = 0.02) -> dict[SweepRun, RunConfig]:
    """Return the runs of a sweep file.

    What is not shipped is replaced: `match:` gives `radius`, and the settings of each tuned variant are those of the
    first variant of its group.
    """
    config = SweepConfig.model_validate(read_layer(sweep))
    if config.tuned_on is None:
        return plan_runs(config, match=lambda band, method: radius)
    tuning = runs_of(CONFIGS / "sweeps" / f"{config.tuned_on}.yaml")
    assert not {run.seed for run in tuning} & set(config.seeds)
    tuned = {run.group: config.model_dump() for run, config in reversed(tuning.items())}
    return plan_tuned_runs(config, tuned)


@pytest.mark.slow
def test_the_sweeps_have_the_arms_and_runs_of_the_docs():
    planned = {file.stem: runs_of(file) for file in SWEEPS}
    assert all(len({run.name for run in runs}) == len(runs) for runs in planned.values())
    assert {name: (len({run.variant for run in runs}), len(runs)) for name, runs in planned.items()} == {
        "controls": (4, 12),
        "radius": (6, 18), "methods": (8, 24), "rare-tokens": (8, 64),
        "fair-rare-tuning": (24, 48), "fair-countdown-tuning": (12, 24),
        "fair-rare": (6, 36), "fair-countdown": (2, 12), "fair-rare-one-rate": (3, 18),
        "pretrained-tuning": (9, 9), "pretrained": (3, 15),
        "wide-ratios-tuning": (9, 9), "wide-ratios": (3, 15),
    }  # fmt: skip
    for variant, bounds in {(run.variant, config.bounds) for run, config in planned["methods"].items()}:
        shipped = CONFIGS / "methods" / f"{'band-' if bounds.method == 'band' else ''}{variant}.yaml"
        assert bounds == config_of(shipped).bounds


def test_the_tuning_sweeps_group_their_arms_by_method():
    runs = runs_of(CONFIGS / "sweeps" / "fair-rare-tuning.yaml")
    variants = {(run.group, run.variant) for run in runs}
    counts = {"clip": 3, "clip-higher": 3, "dcpo": 3, "cispo": 3, "dppo": 3, "kl": 9}
    assert Counter(group for group, _ in variants) == counts


def test_the_recorded_run_of_rare_tokens_equals_its_clip_arm_but_for_the_seed():
    """The radius is matched on the clip variant of the sweep, with a seed that the sweep does not use."""
    runs = runs_of(CONFIGS / "sweeps" / "rare-tokens.yaml")
    pilot = config_of(CONFIGS / "sweeps" / "rare-tokens-pilot.yaml")
    clip = next(config for run, config in runs.items() if run.variant == "clip")
    assert clip.model_copy(update={"seed": pilot.seed}) == pilot
    assert pilot.seed not in {run.seed for run in runs}


def test_every_method_has_a_file_with_its_published_settings_and_its_source():
    """The Band's files differ from its defaults in divergence and `relax`, that is in what their names say."""
    files = {file: config_of(file).bounds for file in METHODS}
    assert {settings.method for settings in files.values()} == set(methods.METHODS)
    for file, settings in files.items():
        entry = methods.METHODS[settings.method]
        if not entry.named_by_region:
            assert settings == settings.published(), file
            assert set(read_layer(file)["bounds"]) == settings.model_dump().keys(), file
        if entry.loss != MethodEntry.loss:
            assert entry.paper in file.read_text("utf-8").partition("\n")[0]


OVERLAYS = ((), (PAPER / "dynamic-sampling.yaml",), (PAPER / "dapo.yaml",))
"""Files on top of base.yaml and a model's file."""

NOT_COMPUTED = {
    "the hardware": """model.device model.compile model.head grading.workers grading.memory_gb sampling.engine_process
        sampling.vllm.memory_fraction sampling.vllm.kv_cache_gb sampling.vllm.sleep sampling.weight_transfer""",
    "kernels that compute the same": "deterministic",
    "the time at which the same grades are computed": "grading.while_sampling",
    "what is sent or written, when and where, and how many steps are computed": "tracking checkpoint stop",
    "metrics alone": "objective.all_token_metrics",
    "a permission": "model.trust_remote_code",
    "null; the paper does not name the commits": "model.revision",
    "for asynchronous functions, functions of lists, and the grader random":
        "grading.concurrency grading.retries grading.batch grading.coin",
    "for tools or an environment, with several turns per completion":
        "task.tools task.environment task.max_turns task.max_turn_tokens task.max_result_chars",
    "for several graders, and task.grader is stated": "task.rewards",
    "for an importance_cap": "objective.importance objective.importance_floor",
    "for an entropy_target": "objective.entropy_bonus_step objective.entropy_bonus_max",
    "where task.heldout is empty": "task.heldout_fraction",
    "none: a completion ends with its end token": "sampling.stop",
}  # fmt: skip
"""Settings, or complete sections, that do not decide what a run with task.heldout computes, by the reason."""
WITHOUT_EFFECT = tuple(f"{name}." for name in " ".join(NOT_COMPUTED.values()).split())


def stated(*files: Path) -> dict[str, Any]:
    """Return the settings that the files state, merged in this order and by dotted key."""
    return flatten(reduce(merge, map(read_layer, files), {}))


def resolved(*files: Path) -> dict[str, Any]:
    """Return all settings of the files and the defaults, as in the config.yaml of a run."""
    return flatten(resolve(map(read_layer, files)).model_dump(mode="json"))


COMBINATIONS = [
    *((PAPER / "base.yaml", model, *overlay) for model, overlay in product(MODELS, OVERLAYS)),
    *((PAPER / "base.yaml", model, method) for model, method in zip(cycle(MODELS), METHODS, strict=False)),
    (PAPER / "base.yaml", PAPER / "models" / "r1-distill-qwen-7b.yaml", PAPER / "lora-7b.yaml"),
]


@pytest.mark.parametrize("files", COMBINATIONS, ids=lambda files: "+".join(file.stem for file in files))
def test_no_setting_that_decides_what_is_computed_is_a_default(files):
    defaults = resolved(*files).keys() - stated(*files).keys()
    assert [key for key in defaults if not f"{key}.".startswith(WITHOUT_EFFECT)] == []


def test_the_settings_without_effect_exist():
    keys = resolved(PAPER / "base.yaml", MODELS[0])
    assert [name for name in WITHOUT_EFFECT if not any(f"{key}.".startswith(name) for key in keys)] == []


PAPER_SETTINGS = {
    "steps": 1020, "task.template": "answer-line", "reward.correct": 1.0, "reward.wrong": -1.0,
    "bounds.method": "band", "bounds.divergence": "kl", "bounds.delta": 0.05, "bounds.max_ratio": 10.0,
    "evaluation.problems": None,
}  # fmt: skip
"""tests/exports compares the settings that verl has, too, with those of the authors' script."""


def test_settings_of_the_paper():
    settings = resolved(PAPER / "base.yaml")
    assert {key: settings[key] for key in PAPER_SETTINGS} == PAPER_SETTINGS
    sources = [(source["name"] or source["path"], source["levels"]) for source in settings["task.train"]]
    assert sources == [("dapo-math-17k", None), ("nlile/hendrycks-MATH-benchmark", [3, 4, 5])]
    assert [source["name"] for source in settings["task.heldout"]] == ["aime24", "aime25", "amc23"]


def test_the_protocol_of_mathematics_evaluates_on_six_competitions():
    """avg@32 of each, over all of its problems; docs/data.md names the sources of the other values."""
    config = config_of(CONFIGS / "math" / "protocol.yaml", CONFIGS / "math" / "qwen3-4b-base.yaml")
    names = [source.name for source in config.task.heldout]
    assert names == ["aime24", "aime25", "aime26", "amc23", "hmmt25", "brumo25"]
    assert (config.evaluation.samples, config.evaluation.problems) == (32, None)
    assert config.sampling.prompts * config.sampling.samples == 4 * 256
    assert config.sampling.max_prompt_tokens + config.sampling.max_tokens == 8192
