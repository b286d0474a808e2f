"""Checkpoint folders of a run: completeness, retention, leftovers of a crash, and models named as RUN@STEP.

A checkpoint is `checkpoints/step-000010/`: a Hugging Face model folder (with LoRA, an adapter folder in the format of
peft), with the training state in `trainer/`. It contains no pickle: tensors are safetensors, everything else is JSON.
vLLM loads every *.safetensors file at the top level of a model folder, so the optimizer state is one level below.

It is written in this order: all files into a hidden folder, flushed to the disk; `trainer/state.json`, which lists them
with sizes and checksums; the rename. It is removed in reverse order, the name first. So a folder with its final name is
complete, unless the disk itself lost or changed data.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_hexdigest

from bandpo_cli.config.batch_and_sampling import CheckpointConfig
from bandpo_cli.config.layers import Layer, read_layer, resolve
from bandpo_cli.config.run import EMBEDDED_MODEL
from bandpo_cli.config.task import DataTask
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.metric_names import heldout_score
from bandpo_cli.paths import (
    ADAPTER_CONFIG,
    GGUF_ADVICE,
    MODEL_CONFIG,
    folders_containing,
    gguf_file,
    is_adapter_folder,
    path_exists,
    read_json_object,
    user_path,
)
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.storage.files import file_checksum, json_bytes, link_or_copy, step_of, sync, write_json
from bandpo_cli.storage.run_folder import RunFolder, find_run, is_run_folder, other_folder
from bandpo_cli.storage.run_record import last_change

TRAINER = "trainer"
STATE = f"{TRAINER}/state.json"
ROLLOUTS = f"{TRAINER}/ahead/rollouts.safetensors"
"""The batches that are sampled ahead (`sampling.max_lag`); not in the folder of the optimizer state, of which several
ranks read all safetensors files."""
OPTIMIZER = f"{TRAINER}/optimizer.safetensors"
SHARDS = f"{TRAINER}/optimizer"
"""Folder of the optimizer state that several ranks have written, in place of the file."""
ANY_PROBLEMS = ""
FORMAT = 1

_SEAL = "own_xxh3"
"""Key of `trainer/state.json` for the checksum of the text of the other keys."""

_CHANGED = "is damaged: its content has changed since it was written"
_STAGING_NAME = re.compile(r"\.step-\d+\.(writing|removing)")

# Without an owner the hub has only ids from before it had owners: any other name is a run or a mistake.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|gpt2(-medium|-large|-xl)?|distilgpt2")

_MODELS = f"a Hugging Face folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or '{EMBEDDED_MODEL}'"


@dataclass(frozen=True)
class Progress:
    """Progress of a run. Its further steps depend on this, the weights and the optimizer state only.

    The learning rate is a function of `updates`; every random choice has a seed computed from the run's seed and the
    step (`types.derive_seed`), so there is no state of a random generator to store.

    Attributes:
        step: the last completed step.
        updates: optimizer updates done; the version of the policy.
        skipped_in_a_row: number of updates skipped since the last one that was applied; at most `optim.max_skips`.
        position: problems taken from the stream.
        problems: digest of the problems that the run trains and is evaluated on, or `ANY_PROBLEMS` where a fork begins
            whose settings of the problems are not those of its parent.
        entropy_coefficient, entropy_bonus: with `objective.entropy_target` the coefficient that the controller has
            reached, and that of the next step: the same, or 0.
        loss_scale, scaled_updates: for a model in float16 the factor on the loss, and the updates since it changed.
    """

    step: int
    updates: int
    skipped_in_a_row: int
    position: int
    problems: str
    entropy_coefficient: float = 0.0
    entropy_bonus: float = 0.0
    loss_scale: float = 1.0
    scaled_updates: int = 0


class Checkpoints(NamedTuple):
    """The checkpoints of a run by step.

    Attributes:
        complete: progress of each checkpoint from which training can resume.
        damaged: message with the defect of each other one.
    """

    complete: dict[int, Progress]
    damaged: dict[int, str]


def write_trainer_state(
    folder: Path, progress: Progress, checksums: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write `trainer/state.json`, which marks a complete checkpoint, with size and checksum of every file in `folder`.

    `checksums` has the `file_checksum` of files for which it is known, by name relative to `folder`.
    """
    files = filter(Path.is_file, sorted(folder.rglob("*")))
    paths = {path.relative_to(folder).as_posix(): path for path in files}
    state = {
        "format": FORMAT,
        **asdict(progress),
        "files": {name: path.stat().st_size for name, path in paths.items()},
        "xxh3": {name: checksums.get(name) or file_checksum(path) for name, path in paths.items()},
    }
    write_json(folder / STATE, {**state, _SEAL: xxh3_64_hexdigest(json_bytes(state))})


