"""Exchange with other programs: missing data for trackers, exports for verl and as models, imports from verl."""

import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bandpo_cli.callbacks import Callback
from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.config.run import RunConfig, TrackingConfig, with_dtype
from bandpo_cli.custom_code import code_from
from bandpo_cli.errors import ConfigError, RunError, UserError, log, redact_credentials, user_code_location
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.experiments.monitor import Dispatcher
from bandpo_cli.experiments.plan import check_graders, choose_run_name, load_task
from bandpo_cli.exports import verl_files, verl_settings
from bandpo_cli.exports.verl_files import CONFIG_FILE, VERL_VERSION
from bandpo_cli.exports.verl_settings import MODEL, InFolder, Overrides
from bandpo_cli.paths import given_path, is_adapter_folder, path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.results import RunOverview, describe_line
from bandpo_cli.storage import files
from bandpo_cli.storage.checkpoints import resolve_model
from bandpo_cli.storage.files import apply_umask, export_folder, write_json, write_text
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, find_folder
from bandpo_cli.storage.run_record import read_stored_run
from bandpo_cli.storage.sweep_folder import PLAN_FILE, find_runs
from bandpo_cli.tracking.mlflow_store import MLFLOW, mlflow_client, sqlite_path, sqlite_uri, store_for_run
from bandpo_cli.tracking.outages import check_reachable, short_error
from bandpo_cli.tracking.sender import RunSender, SyncResult
from bandpo_cli.tracking.trackers import tracker_class
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
    """An exported experiment: verl's settings in run.sh; the differences of verl, the batches and notes as lines."""

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
    changes: Sequence[str] = (),
    nodes: int = 1,
    gpus_per_node: int = 8,
    allow_differences: bool = False,
) -> VerlExport:
    """Write a new folder with which verl runs an experiment, or nothing: run.sh, data, reward function, README.md.

    Args:
        changes: lines of `verl_files.settings_for_cluster`, for README.md.
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
    if not verl_settings.is_runnable(config):
        raise ConfigError(f"verl cannot run this configuration: {'; '.join(differences)}")
    if differences and not allow_differences:
        advice = "change it with --set, or give --allow-differences"
        raise ConfigError(f"verl computes this differently: {'; '.join(differences)}; {advice}")
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
    heldout_table = verl_files.problem_table("test", heldout, join, table.schema)
    wheel, package = verl_files.package_wheel()
    values = {"wheel": wheel, "nodes": nodes, "gpus": gpus_per_node, "changes": changes}
    texts = {
        "run.sh": verl_files.run_script(config, overrides),
        "cluster.sh": verl_files.cluster_script(out.name, nodes, gpus_per_node),
        CONFIG_FILE: to_yaml(config),
        verl_files.REWARD_FILE: verl_files.REWARD_MODULE,
        "README.md": verl_files.readme(
            config, overrides, differences=differences, arithmetic=arithmetic, **values
        ),
    }
    with export_folder(out) as folder:
        pyarrow.parquet.write_table(table, folder / verl_files.TRAIN_FILE)
        pyarrow.parquet.write_table(heldout_table, folder / verl_files.HELDOUT_FILE)
        for name, text in texts.items():
            write_text(folder / name, text)
        (folder / "run.sh").chmod(0o755)
        (folder / wheel).write_bytes(package)
        if config.model.path in BUNDLED_MODELS:
            verl_files.copy_bundled_model(config.model.path, folder / "model")
    counts = len(training), sum(map(len, heldout.values()))
    return VerlExport(overrides, differences, arithmetic, task.notes, *counts)


def export_merged(model: str, out: Path | str, runs_dir: Path | str = "runs") -> Path:
    """Write a new model folder that transformers and vLLM load, complete or absent, and return its path.

    Adapters are merged into the weights as they are for the sampler during training. Of a run that trains all weights,
    the files of the checkpoint are copied. `model` is a run (NAME or NAME@STEP), or an adapter folder of peft.

    Raises:
        UserError: there is no such run or folder, the model cannot be loaded, or `out` exists or cannot be written.
        RunError: there is not enough memory for the model.
    """
    out = Path(out)
    if path_exists(out) or out.is_symlink():
        raise UserError(f"--out {out}: exists already; name a new folder")
    ref = resolve_model(model, given_path(runs_dir), "RUN")
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
            files.sync(path)
        files.sync(folder)
    return out


def _write_merged(run: RunFolder | None, adapter: Path, folder: Path) -> None:
    """Load the base model with its adapter on the CPU and write it to `folder`, in the dtype of the run."""
    trained = resolve([] if run is None else [read_layer(run.path / "config.yaml")])
    with out_of_memory_errors(trained, training=False):
        from bandpo_cli.models.load import load_policy, read_config, save_policy
        from bandpo_cli.models.model_files import base_config

        values = {"path": str(adapter), "revision": None, "device": "cpu", "attention": "auto", "lora": None}
        settings = trained.model.model_copy(update=values)
        if run is None:  # the dtype in which the base model is stored
            is_half = str(read_config(base_config(settings)[0]).dtype) == "torch.bfloat16"
            settings = settings.model_copy(update={"dtype": "bfloat16" if is_half else "float32"})
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
        uri: MLflow server or store; None for MLFLOW_TRACKING_URI, the settings of the job, or its mlflow.db.
        run_id: the MLflow run; None for the last one with the name of the job's folder.
    """
    job, runs_dir = Path(job), given_path(runs_dir)
    if not path_exists(job / CONFIG_FILE):
        raise UserError(f"{job}: no config.yaml; name a folder of `bandpo export verl`")
    config = resolve([read_layer(job / CONFIG_FILE, "settings of the job")])
    own = config.tracking.uri or sqlite_uri((job / "mlflow.db").absolute())
    store = uri or os.environ.get("MLFLOW_TRACKING_URI") or own
    place = f"MLflow at {redact_credentials(store)}"
    if (database := sqlite_path(store)) is not None and not path_exists(database):  # MLflow would create it
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
    """Return the last run of a name in an experiment."""
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


