"""Resolved values of settings such as `auto` (entry `resolved` of env.json), which a resume uses again.

`sampling.engine: auto` depends on the machine, and a model or data set on the hub can change. A resumed run has the
engine, the dtype and the commits that the run started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import AUTO_ENGINE, is_installed, resolve_engine
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.paths import cached_commit, is_commit, path_exists
from bandpo_cli.registries import ENGINES
from bandpo_cli.storage.files import read_json_object
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.question_answers import hub_ids

if TYPE_CHECKING:
    from bandpo_cli.models.load import Policy

RESOLVED = "resolved"
"""The entry of env.json."""
_DTYPES = ("float32", "bfloat16")


def resolved_entry(config: RunConfig, policy: Policy) -> dict[str, Any]:
    """Return what the settings of a run resolved to, for `env.json`.

    Returns:
        `engine`, the name of the sampling engine; `dtype` of the weights; `model`, the commit of a model on the hub,
        None for a folder; `data`, the commits of the data sets on the hub by id, without those that are not known.
    """
    task, commits = config.task, {}
    if isinstance(task, DataTask):
        commits = {name: cached_commit(name, "dataset", task.revisions.get(name)) for name in hub_ids(task)}
    return {
        "engine": resolve_engine(config.sampling.engine, on_gpu=policy.device.type == "cuda"),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "model": policy.commit,
        "data": {name: commit for name, commit in commits.items() if commit is not None},
    }


def stored_resolution(folder: RunFolder) -> Mapping[str, Any]:
    """Return what a run's settings resolved to when it started; empty where env.json does not say.

    A run that an earlier version started has the entry in its list of resumes.
    """
    try:
        env = read_json_object(folder.path / "env.json")
    except UserError:
        return {}
    resumes = env.get("resumes")
    entries = [env, *(resumes if isinstance(resumes, list) else [])]
    resolutions = [entry[RESOLVED] for entry in entries if isinstance(entry, dict) and RESOLVED in entry]
    return resolutions[0] if resolutions and isinstance(resolutions[0], dict) else {}


def pin_warnings(folder: RunFolder) -> list[str]:
    """Return a warning if env.json is damaged; a run that ended early may lack the file."""
    if not path_exists(folder.path / "env.json"):
        return []
    try:
        read_json_object(folder.path / "env.json")
    except UserError as error:
        return [f"{error}; engine, dtype and commits of the run are not known and are chosen anew"]
    return []


def pin(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the settings with the engine, dtype and commits that the run in `folder` started with.

    Entries of env.json that no run writes are ignored.

    Raises:
        ConfigError: the engine that `auto` resolved to is not installed.
    """
    stored = stored_resolution(folder)
    sampling, model, task = config.sampling, config.model, config.task
    engine, dtype, commit, data = (stored.get(key) for key in ("engine", "dtype", "model", "data"))
    if sampling.engine == AUTO_ENGINE and isinstance(engine, str) and engine in ENGINES:
        entry = ENGINES[engine]
        if entry.package is not None and not is_installed(entry.package):
            raise ConfigError(
                f"run {folder.name} samples with {engine}, to which sampling.engine = {AUTO_ENGINE} resolved when it "
                f"started, and the package {entry.package} is not installed here; a run is resumed with its own "
                f"engine: {entry.install}"
            )
        sampling = sampling.model_copy(update={"engine": engine})
    if str(model.dtype) == "auto" and dtype in _DTYPES:
        model = model.model_copy(update={"dtype": dtype})
    if is_commit(commit):
        model = model.model_copy(update={"revision": commit})
    if isinstance(task, DataTask) and isinstance(data, dict):
        commits = {name: data[name] for name in hub_ids(task) if is_commit(data.get(name))}
        task = task.model_copy(update={"revisions": {**task.revisions, **commits}})
    return config.model_copy(update={"sampling": sampling, "model": model, "task": task})