def read_trainer_state(folder: Path) -> Progress:
    """Return the progress of a complete checkpoint. Raises UserError, which names the defect, for any other folder.

    This compares the sizes of the files; `check_contents` compares their contents.
    """
    state, progress = _read_state(folder)
    for name, size in state["files"].items():
        path = folder / name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            defect = "is missing" if there is None else f"is damaged: {there:,} of {size:,} bytes"
            raise UserError(f"{folder}: {name} {defect}")
    if step_of(folder) != progress.step:
        raise UserError(f"{folder}: holds step {progress.step}")
    return progress


def check_contents(folder: Path, training_state: bool = True) -> None:
    """Compare the files of the checkpoint `folder` with their checksums; in `trainer/` with `training_state` only.

    Raises UserError, which names the file, if one is missing or has another content.
    """
    state, _ = _read_state(folder)
    names = [name for name in state["xxh3"] if training_state or not name.startswith(f"{TRAINER}/")]
    with ThreadPoolExecutor() as executor:
        checksums = executor.map(file_checksum, [folder / name for name in names])
        for name in names:
            try:
                if next(checksums) != state["xxh3"][name]:
                    raise UserError(f"{folder}: {name} {_CHANGED}")
            except OSError as error:
                raise UserError(f"{folder}: {name}: {error.strerror or error}") from None


def _read_state(folder: Path) -> tuple[dict[str, Any], Progress]:
    """Return the content of `trainer/state.json` and its progress. Raises UserError if the file is damaged."""
    where = f"{folder}: {STATE}"
    state = read_json_object(folder / STATE, where)
    if state.get("format") != FORMAT:
        raise UserError(f"{where}: has format {state.get('format')}; this version reads format {FORMAT}")
    checksum = state.pop(_SEAL, None)
    if checksum != xxh3_64_hexdigest(json_bytes(state)):
        raise UserError(f"{where} {_CHANGED}")
    return state, Progress(**{key.name: state[key.name] for key in fields(Progress)})


def complete_checkpoints(run: RunFolder) -> Checkpoints:
    """Return the checkpoints from which training can resume, and the others with their defects."""
    checkpoints = Checkpoints({}, {})
    for step, path in _folders(run):
        try:
            checkpoints.complete[step] = read_trainer_state(path)
        except UserError as error:
            checkpoints.damaged[step] = str(error)
    return checkpoints


def model_checkpoints(run: RunFolder) -> dict[int, Path]:
    """Return the checkpoints that hold a model or its adapters (LoRA), by step in ascending order.

    This asks for their config only, less than `complete_checkpoints`: an evaluation may load a checkpoint whose
    `trainer/` was removed, or one that was copied without it.
    """
    configs = (MODEL_CONFIG, ADAPTER_CONFIG)
    return {step: path for step, path in _folders(run) if any((path / name).is_file() for name in configs)}


def _folders(run: RunFolder) -> list[tuple[int, Path]]:
    """Return step and path of every checkpoint of a run, complete or not, in the order of the steps."""
    paths = (run.path / "checkpoints").glob("step-*")
    return sorted((step, path) for path in paths if (step := step_of(path)) is not None)