@dataclass(frozen=True)
class SyncReport:
    """The outcome of a run at a tracker: what was sent, or why it was not to be sent, or why it could not be sent."""

    name: str
    result: SyncResult | None = None
    skipped: str | None = None
    error: str | None = None
    tracker: str = MLFLOW


SyncCallback = Callback[Sequence[Path], SyncReport, Sequence[SyncReport]]
"""A callback of `sync`; `start` has the folders of all runs."""


def sync(
    names: Sequence[str] = (),
    *,
    all_runs: bool = False,
    trackers: Sequence[str] = (),
    uri: str | None = None,
    runs_dir: Path | str = "runs",
    callbacks: Sequence[SyncCallback] = (),
) -> list[SyncReport]:
    """Send trackers what they lack of runs: settings, metrics of every step, files and status.

    A store that cannot be reached or does not accept a run is not tried again. The runs of the other stores are sent
    before an error is raised.

    Args:
        names: runs, by name in `runs_dir` or by folder; a sweep stands for all of its runs.
        all_runs: send every run of `runs_dir` in place of `names`; those without a tracker are skipped.
        trackers: empty for the trackers of each run's settings, and MLflow for a run in `names` that has none.
        uri: MLflow server or store; None for the one of each run's settings.
        callbacks: `start` has the folder of each run once per tracker; `phase("tracking")` and `step` come for each.
    """
    for name in {*trackers} - {MLFLOW}:
        tracker_class(name)
    pairs: list[tuple[Path, str | None]] = [
        (path, tracker)
        for path, is_named in _choose_runs(names, all_runs, given_path(runs_dir)).items()
        for tracker in trackers or _trackers(path, is_named, uri)
    ]
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # seconds; a person waits here, no training
    events = Dispatcher(callbacks)
    failed_places: dict[str, str] = {}
    reports: list[SyncReport] = []
    try:
        events.start([path for path, _ in pairs])
        for path, tracker in pairs:
            events.phase("tracking")
            reports.append(_send(path, tracker, uri, failed_places))
            events.step(reports[-1])
    finally:
        events.end(reports)
    unsent = [*failed_places.values()]
    errors = [report.error for report in reports if report.error and report.error not in unsent]
    if unsent:
        errors.append(f"{'; '.join(unsent)}. Nothing is lost: sync again when it is back")
    for line in errors[:-1]:
        log.warning("%s", line)
    if errors:
        raise (RunError if unsent else UserError)(errors[-1])
    return reports


def _choose_runs(names: Sequence[str], all_runs: bool, runs_dir: Path) -> dict[Path, bool]:
    """Return the folders of the runs, each once; the value is True for a run that was named itself."""
    if all_runs == bool(names):
        raise UserError("name the runs to send, or give --all for every run; not both")
    chosen: dict[Path, tuple[Path, bool]] = {}
    for name in names or [""]:
        folder = find_folder(name, runs_dir, PLAN_FILE) if names else runs_dir
        for path in [RunFolder.open(runs_dir, name).path] if folder is None else find_runs(folder):
            chosen.setdefault(path.resolve(), (path, folder is None))
    if not chosen:
        raise UserError(f"no runs in {runs_dir}; give another place with --runs-dir")
    return dict(chosen.values())


def _trackers(path: Path, named: bool, uri: str | None) -> Iterable[str | None]:
    """Return the trackers that a run is sent to; None in place of MLflow for a run that is left out."""
    config = TrackingConfig()
    with suppress(UserError, ValueError, TypeError):  # damaged settings: sending the run reports them
        tracking = read_layer(path / "config.yaml").get("tracking") or {}
        keys = ("trackers", "mlflow", "tensorboard")
        config = TrackingConfig(**{key: tracking[key] for key in keys if key in tracking})
    if named and (uri is not None or not config.names):
        return dict.fromkeys((MLFLOW, *config.names))
    return config.names or (None,)


def _send(path: Path, tracker: str | None, uri: str | None, failed_places: dict[str, str]) -> SyncReport:
    """Send one run to one tracker; the error of a tracker is added to `failed_places`, by its place.

    Nothing is sent to a place in `failed_places`: each attempt may take the timeout of the server.
    """
    if tracker is None:
        return SyncReport(path.name, skipped="it has no tracker; name it to send it")
    place = tracker
    try:
        with code_from(path):
            store = store_for_run(read_stored_run(path), uri) if tracker == MLFLOW else None
            sender = RunSender(tracker, path, store)
            place = sender.place
            if place not in failed_places:
                check_reachable(sender.server())
                return SyncReport(path.name, result=sender.send(), tracker=tracker)
    except UserError as error:
        return SyncReport(path.name, error=str(error), tracker=tracker)
    except Exception as error:  # noqa: BLE001 - whatever the tracker and the network raise ends as one line
        how = f"did not accept run {path.name}"
        if isinstance(error, OSError):
            if error.filename and Path(str(error.filename)).absolute().is_relative_to(path.absolute()):
                why = f"{error.strerror}; sync locks the run folder and records in it what was sent"
                return SyncReport(path.name, error=f"{error.filename}: {why}", tracker=tracker)
            how = "cannot be reached"
        failed_places[place] = f"{place} {how} ({short_error(error)}){user_code_location(error)}"
    return SyncReport(path.name, error=failed_places[place], tracker=tracker)
