"""Evaluation grades in a thread while it samples: same batches, same order, a limit, and an end at an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import RunError
from bandpo_cli.evaluation.batches import Batch
from bandpo_cli.evaluation.evaluate import MAX_UNGRADED_BATCHES, sample_batches
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.sampling.base import SampleRequest, SamplingParams, StaleEngineError, StreamingSampler
from bandpo_cli.sampling.rollouts import EncodedPrompt, PromptEncoder
from bandpo_cli.types import Completion, Grade, Problem

SAMPLES = 2
LIMIT_S = 30.0


def problems(name: str, number: int) -> list[Problem]:
    return [Problem(f"{name}-{index}", "?", "1", name, "countdown") for index in range(number)]


SETS = {"a": problems("a", 7), "b": problems("b", 4)}


class Engine:
    """Samples one token per completion, which depends on the seed and the place."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(
            batch_decode=lambda ids, skip_special_tokens: [str(each) for each in ids]
        )
        self.sampled = 0
        self.threads: set[int] = set()

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        self.threads.add(threading.get_ident())
        return [EncodedPrompt("?", (1,)) for _ in problems_P]

    def sample(self, prompts_P: Sequence[Any], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.threads.add(threading.get_ident())
        self.sampled += 1
        return [
            [Completion((seed % 997 + place,), (-1.0,), "stop", 0) for place in range(params.samples)]
            for _ in prompts_P
        ]


class Streaming(Engine):
    """Takes three requests before it returns the completions of the first one."""

    def sample_stream(
        self, requests: Iterator[SampleRequest], params: SamplingParams
    ) -> Iterator[list[list[Completion]]]:
        queue: list[SampleRequest] = []
        for request in requests:
            queue.append(request)
            if len(queue) == 3:
                first = queue.pop(0)
                yield self.sample(first.prompts_P, params, first.seed)
        for request in queue:
            yield self.sample(request.prompts_P, params, request.seed)


def grade_by_text(problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
    return [
        Grade(float(sum(map(ord, text)) % 2), correct=sum(map(ord, text)) % 2 == 1, verdict="wrong")
        for text in texts_N
    ]


def batches_of(engine: Any, grade: Any = grade_by_text, cancel: Any = lambda: None) -> Iterator[Batch]:
    """Return an iterator over batches of two problems."""
    params = SamplingParams(SAMPLES, 1.0, 10, (0,))
    encoder: PromptEncoder = engine
    return sample_batches(engine, encoder, grade, SETS, params, 2 * SAMPLES, 0, 0, cancel=cancel)


def test_a_streaming_engine_gives_the_same_batches_in_the_same_order() -> None:
    engine, streaming = Engine(), Streaming()
    assert isinstance(streaming, StreamingSampler)
    assert not isinstance(engine, StreamingSampler)
    expected = list(batches_of(engine))
    assert [batch.key for batch in expected] == [(0, 0), (0, 2), (0, 4), (0, 6), (1, 0), (1, 2)]
    assert {row["accuracy"] for batch in expected for row in batch.rows} == {0.0, 1.0}
    assert list(batches_of(streaming)) == expected


@pytest.mark.parametrize("engine", [Engine(), Streaming()], ids=["one by one", "streaming"])
def test_engine_and_tokenizer_are_called_from_the_callers_thread_alone(engine: Engine) -> None:
    graded_in: set[int] = set()

    def grade(problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        graded_in.add(threading.get_ident())
        return grade_by_text(problems_N, texts_N)

    list(batches_of(engine, grade))
    assert engine.threads == {threading.get_ident()}
    assert len(graded_in) == 1
    assert graded_in.isdisjoint(engine.threads)


def test_sampling_goes_on_while_a_batch_is_graded_and_stops_at_the_limit() -> None:
    """The first grading call waits until the engine has sampled all batches that it may sample meanwhile."""
    engine = Engine()
    counts: list[int] = []

    def grade(problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        end = time.monotonic() + LIMIT_S
        while engine.sampled <= MAX_UNGRADED_BATCHES and time.monotonic() < end:
            time.sleep(0.001)
        if not counts:
            time.sleep(0.1)  # a sampler without limit would be far ahead now
        counts.append(engine.sampled)
        return grade_by_text(problems_N, texts_N)

    assert len(list(batches_of(engine, grade))) == 6
    assert counts[0] == MAX_UNGRADED_BATCHES + 1


def test_a_graded_batch_is_returned_before_the_next_one_is_sampled() -> None:
    engine = Engine()
    done = threading.Event()

    def grade(problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        done.set()
        return grade_by_text(problems_N, texts_N)

    sample = engine.sample

    def sample_slowly(*arguments: Any) -> Any:
        if engine.sampled:
            assert done.wait(LIMIT_S)
            time.sleep(0.05)  # the future is complete shortly after the function returns
        return sample(*arguments)

    engine.sample = sample_slowly  # type: ignore[method-assign]
    next(batches_of(engine, grade))
    assert engine.sampled <= 2


@pytest.mark.parametrize(
    "error", [RunError("the grader failed"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_errors_of_grading_end_the_evaluation(error: BaseException) -> None:
    def grade(problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        raise error

    with pytest.raises(type(error)):
        list(batches_of(Engine(), grade))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grading_")]


def test_an_error_of_the_engine_cancels_the_answer_in_work(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The custom grader sleeps for ever, with a deadline far beyond the test's."""
    (tmp_path / "sleeper.py").write_text("import time\ndef judge(text, answer):\n    time.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = Engine()
    sample = engine.sample

    def fail_at_the_second(*arguments: Any) -> Any:
        if engine.sampled:
            raise StaleEngineError("stale")
        return sample(*arguments)

    engine.sample = fail_at_the_second  # type: ignore[method-assign]
    sets = {"a": [Problem(f"{index}", "?", "1", "a", "sleeper:judge") for index in range(4)]}
    params = SamplingParams(SAMPLES, 1.0, 10, (0,))
    with GraderPool(GradingConfig(deadline=1000.0, workers=1)) as pool:
        batches = sample_batches(
            engine, engine, pool.grade, sets, params, 2 * SAMPLES, 0, 0, cancel=pool.cancel,  # type: ignore[arg-type]
        )  # fmt: skip
        with pytest.raises(StaleEngineError):
            list(batches)
        with pytest.raises(RunError, match="cancelled"):
            pool.grade(sets["a"], ["1"] * 4)
