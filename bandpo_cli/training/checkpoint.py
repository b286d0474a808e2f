"""Writing the policy so that a crash leaves either the whole folder or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bandpo_cli.models.load import Policy, save_policy
from bandpo_cli.tracking.files import sync_folder


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Write the policy as a Hugging Face folder: aside first, flushed to disk, then renamed into place."""
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_policy(policy, aside)
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(aside)
    aside.rename(folder)
    sync_folder(folder.parent)