def kept_steps(
    steps: Iterable[int], records: Iterable[Mapping[str, Any]], config: CheckpointConfig
) -> set[int]:
    """Return the steps whose checkpoints are kept: the last ones, and the best ones by the metric in `records`.

    Of two steps with the same value the earlier one is better. A step without a value is never among the best.
    """
    ordered = sorted(steps)
    last = ordered if config.keep_last is None else ordered[-config.keep_last :]
    scores = {record["step"]: record_score(record, config.best_metric) for record in records}
    scored = [(score, -step) for step in ordered if (score := scores.get(step)) is not None]
    best = sorted(scored, reverse=True)[: config.keep_best]
    return {*last, *(-step for _, step in best)}


def record_score(record: Mapping[str, Any], metric: str | None = None) -> float | None:
    """Return the value of `metric`, by default `heldout_score`; None where the record does not have it."""
    value = heldout_score(record) if metric is None else record.get(metric)
    return float(value) if isinstance(value, int | float) else None


def prune_checkpoints(run: RunFolder, config: CheckpointConfig) -> None:
    """Remove the checkpoints that the settings do not keep.

    The decision reads the disk only, so that a resumed run decides as the run did. The metrics are flushed to the
    disk first: a checkpoint counts only when the line of its step is there. Nothing is removed where the updates
    before the latest checkpoint were skipped: its policy may be broken, and an older one is needed to return to.
    """
    if config.keep_last is None:
        return
    complete, _ = complete_checkpoints(run)
    if complete and complete[max(complete)].skipped_in_a_row:
        return
    run.sync_metrics()
    begin = last_change(run.path)[0]
    records = [record for record in run.read_records(complete) if record["step"] > begin]
    for step in complete.keys() - kept_steps(complete, records, config):
        delete_checkpoint(run.checkpoint_dir(step))


def position_before_batch(checkpoint: Path) -> int | None:
    """Return the position in the training problems at which the first batch sampled ahead begins; None without one."""
    from safetensors import safe_open

    if not (checkpoint / ROLLOUTS).exists():
        return None
    with safe_open(checkpoint / ROLLOUTS, "np") as file:
        return int(json.loads(file.metadata()["rollouts"])["batches"][0]["position"])


def copy_checkpoint(source: Path, target: Path, progress: Progress, with_rollouts: bool) -> None:
    """Write the checkpoint `source` as the checkpoint `target` of another run, whose progress is `progress`.

    The files are hard links if possible. The batches sampled ahead are left out unless `with_rollouts`.
    """
    hidden, state = hidden_folder(target, "writing"), _read_state(source)[0]
    left_out = [Path(STATE).name, *([] if with_rollouts else [Path(ROLLOUTS).parent.name])]
    shutil.copytree(source, hidden, ignore=shutil.ignore_patterns(*left_out), copy_function=link_or_copy)
    for path in (hidden, *hidden.rglob("*")):
        sync(path)
    write_trainer_state(hidden, progress, state["xxh3"])  # flushes its file itself
    os.rename(hidden, target)
    sync(target.parent)


def remove_checkpoints_after(run: RunFolder, step: int) -> None:
    """Remove the checkpoints after `step`, damaged ones, and the hidden folders that a crash left."""
    complete, damaged = complete_checkpoints(run)
    for number in (*(number for number in complete if number > step), *damaged):
        delete_checkpoint(run.checkpoint_dir(number))
    for path in (run.path / "checkpoints").glob(".step-*"):
        if _STAGING_NAME.fullmatch(path.name):
            remove_tree(path)


def hidden_folder(folder: Path, action: Literal["writing", "removing"]) -> Path:
    """Return the path of the hidden folder in which the checkpoint `folder` is written or removed."""
    return folder.with_name(f".{folder.name}.{action}")


def delete_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its name first: one that is partly removed never counts as complete."""
    hidden = hidden_folder(folder, "removing")
    remove_tree(hidden)  # that a crash left
    os.rename(folder, hidden)
    sync(folder.parent)
    remove_tree(hidden)


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it exists; of a symbolic link, the link and not its target."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@dataclass(frozen=True)
class ModelRef:
    """A model to load from `path`; the run and step that trained it, where they are known."""

    path: str
    run: RunFolder | None = None
    step: int | None = None

    @property
    def stem(self) -> str:
        """The part of an evaluation's name that names the model."""
        if self.run is not None:
            return f"{self.run.name}@{self.step}"
        return Path(self.path).absolute().name or "model"


