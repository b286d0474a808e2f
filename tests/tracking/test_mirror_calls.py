"""The calls that send metrics to MLflow: names, values, steps and times in MLflow's units."""

from __future__ import annotations

from typing import Any

from bandpo_cli.tracking.mirror import MetricRecord, MlflowMirror, Sent


class Client:
    """Stand-in for MLflow's client that records the calls of `log_batch`."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, float, int, int]]] = []

    def log_batch(self, run_id: str, metrics: list[Any], synchronous: bool) -> None:
        assert (run_id, synchronous) == ("run", True)
        self.batches.append([(each.key, each.value, each.timestamp, each.step) for each in metrics])


def test_a_metric_is_sent_with_its_step_and_its_time_in_milliseconds() -> None:
    client = Client()
    records = [
        MetricRecord.of(3, {"step": 3, "eval/a/mean@16": 0.5, "ratio/max": None}, 1_700_000_000_123),
        MetricRecord.of(4, {"step": 4, "eval/a/mean@16": 0.75}, 1_700_000_002_456),
    ]
    assert MlflowMirror(client, "run").send(records) == Sent(new=2, there=0, differing=0)
    name = "eval/a/mean_at_16"
    assert client.batches == [[(name, 0.5, 1_700_000_000_123, 3), (name, 0.75, 1_700_000_002_456, 4)]]


def test_a_record_without_a_time_gets_the_current_time_in_mlflows_unit() -> None:
    from mlflow.utils.time import get_current_time_millis

    before = get_current_time_millis()
    clock = MetricRecord.of(1, {"a": 1.0}).clock_ms
    assert before <= clock <= get_current_time_millis()


def test_no_call_has_more_metrics_than_mlflow_allows() -> None:
    """MLflow refuses a batch of more than 1000 metrics."""
    client = Client()
    records = [
        MetricRecord(step, {f"m{index}": float(index) for index in range(30)}, step) for step in range(70)
    ]
    assert MlflowMirror(client, "run").send(records).new == 2100
    assert list(map(len, client.batches)) == [1000, 1000, 100]
    sent = [(key, step) for batch in client.batches for key, _, _, step in batch]
    assert sent == [(f"m{index}", step) for step in range(70) for index in range(30)]
