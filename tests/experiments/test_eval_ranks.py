"""Evaluation of a model by several ranks: the folder that one rank writes, also after an interruption."""

import json
import logging
import logging.handlers
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest

from bandpo_cli.callbacks import Callback
from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.evaluate import Batch
from bandpo_cli.experiments.eval_plan import plan_evaluation, plan_evaluation_resume
from bandpo_cli.experiments.eval_run import EvalInfo, EvalResult, evaluate
from bandpo_cli.grading.pool import GraderPool, GraderUse
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.storage.run_folder import EvalFolder
from tests.training.several_ranks import run_ranks

SETTINGS = {
    "task": {"max_number": 5},
    "evaluation": {"problems": 7, "samples": 4, "batch": 8, "k": [1, 4]},
    "tracking": {"mlflow": False},
}
"""Four batches of two problems, the last of one."""


class Recorder(Callback[EvalInfo, Batch, EvalResult]):
    """Records the completions of each step, and interrupts after `last` steps."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.steps: list[int] = []
        self.ends = 0

    def step(self, report: Batch) -> None:
        self.steps.append(len(report.rows))
        if len(self.steps) == self.last:
            raise KeyboardInterrupt

    def end(self, result: EvalResult) -> None:
        self.ends += 1


def run(ranks: Ranks, folder: Path, name: str, resume: bool = False) -> tuple[dict[str, Any], Any, Recorder]:
    """Evaluate the bundled model; return the record and scores of the result, and the events of this rank."""
    events = Recorder()
    connected = mock.Mock(return_value=nullcontext(ranks))
    with (
        mock.patch("bandpo_cli.experiments.run.connected_ranks", connected),
        mock.patch("bandpo_cli.experiments.eval_run.connected_ranks", connected),
    ):
        if resume:
            request = plan_evaluation_resume(EvalFolder(folder / name))
        else:
            request = plan_evaluation(base=[SETTINGS], runs_dir=folder)
        result = evaluate(request, runs_dir=folder, name=name, callbacks=[events])
    return result.record, result.scores, events


def compare(one: Path, other: Path) -> None:
    """Compare the completions and metrics of two evaluations."""
    samples, expected = (pd.read_parquet(path / "samples.parquet") for path in (other, one))
    assert len(expected) == 28
    assert expected["text"].nunique() > 5
    # The order of float32 additions depends on the batch, and with it the last digits of the log-probs.
    sums = samples.pop("logprob_sum"), expected.pop("logprob_sum")
    pd.testing.assert_frame_equal(samples, expected, check_exact=True)
    pd.testing.assert_series_equal(*sums, atol=1e-5, rtol=0)
    first, second = (json.loads((path / "eval.json").read_text()) for path in (one, other))
    assert first.pop("name") != second.pop("name")
    assert first == second
    assert not (other / "parts").exists()


def resume_twice(ranks: Ranks, folder: Path) -> tuple[list[int], str, str]:
    """Return the steps of a resume, and its eval.json, after which rank 0 scores the complete evaluation again."""
    *_, events = run(ranks, folder.parent, folder.name, resume=True)
    written = (folder / "eval.json").read_text() if ranks.is_main else ""
    ranks.wait()
    record, *_ = run(ranks, folder.parent, folder.name, resume=True)
    return events.steps, repr(record), written


@pytest.mark.slow
def test_several_ranks_write_and_resume_the_evaluation_of_one(tmp_path):
    run(SINGLE, tmp_path, "one")
    results = run_ranks(3, tmp_path / "results", run, tmp_path, "three")
    compare(tmp_path / "one", tmp_path / "three")
    for name, ranks in (("one", 1), ("three", 3)):
        assert json.loads((tmp_path / name / "env.json").read_text())["ranks"] == ranks
    assert [(events.steps, events.ends) for *_, events in results] == [([8, 8, 8, 4], 1), ([], 0), ([], 0)]
    # As texts, since some values are not numbers.
    assert len({repr((record, scores)) for record, scores, _ in results}) == 1

    request = plan_evaluation(base=[SETTINGS], runs_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(request, runs_dir=tmp_path, name="resumed", callbacks=[Recorder(last=2)])
    assert len([*(tmp_path / "resumed" / "parts").iterdir()]) == 2
    main, other = run_ranks(2, tmp_path / "results of two", resume_twice, tmp_path / "resumed")
    compare(tmp_path / "one", tmp_path / "resumed")
    assert (main[0], other[:2]) == ([8, 4], ([], main[1]))
    assert json.loads((tmp_path / "resumed" / "eval.json").read_text()) == json.loads(main[2])


def refused_then_warned(ranks: Ranks, folder: Path) -> tuple[str, list[str]]:
    """Return the error for a name that is taken, and the warnings of this rank if a grader failed on rank 1."""
    with (
        mock.patch("bandpo_cli.experiments.eval_run.choose_run_name", lambda folder, name, default: name),
        pytest.raises(UserError) as raised,
    ):
        run(ranks, folder, "taken" if ranks.is_main else "other")
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("bandpo_cli").addHandler(handler)
    uses = {"countdown": GraderUse(14, ranks.rank, "ValueError: x" if ranks.rank else None)}

    def count(pool: GraderPool, *_: Any) -> None:
        pool.uses = uses

    with mock.patch.object(GraderPool, "_count", count):
        run(ranks, folder, "warned")
    return str(raised.value), [record.getMessage() for record in handler.buffer]


@pytest.mark.slow
def test_errors_and_warnings_of_several_ranks(tmp_path):
    """Rank 0 alone creates the folder. The name is taken after it was checked, as by another process."""
    (tmp_path / "taken").mkdir()
    main, other = run_ranks(2, tmp_path / "results", refused_then_warned, tmp_path)
    assert main[0].startswith("'taken' already exists")
    assert other == (f"rank 0: {main[0]}", [])
    assert not (tmp_path / "other").exists()
    (warning,) = main[1]
    assert warning.startswith("grader 'countdown' failed on 1 of 28 answers (3.6%)")
    assert warning.endswith("the first error: ValueError: x")


def test_stored_completions_are_graded_by_one_process(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"question": "1 + 1", "answer": "2", "completions": ["2", "3"]}))
    ranks = nullcontext(Ranks(0, 2, 0))
    connected = mock.patch("bandpo_cli.experiments.eval_run.connected_ranks", return_value=ranks)
    with connected, pytest.raises(UserError, match=r"answers.jsonl: a file is graded by one process"):
        evaluate(samples=path, grader="number", runs_dir=tmp_path)
