"""Hugging Face hub: the commit of a repository that was loaded, from the hub's local cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(text: object) -> bool:
    """Return whether `text` is the full hash of a commit."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def cached_commit(
    repository: str, kind: Literal["model", "dataset"], revision: str | None = None
) -> str | None:
    """Return the commit that a revision named when it was last loaded on this machine; no request is sent.

    Args:
        repository: id of the model or data set on the hub.
        kind: kind of the repository.
        revision: branch, tag or commit; None for the main branch.

    Returns:
        The full hash; None if the repository was not loaded from the hub.
    """
    if is_commit(revision):
        return revision
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None
