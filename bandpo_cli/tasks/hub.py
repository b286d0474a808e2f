"""Rows of data sets on the Hugging Face hub, and of folders in its layouts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bandpo_cli.errors import ConfigError


def read_hub(place: str, subset: str | None, split: str, instead: str) -> Iterator[dict[str, Any]]:
    """Read the rows of one split of a data set: a hub id, or a folder.

    Args:
        instead: what to do where the hub is out of reach; ends the error message.

    Raises:
        ConfigError: the hub is out of reach, or knows no such data set, subset or split.
    """
    rows = _load(place, subset, split, instead)
    try:
        for batch in rows.with_format("arrow").iter(batch_size=1024):
            yield from batch.to_pylist()
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes its reader raise
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"data set '{place}': cannot be read ({line[:200]})") from None


def _load(place: str, subset: str | None, split: str, instead: str) -> Any:
    import datasets

    what = f"data set '{place}'" + (f", subset '{subset}'" if subset else "") + f", split '{split}'"
    try:
        with _quiet("huggingface_hub", "datasets"):
            if _was_saved_to_disk(Path(place)):
                saved = datasets.load_from_disk(place)
                return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return datasets.load_dataset(place, subset, split=split)
    except KeyError:
        raise ConfigError(f"{what}: no such split; it has {', '.join(saved)}") from None
    except Exception as error:  # noqa: BLE001 - OSError, ValueError, KeyError, pyarrow's and the library's own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{what}: cannot be loaded ({first[:200].rstrip('.')}); {instead}") from None


def _was_saved_to_disk(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep the retries of a hub out of reach off the screen: the error says it once."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
