"""Criteria of `stop`: a run ends once a metric was beyond its limit in a number of consecutive steps."""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from bandpo_cli.config.run import RunConfig

Record = Mapping[str, Any]


class _Criterion(NamedTuple):
    metric: str
    unit: str
    side: str
    is_beyond: Callable[[float, float], bool]

    def steps_beyond(self, limit: float, records: Sequence[Record]) -> int:
        """Return the number of steps, up to the last one, in which the metric was beyond the limit.

        A step that lacks the metric, or in which it is not finite, is not beyond the limit.
        """
        values = (record.get(self.metric) for record in reversed(records))
        beyond = takewhile(lambda value: value is not None and self.is_beyond(value, limit), values)
        return sum(1 for _ in beyond)


_CRITERIA = {
    "entropy_below": _Criterion("train/entropy", " nats", "below", operator.lt),
    "gap_above": _Criterion("sampler/logprob_gap_mean", " nats", "above", operator.gt),
    "truncation_above": _Criterion("train/truncated_fraction", "", "above", operator.gt),
}
"""The metric of each limit in `stop`, and the side of the limit on which a step counts."""


class StopCriteria:
    """The reasons to end a run between two steps: its criteria, and a request.

    Args:
        records: lines of metrics.jsonl of the steps before; the last `stop.steps` of them count.
        requested: returns True once the user has asked the run to stop; None where nobody can.
    """

    def __init__(
        self, config: RunConfig, records: Iterable[Record], requested: Callable[[], bool] | None
    ) -> None:
        self._config, self._requested = config, requested
        self._recent = deque(records, maxlen=config.stop.steps)

    def add(self, record: Record) -> list[str]:
        """Add the line of a step, and return the warnings about it."""
        self._recent.append(record)
        return stop_warnings(self._config, self._recent)

    @property
    def reason(self) -> str | None:
        """The criterion that ends the run after the last step, in one line; None without one."""
        return stop_reason(self._config, self._recent)

    def is_met(self) -> bool:
        """Return whether the run is to end now."""
        return self.reason is not None or (self._requested is not None and self._requested())


def stop_reason(config: RunConfig, records: Sequence[Record]) -> str | None:
    """Return the criterion that ends a run after the last of its lines in `records`, in one line.

    None if no criterion is fulfilled, or the last step of the run is done.
    """
    if not records or records[-1]["step"] >= config.steps:
        return None
    return next((text for count, text in _counts(config, records) if count >= config.stop.steps), None)


def stop_warnings(config: RunConfig, records: Sequence[Record]) -> list[str]:
    """Return a line for each criterion for which the last of `records` is the step at half of `stop.steps`."""
    steps = config.stop.steps
    return [
        f"{text}; the run ends after {steps} such steps"
        for count, text in _counts(config, records)
        if count == -(-steps // 2) < steps
    ]


def _counts(config: RunConfig, records: Sequence[Record]) -> Iterator[tuple[int, str]]:
    """Yield the number of last steps beyond each limit that the last of `records` is beyond, and a description."""
    for name, criterion in _CRITERIA.items():
        limit = getattr(config.stop, name)
        count = 0 if limit is None else criterion.steps_beyond(limit, records)
        if count:
            steps = "in the last step" if count == 1 else f"in each of the last {count} steps"
            beyond = f"{criterion.metric} was {criterion.side} it {steps}"
            last = f"{records[-1][criterion.metric]:.3g}{criterion.unit}"
            yield count, f"stop.{name} = {limit:g}: {beyond}, most recently {last}"
