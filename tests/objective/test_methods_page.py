"""docs/methods.md: the table's methods, settings and defaults are those of the registry and the settings classes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bandpo_cli.registries import METHODS, load_attribute
from scripts.method_plots import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def table() -> dict[str, dict[str, Any]]:
    """Return the settings of each row by method."""
    rows = re.findall(
        r"^\| `([\w-]+)` \|[^|]*\|([^|]*)\|[^|]*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {
        method: {
            name: yaml.safe_load(value) for name, value in re.findall(r"`(\w+)` ([^,]+)", settings.strip())
        }
        for method, settings in rows
    }


def test_the_table_has_every_method_in_the_registry_s_order() -> None:
    assert list(table()) == list(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_the_table_has_every_setting_with_its_default(method: str) -> None:
    settings = load_attribute(METHODS[method].settings)().model_dump(mode="json")
    assert settings.pop("method") == method
    assert table()[method] == settings


def test_the_plots_have_every_method() -> None:
    plotted = {settings["method"] for methods in FAMILIES.values() for _, settings in methods}
    assert plotted == set(METHODS)
    images = re.findall(r"\]\(images/methods_(\w+)\.png\)", PAGE.read_text(encoding="utf-8"))
    assert images == list(FAMILIES)
    assert all((PAGE.parent / "images" / f"methods_{name}.png").is_file() for name in FAMILIES)
