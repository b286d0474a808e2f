"""Folder of an experiment for verl: run.sh, reward.py, README.md, and the formatting of values for Hydra."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo_cli.config.layers import flatten
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.exports.verl_rules import InFolder, Overrides, longest_row, tokens_per_micro_batch
from bandpo_cli.exports.verl_settings import RULES

VERL_VERSION = "0.9.1"
"""The version whose settings, defaults and losses the export is written for."""

TRAIN_FILE, HELDOUT_FILE = "train.parquet", "heldout.parquet"
REWARD_FILE, CONFIG_FILE = "reward.py", "config.yaml"

_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_RESERVED = {"true", "false", "null", "nan", "inf", "none"}


@dataclass(frozen=True)
class Machines:
    """The number of machines of a job, and the number of GPUs of each."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs of all machines."""
        return self.nodes * self.gpus_per_node


def batch_arithmetic(config: RunConfig, machines: Machines, problems: int) -> list[str]:
    """Return the numbers of prompts, completions and updates per step and GPU, one line each.

    Raises:
        ConfigError: verl needs a number to be divisible and it is not, or has no complete batch of problems.
    """
    prompts, samples, updates = config.sampling.prompts, config.sampling.samples, config.optim.updates
    parallel = config.sampling.vllm.tensor_parallel
    per_update = prompts // updates * samples
    if problems < prompts:
        raise ConfigError(
            f"sampling.prompts = {prompts}: there are {problems:,} training problems, and verl drops a batch that is "
            "not complete; take fewer prompts"
        )
    if machines.gpus % parallel:
        raise ConfigError(
            f"sampling.vllm.tensor_parallel = {parallel} does not divide the {machines.gpus} GPUs of the job"
        )
    if per_update % machines.gpus:
        raise ConfigError(
            f"an update has {prompts} / {updates} × {samples} = {per_update:,} completions (sampling.prompts / "
            f"optim.updates × sampling.samples), and verl needs a multiple of the {machines.gpus} GPUs"
        )
    longest, tokens = longest_row(config), tokens_per_micro_batch(config)
    return [
        f"per step: {prompts:,} prompts × {samples} completions = {prompts * samples:,} completions; GPUs: "
        f"{machines.gpus}, vLLM engines: {machines.gpus // parallel}",
        f"per update ({updates} per step): {per_update:,} completions, {per_update // machines.gpus:,} per GPU",
        f"per micro-batch and GPU: at most {tokens:,} tokens; a prompt and its completion have at most {longest:,}",
        f"per pass over the {problems:,} training problems: {problems // prompts:,} steps",
    ]


def run_script(overrides: Overrides, uri: str | None, external_modules: Sequence[str], mlflow: bool) -> str:
    """Return run.sh.

    Args:
        overrides: verl's settings.
        uri: MLflow server or store; None for a file in the folder. The environment variable comes first.
        external_modules: modules that each process of verl imports.
        mlflow: the job sends metrics to MLflow.
    """
    variables, lines = [], []
    if external_modules:
        variables.append("VERL_USE_EXTERNAL_MODULES")
        lines.append(f"export VERL_USE_EXTERNAL_MODULES={shlex.quote(','.join(external_modules))}")
    if mlflow:
        variables.append("MLFLOW_TRACKING_URI")
        default = '"sqlite:///$HERE/mlflow.db"' if uri is None else shlex.quote(uri)
        lines.append(f"DEFAULT_URI={default}")
        lines.append('export MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-$DEFAULT_URI}"')
    arguments = [_argument(key, value) for key, value in overrides.items()]
    # Workers on other machines do not inherit the environment of this script.
    arguments += [
        f'"+ray_kwargs.ray_init.runtime_env.env_vars.{name}=$(quoted "${name}")"' for name in variables
    ]
    body = " \\\n  ".join(["python3 -m verl.trainer.main_ppo", *arguments, '"$@"'])
    header = f"""#!/usr/bin/env bash
# Runs the experiment of config.yaml on verl {VERL_VERSION}. Arguments are further overrides.
set -euo pipefail
HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
"""
    quoted = r"""quoted() { printf "'%s'" "${1//\'/\\\'}"; }  # a text in the syntax of Hydra's overrides"""
    return header + "\n".join([quoted, *lines, body, ""])


REWARD_MODULE = '''"""Reward function of this experiment: the graders and rewards of config.yaml."""

from pathlib import Path

from bandpo_cli.exports.verl_reward import load_reward_function

compute_score = load_reward_function(Path(__file__).with_name("config.yaml"))
'''


def readme(
    config: RunConfig, overrides: Overrides, differences: Sequence[str], arithmetic: Sequence[str]
) -> str:
    """Return README.md: how to run the folder, what differs, the batches, and each setting."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("bandpo_cli.exports"),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    settings = [
        (key, value, rule.describe())
        for key, value in flatten(config.model_dump(mode="json")).items()
        for name, rule in RULES.items()
        if key == name or key.startswith(f"{name}.")
    ]
    return environment.get_template("README.md").render(
        method=config.bounds.describe(),
        version=VERL_VERSION,
        arithmetic=arithmetic,
        differences=differences,
        settings=settings,
        overrides=[(key.removeprefix("+"), hydra_value(value)) for key, value in overrides.items()],
    )


def _argument(key: str, value: Any) -> str:
    """Return an override as a word of the shell."""
    if isinstance(value, InFolder):
        return f'"{key}=$(quoted "$HERE/{value}")"'
    return shlex.quote(f"{key}={hydra_value(value)}")


def hydra_value(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides, from which it is read back unchanged."""
    if value is None or isinstance(value, bool | int | float):
        return "inf" if value == math.inf else json.dumps(value)
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
            return value
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(hydra_value, value)) + "]"
