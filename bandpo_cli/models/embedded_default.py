"""Where the shipped model lies. No torch here: a command line may ask before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path


def embedded_model_path() -> Path:
    """The Hugging Face folder of the model that is used when none is named (docs/embedded_model.md)."""
    return Path(__file__).parent / "embedded"
