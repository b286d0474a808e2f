"""Settings of the Band in TRL: defaults, refusals, warnings."""

import dataclasses
import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import HfArgumentParser

from bandpo_cli.methods.settings import BandSettings
from bandpo_cli.settings_validation import trainer_keys
from tests.exports.test_from_trainers import BATCHES
from tests.integrations.batches import trl_config

REPEATED = {"num_iterations": 2}
"""Two optimizer steps per batch, so that the ratio differs from 1."""


def config(band: ModuleType, folder: Path, **settings: Any) -> Any:
    return trl_config(band.BandGRPOConfig, folder, **settings)


def test_defaults_are_those_of_the_runner_and_settings_are_flags(band, tmp_path):
    """TRL's parser of flags and YAML files is a subclass of this one."""
    runner, args = BandSettings(), config(band, tmp_path, **REPEATED)
    expected = runner.divergence, runner.delta, runner.max_ratio
    assert (args.band_divergence, args.band_delta, args.band_max_ratio) == expected
    flags = f"--output_dir {tmp_path} --use_cpu True --bf16 False --num_iterations 2 --band_divergence js"
    (args,) = HfArgumentParser(band.BandGRPOConfig).parse_args_into_dataclasses(
        [*flags.split(), "--band_delta", "0.1", "--band_max_ratio", "4"]
    )
    assert (args.band_divergence, args.band_delta, args.band_max_ratio) == ("js", 0.1, 4.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"band_delta": 0.0}, r"band_delta=0\.0.*delta must be a finite number > 0"),
        ({"band_delta": float("nan")}, "delta must be a finite number > 0"),
        ({"band_max_ratio": 1.0}, r"band_max_ratio=1\.0.*max_ratio must be a number > 1 or None"),
        ({"band_divergence": "kll"}, r"band_divergence='kll'.*did you mean 'kl'"),
        ({"loss_type": "cispo"}, "loss_type='cispo'.*set loss_type to one of grpo, bnpo, dr_grpo, dapo"),
        ({"importance_sampling_level": "sequence"}, "set importance_sampling_level='token'"),
        ({"epsilon": 0.1}, r"epsilon=0\.1.*leave it out"),
        ({"epsilon_high": 0.28}, r"epsilon_high=0\.28.*leave it out"),
        ({"delta": 4.0}, r"delta=4\.0.*set band_max_ratio \(now 10\.0\) to less"),
        ({"delta": 4.0, "band_max_ratio": None}, r"delta=4\.0.*band_max_ratio \(now None\)"),
    ],
)
def test_settings_that_exclude_the_band_are_refused(band, tmp_path, settings, message):
    with pytest.raises(band.ConfigError, match=message):
        config(band, tmp_path, **REPEATED | settings)


def test_clipped_losses_and_a_wide_delta_are_accepted(band, tmp_path):
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        args = config(band, tmp_path, **REPEATED, loss_type=loss_type, delta=4.0, band_max_ratio=3.0)
        assert args.delta == 4.0


@pytest.mark.parametrize(
    ("settings", "one_update"),
    [
        ({}, True),
        ({"gradient_accumulation_steps": 8, "steps_per_generation": 4, "num_iterations": 2}, True),
        ({"gradient_accumulation_steps": 8, "steps_per_generation": 16}, False),
        ({"gradient_accumulation_steps": 8, "num_iterations": 2}, False),
        ({"steps_per_generation": 4}, False),
    ],
)
def test_a_ratio_that_is_always_1_is_warned_about(band, tmp_path, settings, one_update):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(band, tmp_path, **settings)
    found = [str(warning.message) for warning in caught if "no bound has an effect" in str(warning.message)]
    assert len(found) == one_update
    assert all("set num_iterations to 2 or more" in message for message in found)


def test_an_older_trl_is_refused(band, monkeypatch):
    monkeypatch.setattr("trl.__version__", "1.9.2")
    with pytest.raises(ImportError, match=r"needs TRL 1\.16 or later, not 1\.9\.2"):
        importlib.reload(band)


def test_another_config_is_refused(band, tmp_path):
    plain = trl_config(importlib.import_module("trl").GRPOConfig, tmp_path)
    for args, kind in ((plain, "not GRPOConfig"), (None, "not NoneType")):
        with pytest.raises(band.ConfigError, match=f"needs args=BandGRPOConfig.*{kind}"):
            band.BandGRPOTrainer("model", [], args)


@pytest.mark.parametrize(("given", "prompts", "updates"), BATCHES)
def test_translated_batches_are_those_of_grpo_config(given, prompts, updates, tmp_path):
    """On one process; the number of processes multiplies the rows of a device."""
    trl = pytest.importorskip("trl")
    processes = given.get("num_processes", 1)
    own = {key: value for key, value in given.items() if key != "num_processes"}
    rows = own.pop("per_device_train_batch_size", 8) * processes
    args = trl_config(trl.GRPOConfig, tmp_path, **own, per_device_train_batch_size=rows)
    micro_steps = args.steps_per_generation * args.num_iterations
    batches_per_update = max(1, args.gradient_accumulation_steps // micro_steps)
    assert prompts == args.generation_batch_size * batches_per_update // args.num_generations
    assert updates == max(1, micro_steps // args.gradient_accumulation_steps)


def test_every_argument_of_trl_has_a_row_with_its_default():
    trl = pytest.importorskip("trl")
    script = importlib.import_module("trl.scripts.grpo")
    rows = trainer_keys("trl")
    classes = (trl.GRPOConfig, trl.ModelConfig, script.GRPOScriptArguments)
    defaults = {field.name: field.default for cls in classes for field in dataclasses.fields(cls)}
    assert defaults.keys() - rows.keys() == set()
    del defaults["lora_target_modules"]  # peft's, for most architectures
    ours = {name: rows[name]["default"] for name in defaults if "default" in rows[name]}
    assert ours == {name: getattr(defaults[name], "value", defaults[name]) for name in ours}
