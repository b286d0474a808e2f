"""Exports: the folder with which verl runs a configuration, and a run's policy as a plain model folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from bandpo_cli.config.hardware import with_dtype
from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments.memory import out_of_memory_errors
from bandpo_cli.experiments.preflight import (
    ModelRef,
    check_embedded_task,
    check_graders,
    check_is_no_adapter,
    check_model_path,
    resolve_model,
)
from bandpo_cli.exports import verl_files
from bandpo_cli.exports.verl_rules import MODEL, InFolder, Overrides, is_copied
from bandpo_cli.exports.verl_settings import differences_of, is_runnable, overrides_of
from bandpo_cli.grading.pool import check_grader
from bandpo_cli.paths import is_adapter_folder, path_exists, user_path
from bandpo_cli.storage.files import apply_umask, export_folder, sync, write_text
from bandpo_cli.tasks.task import build_task
from bandpo_cli.types import Problem

VERL_MODULE = "bandpo_cli.integrations.verl"
"""The module that verl imports for the policy loss `band`."""


@dataclass(frozen=True)
class VerlExport:
    """An exported experiment.

    Attributes:
        folder: the folder that was written.
        overrides: verl's settings in run.sh.
        differences: what verl computes differently, one line each.
        arithmetic: the batches, one line each.
        notes: remarks of the task, one line each.
        problems: number of training problems.
        heldout: number of held-out problems.
    """

    folder: Path
    overrides: Overrides
    differences: Sequence[str]
    arithmetic: Sequence[str]
    notes: Sequence[str]
    problems: int
    heldout: int


def export_verl(
    config: RunConfig,
    out: Path | str,
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    allow_differences: bool = False,
) -> VerlExport:
    """Write the folder with which verl runs the experiment: run.sh, data, reward function, README.md.

    The folder is either complete or absent.

    Args:
        config: the experiment.
        out: the folder; it must not exist.
        nodes: number of machines.
        gpus_per_node: GPUs of each machine.
        allow_differences: export settings that verl computes differently, with verl's own; README.md lists them.

    Raises:
        ConfigError: verl cannot run the configuration, or computes something differently and that is not allowed.
        UserError: the folder exists, or cannot be written.
    """
    out = Path(out)
    config = with_dtype(config, on_gpu=True)
    if path_exists(out):
        raise UserError(
            f"--out {out}: it exists already, and an export overwrites nothing; name another folder"
        )
    differences = differences_of(config)
    if not is_runnable(config):
        raise ConfigError(f"verl cannot run this configuration: {'; '.join(differences)}")
    if differences and not allow_differences:
        raise ConfigError(
            f"verl would compute this experiment differently: {'; '.join(differences)}. Change these settings, or "
            "accept the differences with --allow-differences"
        )
    check_model_path(config.model.path)
    check_is_no_adapter(config.model.path)
    check_embedded_task(config, f"task.name = {config.task.name!r}")
    task = build_task(config.task)
    training, sets = task.train_problems(), task.heldout_sets()
    heldout = {label: problems[: config.evaluation.problems] for label, problems in sets.items()}
    arithmetic = verl_files.batch_arithmetic(config, nodes * gpus_per_node, len(training))
    check_graders(chain(training, *heldout.values()))
    for reward in config.task.rewards or ():
        if reward.grader is not None:
            check_grader(reward.grader)
    template = verl_files.chat_template(config, training)
    overrides = {
        **overrides_of(config),
        f"{MODEL}.custom_chat_template": template,
        "data.train_files": InFolder(verl_files.TRAIN_FILE),
        "data.val_files": InFolder(verl_files.HELDOUT_FILE),
        "reward.custom_reward_function.path": InFolder(verl_files.REWARD_FILE),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.experiment_name": out.name,
        "trainer.default_local_dir": InFolder("checkpoints"),
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": gpus_per_node,
    }
    by_source: dict[str, list[Problem]] = {}
    for problem in training:
        by_source.setdefault(problem.source, []).append(problem)
    join = template is not None
    with export_folder(out) as folder:
        verl_files.write_problems(folder / verl_files.TRAIN_FILE, "train", by_source, join)
        verl_files.write_problems(folder / verl_files.HELDOUT_FILE, "test", heldout, join)
        modules = [VERL_MODULE] if config.bounds.method == "band" else []
        script = verl_files.run_script(overrides, config.tracking.uri, modules, config.tracking.mlflow)
        write_text(folder / "run.sh", script).chmod(0o755)
        write_text(folder / verl_files.CONFIG_FILE, to_yaml(config))
        write_text(folder / verl_files.REWARD_FILE, verl_files.REWARD_MODULE)
        write_text(folder / "README.md", verl_files.readme(config, overrides, differences, arithmetic))
        if is_copied(config):
            verl_files.copy_embedded_model(folder / "model")
    return VerlExport(
        folder=out,
        overrides=overrides,
        differences=differences,
        arithmetic=arithmetic,
        notes=task.notes(),
        problems=len(training),
        heldout=sum(map(len, heldout.values())),
    )


def export_merged(model: str, out: Path | str, runs_dir: Path | str = "runs") -> Path:
    """Write a model folder that transformers and vLLM load: the policy of a run, or a model with an adapter.

    Adapters are merged into the weights as they are for the sampler during training. Of a run that trains all weights,
    the files of the checkpoint are copied. The folder is either complete or absent.

    Args:
        model: a run (NAME or NAME@STEP), or an adapter folder in the format of peft.
        out: the folder; it must not exist.
        runs_dir: the folder of run folders.

    Raises:
        UserError: there is no such run or folder, the adapter or its base model cannot be loaded, or `out` exists or
            cannot be written.
        RunError: there is not enough memory for the model.
    """
    out = Path(out)
    if path_exists(out) or out.is_symlink():
        raise UserError(f"--out {out}: exists already; name a new folder")
    ref = resolve_model(model, Path(runs_dir), "RUN")
    source = user_path(ref.path)
    is_adapter = is_adapter_folder(source)
    if not is_adapter and ref.run is None:
        raise UserError(
            f"RUN {model[:200]}: neither a run nor an adapter folder; name a run (or RUN@STEP), or a folder with an "
            "adapter: a complete model has nothing to merge"
        )
    with export_folder(out) as folder:
        if is_adapter:
            _write_merged(ref, source, folder)
        else:
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy2(path, folder)
        for path in folder.iterdir():
            apply_umask(path)
            sync(path)
        sync(folder)
    return out


def _write_merged(ref: ModelRef, adapter: Path, folder: Path) -> None:
    """Load the base model with its adapter on the CPU and write it to `folder`, in the dtype of the run."""
    layers = [] if ref.run is None else [read_layer(ref.run.path / "config.yaml")]
    trained = resolve(layers)
    with out_of_memory_errors(trained, training=False):
        from bandpo_cli.models.load import load_policy, save_policy

        overrides = {
            "path": str(adapter),
            "revision": None,
            "device": "cpu",
            "attention": "auto",
            "lora": None,
        }
        settings = trained.model.model_copy(update=overrides)
        if ref.run is None:
            settings = settings.model_copy(update={"dtype": _stored_dtype(settings, adapter)})
        save_policy(load_policy(settings, for_training=False), folder)


def _stored_dtype(settings: ModelConfig, adapter: Path) -> Literal["float32", "bfloat16"]:
    """Return the dtype in which the base model of an adapter is stored; float32 for any but bfloat16."""
    from bandpo_cli.models.adapter_files import base_config
    from bandpo_cli.models.load import read_config

    dtype = read_config(base_config(settings, adapter)).dtype
    return "bfloat16" if str(dtype) == "torch.bfloat16" else "float32"
