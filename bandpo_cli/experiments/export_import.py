"""Exchange with verl and other programs: exports of experiments and models, and the import of verl's runs.

verl 0.9.1 logs with `utils/tracking.py`; MLflow has its names with `_at_` for @. docs/metrics.md compares the metrics.
"""

import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.config.run import RunConfig, with_dtype
from bandpo_cli.errors import ConfigError, RunError, UserError, redact_credentials
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.experiments.preflight import check_graders, choose_run_name, load_task, resolve_model
from bandpo_cli.exports import verl_files, verl_settings
from bandpo_cli.exports.verl_files import CONFIG_FILE, VERL_VERSION
from bandpo_cli.exports.verl_settings import MODEL, InFolder, Overrides
from bandpo_cli.paths import is_adapter_folder, path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.results import RunOverview, describe_line
from bandpo_cli.storage.files import apply_umask, export_folder, sync, write_json, write_text
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder
from bandpo_cli.tracking.mlflow_store import mlflow_client, sqlite_path, sqlite_uri
from bandpo_cli.tracking.outages import check_reachable, short_error
from bandpo_cli.types import Problem

NAMES = {
    "critic/score/mean": "train/reward",
    "response_length/mean": "train/response_length",
    "actor/pg_clipfrac": "clip/active_fraction",
    "actor/band_upper_fraction": "clip/upper_fraction",
    "actor/band_lower_fraction": "clip/lower_fraction",
    "actor/band_outside_fraction": "clip/outside_fraction",
    "actor/grad_norm": "optim/grad_norm",
    "actor/lr": "optim/lr",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/sample",
    "timing_s/update_actor": "time/update",
    "timing_s/testing": "time/eval",
    "timing_s/save_checkpoint": "time/checkpoint",
}
"""Names here of verl's metrics that mean the same; the clipped shares are means over micro-batches there."""

TOKEN_MEANS = {"actor/entropy": "train/entropy", "actor/kl_loss": "kl/ref"}
"""Metrics that verl aggregates like the loss: the same only where that is the mean over tokens."""

_EVALUATION = re.compile(r"val-core/(.+)/acc/mean_at_(\d+)")


@dataclass(frozen=True)
class VerlExport:
    """An exported experiment.

    Attributes:
        overrides: verl's settings in run.sh.
        differences: what verl computes differently, one line each.
        arithmetic: the batches, one line each.
    """

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
        out: the folder; it must not exist.
        allow_differences: export settings that verl computes differently, with verl's own; README.md lists them.

    Raises:
        ConfigError: verl cannot run the configuration, or computes something differently and that is not allowed.
        UserError: the folder exists, or cannot be written.
    """
    import pyarrow.parquet

    out = Path(out)
    config = with_dtype(config, on_gpu=True)
    if path_exists(out):
        raise UserError(f"--out {out}: exists already; name a new folder")
    differences = verl_settings.differences_of(config)
    listed = "; ".join(differences)
    if not verl_settings.is_runnable(config):
        raise ConfigError(f"verl cannot run this configuration: {listed}")
    if differences and not allow_differences:
        raise ConfigError(f"verl computes this differently: {listed}; change it, or give --allow-differences")
    task = load_task(config, trial=False)
    training, sets = task.train_problems(), task.heldout_sets()
    heldout = {label: problems[: config.evaluation.problems] for label, problems in sets.items()}
    check_graders(chain.from_iterable(heldout.values()))
    arithmetic = verl_files.batch_arithmetic(config, nodes * gpus_per_node, len(training))
    template = verl_files.chat_template(config, training)
    overrides = {
        **verl_settings.overrides_of(config),
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
    table = verl_files.problem_table("train", by_source, join)
    tables = {
        verl_files.TRAIN_FILE: table,
        verl_files.HELDOUT_FILE: verl_files.problem_table("test", heldout, join, table.schema),
    }
    files = {
        "run.sh": verl_files.run_script(config, overrides),
        CONFIG_FILE: to_yaml(config),
        verl_files.REWARD_FILE: verl_files.REWARD_MODULE,
        "README.md": verl_files.readme(config, overrides, differences, arithmetic),
    }
    with export_folder(out) as folder:
        for name, table in tables.items():
            pyarrow.parquet.write_table(table, folder / name)
        for name, text in files.items():
            write_text(folder / name, text)
        (folder / "run.sh").chmod(0o755)
        if config.model.path in BUNDLED_MODELS:
            verl_files.copy_bundled_model(config.model.path, folder / "model")
    counts = len(training), sum(map(len, heldout.values()))
    return VerlExport(overrides, differences, arithmetic, task.notes(), *counts)


def export_merged(model: str, out: Path | str, runs_dir: Path | str = "runs") -> Path:
    """Write a model folder that transformers and vLLM load: the policy of a run, or a model with an adapter.

    Adapters are merged into the weights as they are for the sampler during training. Of a run that trains all weights,
    the files of the checkpoint are copied. The folder is either complete or absent.

    Args:
        model: a run (NAME or NAME@STEP), or an adapter folder in the format of peft.
        out: the folder; it must not exist.

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
        raise UserError(f"RUN {model[:200]}: neither a run (RUN@STEP) nor a folder with an adapter to merge")
    with export_folder(out) as folder:
        if is_adapter:
            _write_merged(ref.run, source, folder)
        else:
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy2(path, folder)
        for path in folder.iterdir():
            apply_umask(path)
            sync(path)
        sync(folder)
    return out


