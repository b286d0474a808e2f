"""Verdicts on any text: graders, and the worker processes that the unbounded ones run in."""

from __future__ import annotations

from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.types import UNGRADED_VERDICTS

__all__ = ["UNGRADED_VERDICTS", "GraderPool", "check_grader"]
