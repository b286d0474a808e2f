"""The report as one HTML file that needs nothing beside it: no script, no network, pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.reports.sweep import tables
from bandpo_cli.reports.sweep.result import Report


def page(report: Report, pictures: Mapping[str, Path]) -> str:
    """Return the page; `pictures` are PNG files by the names of `tables.CAPTIONS`."""
    environment = Environment(
        loader=PackageLoader("bandpo_cli.reports"),
        autoescape=True,  # names of arms and runs are the user's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [
        (caption, base64.b64encode(pictures[name].read_bytes()).decode())
        for name, caption in tables.CAPTIONS.items()
        if name in pictures
    ]
    differences = [
        (
            report.figure(key),
            [
                (each, tables.difference_cells(report, each))
                for each in report.differences
                if each.figure == key
            ],
        )
        for key in dict.fromkeys(each.figure for each in report.differences)
    ]
    return environment.get_template("report.html").render(
        report=report, tables=tables, pictures=shown, differences=differences
    )