def _write_merged(run: RunFolder | None, adapter: Path, folder: Path) -> None:
    """Load the base model with its adapter on the CPU and write it to `folder`, in the dtype of the run."""
    trained = resolve([] if run is None else [read_layer(run.path / "config.yaml")])
    with out_of_memory_errors(trained, training=False):
        from bandpo_cli.models.load import load_policy, read_config, save_policy

        on_cpu = {"revision": None, "device": "cpu", "attention": "auto", "lora": None}
        settings = trained.model.model_copy(update={"path": str(adapter), **on_cpu})
        if run is None:  # the dtype in which the base model is stored
            stored = str(read_config(settings).dtype)
            dtype = "bfloat16" if stored == "torch.bfloat16" else "float32"
            settings = settings.model_copy(update={"dtype": dtype})
        save_policy(load_policy(settings, for_training=False), folder)


def import_verl(
    job: Path | str,
    *,
    name: str | None = None,
    uri: str | None = None,
    run_id: str | None = None,
    runs_dir: Path | str = "runs",
) -> tuple[RunOverview, list[str]]:
    """Write a run folder with the settings of an exported job and the metrics of its MLflow run.

    Returns the overview of the run, and verl's metrics of the policy and of evaluations without a counterpart here.

    Args:
        job: folder of `export_verl`, with its config.yaml.
        name: name of the run folder; None for the name of the job's folder.
        uri: MLflow server or store; None for the store of the job: MLFLOW_TRACKING_URI, its settings, its mlflow.db.
        run_id: the MLflow run; None for the last one with the name of the job's folder.

    Raises:
        UserError: the folder is no exported job, MLflow has no such run, or the name is taken.
        RunError: the store does not answer.
    """
    job, runs_dir = Path(job), Path(runs_dir)
    if not path_exists(job / CONFIG_FILE):
        raise UserError(f"{job}: no config.yaml; name a folder of `bandpo export verl`")
    config = resolve([read_layer(job / CONFIG_FILE, "settings of the job")])
    store = uri or os.environ.get("MLFLOW_TRACKING_URI") or config.tracking.uri
    store = store or sqlite_uri((job / "mlflow.db").absolute())
    place = f"MLflow at {redact_credentials(store)}"
    database = sqlite_path(store)
    if database is not None and not path_exists(database):  # MLflow would create it
        raise UserError(f"{database}: no such MLflow store; give it with --tracking-uri")
    job_name = job.resolve().name
    target = choose_run_name(runs_dir, name or job_name, "")
    try:
        check_reachable(store)
        client = mlflow_client(store)
        run = client.get_run(run_id) if run_id else _find_run(client, config.tracking.experiment, job_name)
        records, excluded = _read_metrics(client, run, config.objective.aggregation)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow and the network raise ends as one line
        missing = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        kind = UserError if getattr(error, "error_code", "") in missing else RunError
        raise kind(f"{place}: {short_error(error)}") from None
    if not records:
        raise UserError(f"{place}: run {run.info.run_id} has no metrics of verl")
    last, status = records[-1]["step"], run.info.status
    if status == "FINISHED" and last < config.steps:
        status = "FAILED"  # verl ends an MLflow run as FINISHED also where the training failed
    folder = RunFolder.create(runs_dir, target)
    folder.write_config(to_yaml(config))
    for record in records:
        folder.append_metrics(record)
    folder.write_summary({"status": "KILLED" if status == "RUNNING" else status, "steps": last})
    about = {"verl": VERL_VERSION, "uri": redact_credentials(store), "run_id": run.info.run_id}
    write_json(folder.path / VERL_FILE, {**about, "excluded": excluded})
    return describe_line(folder.path, runs_dir), excluded


def _find_run(client: Any, experiment: str, name: str) -> Any:
    """Return the last run of a name."""
    existing = client.get_experiment_by_name(experiment)
    if existing is None:
        raise UserError(f"MLflow has no experiment '{experiment}'; give the store with --tracking-uri")
    runs = client.search_runs([existing.experiment_id], order_by=["attributes.start_time DESC"])
    named = next((run for run in runs if run.info.run_name == name), None)
    if named is None:
        names = ", ".join(sorted({str(run.info.run_name) for run in runs})) or "none"
        raise UserError(f"experiment '{experiment}' has no run '{name}' (runs: {names:.300}); give --run ID")
    return named


def _read_metrics(client: Any, run: Any, aggregation: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the metrics of each step of a run by the names of this package, and the names without a counterpart."""
    names = NAMES | (TOKEN_MEANS if aggregation == "token-mean" else {})
    records: dict[int, dict[str, Any]] = {}
    excluded = []
    for key in sorted(run.data.metrics):
        evaluation = _EVALUATION.fullmatch(key)
        name = f"eval/{evaluation[1]}/mean_at_{evaluation[2]}" if evaluation else names.get(key)
        if name is not None:
            for value in client.get_metric_history(run.info.run_id, key):
                if math.isfinite(value.value):
                    records.setdefault(value.step, {"step": value.step})[name] = value.value
        elif key.startswith(("actor/", "val-core/")):
            excluded.append(key)
    return [records[step] for step in sorted(records)], excluded