def resolve_model(text: str, runs_dir: Path, option: str = "--model") -> ModelRef:
    """Return what `text`, the value of `option`, means: a bundled model, RUN, RUN@STEP, a folder, or else a hub id.

    RUN is a name in `runs_dir` or the path of a run folder, and means its latest checkpoint. Raises UserError if there
    is no such checkpoint, or nothing of that name.
    """
    if text in BUNDLED_MODELS:
        return ModelRef(text)
    folder = user_path(text).absolute()
    match = find_run(text, runs_dir)
    is_checkpoint = step_of(folder) is not None and folder.parent.name == "checkpoints"
    if match is None and is_checkpoint and is_run_folder(folder.parent.parent):
        match = RunFolder(folder.parent.parent), step_of(folder)
    if match is not None:
        run, step = match
        checkpoints = model_checkpoints(run)
        step = max(checkpoints, default=0) if step is None else step
        if step not in checkpoints:
            there = f"there are: {', '.join(map(str, checkpoints))}" if checkpoints else "there is none yet"
            raise UserError(f"{option} {text[:200]}: no such checkpoint in {run.path}; {there}")
        check_model_contents(checkpoints[step])
        return ModelRef(str(checkpoints[step]), run, step)
    # An id of the hub has at most 96 characters; the first part of a missing run's path may be the runs folder.
    owner = text.partition("/")[0]
    may_be_id = len(text) <= 96 and _HUB_ID.fullmatch(text) and owner not in (".", "..", runs_dir.name)
    if not text or not (path_exists(folder) or may_be_id):
        if other := other_folder(text, runs_dir):
            raise other
        names = folders_containing(runs_dir, "config.yaml")
        hint = nearest(text.removeprefix(f"{runs_dir}/"), [*names, *BUNDLED_MODELS])
        raise ConfigError(f"{option} {text[:200]}: no such run or folder{hint}; give a run or {_MODELS}")
    path = str(user_path(text)) if path_exists(folder) else text
    check_model_path(path)
    return ModelRef(path)


def check_model_path(path: str) -> None:
    """Raise ConfigError if `path` is neither the folder of a model or an adapter, nor can be a hub id."""
    if path in BUNDLED_MODELS:
        return
    folder = user_path(path)
    if path_exists(folder):
        if not (folder / MODEL_CONFIG).is_file() and not is_adapter_folder(folder):
            advice = GGUF_ADVICE if gguf_file(folder) else "name the folder that save_pretrained wrote"
            raise ConfigError(f"model.path = {path!r}: no config.json there; {advice}")
    elif path.startswith((".", "~")) or not _HUB_ID.fullmatch(path):
        near = nearest(path, BUNDLED_MODELS)
        raise ConfigError(f"model.path = {path!r}: no such folder{near}; give {_MODELS}")


def check_model_contents(checkpoint: Path) -> None:
    """Raise UserError if a file of a model has changed; a checkpoint copied without `trainer/` has no checksums."""
    if path_exists(checkpoint / STATE):
        check_contents(checkpoint, training_state=False)


def run_layers(run: RunFolder) -> list[Layer]:
    """Return the settings of a run, as defaults for other work with its checkpoints; other data has its own grader."""
    add_code_folder(run.path)
    stored = read_layer(run.path / "config.yaml")
    task = resolve([stored]).task
    is_chosen = not isinstance(task, DataTask) or task.chosen_grader is not None
    return [stored] if is_chosen else [stored, {"task": {"grader": None}}]


def inherited_layers(run: RunFolder) -> list[Layer]:
    """Return the settings of a run as defaults of a new one: `run_layers` without the section `tracking`."""
    return [{key: value for key, value in layer.items() if key != "tracking"} for layer in run_layers(run)]
