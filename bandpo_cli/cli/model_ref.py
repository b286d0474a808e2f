"""What `--model` names: a model's folder, a hub id, or a run of ours with the step of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.cli.preflight import check_model_path
from bandpo_cli.config.run import EMBEDDED_MODEL
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.paths import folders_containing, path_exists, user_path
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import RunFolder

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MOST_DIGITS = 12  # of a step: Python refuses to read thousands of them


@dataclass(frozen=True)
class ModelRef:
    """A model to load from `path`; the run and the step that made it, where they are known."""

    path: str
    run: RunFolder | None = None
    step: int | None = None

    @property
    def stem(self) -> str:
        """Its part of an evaluation's name."""
        if self.run is not None:
            return f"{self.run.name}@{self.step}"
        return Path(self.path).absolute().name or "model"


def resolve_model(text: str, runs_dir: Path) -> ModelRef:
    """Return what `text` means: `embedded`, RUN, RUN@STEP, a folder, or else a hub id.

    RUN is a name in `runs_dir` or the path of a run folder, and means its latest checkpoint.

    Raises:
        UserError: there is no such checkpoint, or nothing of that name.
    """
    if text == EMBEDDED_MODEL:
        return ModelRef(text)
    found = find_run(text, runs_dir)
    if found is not None:
        run, step = found
        return _checkpoint(run, step)
    folder = user_path(text).absolute()
    run_path = folder.parent.parent
    if step_of(folder) is not None and folder.parent.name == "checkpoints" and _is_run(run_path):
        return _checkpoint(RunFolder(run_path), step_of(folder))
    if not text or (not path_exists(folder) and not _looks_like_hub_id(text, runs_dir)):
        names = folders_containing(runs_dir, "config.yaml")
        hint = nearest(text.removeprefix(f"{runs_dir}/"), [*names, EMBEDDED_MODEL])
        raise ConfigError(
            f"--model {text[:200]}: no such run or folder{hint}; give a run in {runs_dir} (or RUN@STEP), a Hugging "
            f"Face folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or '{EMBEDDED_MODEL}'"
        )
    path = str(user_path(text)) if path_exists(folder) else text
    check_model_path(path)
    return ModelRef(path)


def find_run(text: str, runs_dir: Path) -> tuple[RunFolder, int | None] | None:
    """Return the run that RUN or RUN@STEP names, with its step; None where there is no such run.

    Raises:
        UserError: the step is no number.
    """
    name, at, step = text.rpartition("@")
    for run, suffix in ((text, None), (name, step)) if at else ((text, None),):
        for path in (runs_dir / run, user_path(run)):
            if run and _is_run(path):
                if suffix is not None and not (suffix.isdecimal() and len(suffix) <= _MOST_DIGITS):
                    raise UserError(
                        f"{text[:200]}: after @ goes a step, as in {run}@100; not {suffix[:20]!r}"
                    )
                named = path if path.name.strip(".") else path.resolve()  # "." and ".." are no names
                return RunFolder(named), None if suffix is None else int(suffix)
    return None


def _checkpoint(run: RunFolder, step: int | None) -> ModelRef:
    checkpoints = run.checkpoints()
    if not checkpoints:
        raise UserError(f"--model {run.name}: the run in {run.path} has no checkpoint yet")
    if step is None:
        step = max(checkpoints)
    if step not in checkpoints:
        there = ", ".join(map(str, checkpoints))
        raise UserError(f"--model {run.name}@{step}: no checkpoint of that step; there are: {there}")
    return ModelRef(str(checkpoints[step]), run, step)


def _looks_like_hub_id(text: str, runs_dir: Path) -> bool:
    """Tell `Qwen/Qwen2.5-0.5B` from the path of a run that is not there; the hub allows 96 characters."""
    looks_like_one = len(text) <= 96 and _HUB_ID.fullmatch(text) is not None
    return looks_like_one and text.partition("/")[0] not in (".", "..", runs_dir.name)


def _is_run(path: Path) -> bool:
    """A run's config.yaml tells it from a model's folder, which has config.json."""
    return path_exists(path / "config.yaml") and not path_exists(path / "config.json")
