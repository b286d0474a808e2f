"""Grading: rewards and verdicts for completions, with worker processes for graders of unbounded cost."""

from __future__ import annotations

from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.types import UNGRADED_VERDICTS

__all__ = ["UNGRADED_VERDICTS", "GraderPool", "check_grader"]
