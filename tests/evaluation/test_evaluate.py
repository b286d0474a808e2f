"""Batches of an evaluation: sizes, seeds, a resume, grading in a thread beside the sampling, and several ranks."""

import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import RunError
from bandpo_cli.evaluation import evaluate
from bandpo_cli.evaluation.evaluate import MAX_UNGRADED_BATCHES, Batch, regrade_batches, sample_batches
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling.prompt_encoding import EncodedPrompt
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams, StaleEngineError
from bandpo_cli.storage.run_folder import PartKey
from bandpo_cli.tasks.completions import StoredCompletion, StoredProblem
from bandpo_cli.types import Completion, Grade, Problem
from tests.sequential_sampler import SequentialSampler
from tests.training.several_ranks import run_ranks

SAMPLES = 2
LIMIT_S = 30.0
PARAMS = SamplingParams(SAMPLES, 1.0, 10, (0,))


def problems(label: str, count: int) -> list[Problem]:
    return [Problem(f"{label}-{index}", "?", "1", label, "number") for index in range(count)]


SETS = {"a": problems("a", 11), "b": problems("b", 1), "c": problems("c", 4)}


class Engine(SequentialSampler):
    """Engine, encoder and grader. Completions follow the contract of `Sampler`: prompt i depends on `seed + i`.

    Sampling communicates, as that of a sharded model does, and fails if the ranks are not at the same call.
    """

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        self.ranks = ranks
        self.prompts: list[int] = []  # per call of `sample`
        self.seeds: list[int] = []
        self.graded: list[int] = []
        self.threads: set[int] = set()
        self.grading_threads: set[int] = set()
        self.random = random.Random(ranks.rank)
        self.tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [*map(str, ids)])

    @property
    def sampled(self) -> int:
        return len(self.prompts)

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        self.threads.add(threading.get_ident())
        return [EncodedPrompt("?", (1,)) for _ in problems_P]

    def sample(self, prompts_P: Sequence[Any], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.threads.add(threading.get_ident())
        self.prompts.append(len(prompts_P))
        self.seeds.append(seed)
        assert self.ranks.gather(("sample", self.sampled)) == [("sample", self.sampled)] * self.ranks.size
        firsts, numbers = [(seed + i) % 9973 for i in range(len(prompts_P))], range(params.samples)
        return [[Completion((first + k,), (-1.0,), "stop", 0) for k in numbers] for first in firsts]

    def sync(self, model: object, version: int) -> None: ...

    def grade(self, problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        if self.ranks.size > 1:
            time.sleep(self.random.choice([0.0, 0.02]))
        self.graded.append(len(texts_N))
        self.grading_threads.add(threading.get_ident())
        odd = [sum(map(ord, text)) % 2 == 1 for text in texts_N]
        return [Grade(float(correct), correct, verdict="wrong") for correct in odd]


class Streaming(Engine):
    """Takes three requests before it returns the completions of the first one."""

    def sample_stream(
        self, requests: Iterable[SampleRequest | None], params: SamplingParams, in_order: bool = True
    ) -> Generator[tuple[int, list[list[Completion]]], None, None]:
        queue = []
        for item in enumerate(filter(None, requests)):
            queue.append(item)
            if len(queue) == 3:
                number, first = queue.pop(0)
                yield number, self.sample(first.prompts_P, params, first.seed)
        for number, request in queue:
            yield number, self.sample(request.prompts_P, params, request.seed)


def batches_of(engine: Any, per_batch: int = 3, seed: int = 7, **options: Any) -> Iterator[Batch]:
    """Return an iterator over batches of `per_batch` problems."""
    return sample_batches(engine, engine, engine.grade, SETS, PARAMS, per_batch * SAMPLES, seed, 0, **options)


@pytest.mark.parametrize("kind", [Engine, Streaming])
def test_batches_cover_each_problem_once_with_unique_keys_and_seeds(kind):
    """Engine and tokenizer are called from this thread, and one other thread grades."""
    engine = kind()
    batches = list(batches_of(engine))
    assert engine.threads == {threading.get_ident()}
    assert len(engine.grading_threads - engine.threads) == len(engine.grading_threads) == 1
    assert [batch.key for batch in batches] == [(0, 0), (0, 3), (0, 6), (0, 9), (1, 0), (2, 0), (2, 3)]
    assert [batch.label for batch in batches] == ["a"] * 4 + ["b"] + ["c"] * 2
    assert engine.graded == [6, 6, 6, 4, 2, 6, 2]
    ids = [row["problem_id"] for batch in batches for row in batch.rows]
    assert ids == [problem.id for problem in chain(*SETS.values()) for _ in range(SAMPLES)]
    assert {row["accuracy"] for batch in batches for row in batch.rows} == {0.0, 1.0}
    assert batches == list(batches_of(Engine()))
    list(batches_of(engine, seed=8))
    assert len(engine.seeds) == len(set(engine.seeds)) == 2 * 7
    done = [PartKey(0, 3), PartKey(2, 0)]  # a resume samples the others
    assert list(batches_of(kind(), done=done)) == [batch for batch in batches if batch.key not in done]


def test_the_completions_of_a_problem_do_not_depend_on_the_size_of_the_batches():
    """They have a seed per problem; those of two problems and of two sets differ."""
    batches = (batches_of(Engine(), per_batch=size) for size in (2, 7))
    small, large = ([row for batch in of_size for row in batch.rows] for of_size in batches)
    assert small == large
    assert len({row["text"] for row in small[::SAMPLES]}) == 16


def test_the_batch_size_limits_batches_of_stored_completions():
    """The problem with the most completions sets the size: batches of six are three problems of two."""
    engine = Engine()
    sizes = [1, 2, 1, 2, 2, 1, 2]
    completions = [[StoredCompletion("1")] * size for size in sizes]
    sets = {"a": [*map(StoredProblem, problems("a", len(sizes)), completions)]}
    batches = list(regrade_batches(engine.grade, sets, batch_size=6))
    assert [batch.key for batch in batches] == [(0, 0), (0, 3), (0, 6)]
    assert engine.graded == [1 + 2 + 1, 2 + 2 + 1, 2]
    again = list(regrade_batches(engine.grade, sets, batch_size=6, done=[PartKey(0, 3)]))
    assert again == [batches[0], batches[2]]
    (alone, *_) = list(regrade_batches(engine.grade, sets, batch_size=1))
    assert len(alone.rows) == 1


def test_sampling_continues_while_a_batch_is_graded_and_stops_at_the_limit():
    """The first grading call waits until the engine has sampled all batches that it may sample meanwhile."""
    counts = []

    class Waiting(Engine):
        def grade(self, *arguments: Any) -> Any:
            end = time.monotonic() + LIMIT_S
            while self.sampled <= MAX_UNGRADED_BATCHES and time.monotonic() < end:
                time.sleep(0.001)
            if not counts:
                time.sleep(0.1)  # a sampler without limit would be far ahead now
            counts.append(self.sampled)
            return super().grade(*arguments)

    assert len(list(batches_of(Waiting()))) == 7
    assert counts[0] == MAX_UNGRADED_BATCHES + 1


def test_a_graded_batch_is_returned_before_the_next_one_is_sampled(monkeypatch):
    """The batch is graded at once here; the thread of a busy machine may be later than the next sample."""

    class Immediate(ThreadPoolExecutor):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            future = super().submit(function, *arguments, **options)
            wait([future])
            return future

    monkeypatch.setattr(evaluate, "ThreadPoolExecutor", Immediate)
    engine = Engine()
    for sampled, _ in enumerate(batches_of(engine), start=1):
        assert engine.sampled == sampled


@pytest.mark.parametrize("error", [RunError("the grader failed"), KeyboardInterrupt()])
def test_errors_of_grading_end_the_evaluation(error):
    class Failing(Engine):
        def grade(self, *_: Any) -> list[Grade]:
            raise error

    with pytest.raises(type(error)):
        list(batches_of(Failing()))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grading_")]


def test_an_error_of_the_engine_cancels_the_answer_in_work(tmp_path, monkeypatch):
    """The custom grader sleeps for ever, with a deadline far beyond the test's."""
    (tmp_path / "sleeper.py").write_text("import time\ndef judge(text, answer):\n    time.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Stale(Engine):
        def sample(self, *arguments: Any) -> Any:
            if self.sampled:
                raise StaleEngineError("stale")
            return super().sample(*arguments)

    engine = Stale()
    sets = {"a": [Problem(f"{index}", "?", "1", "a", "sleeper:judge") for index in range(4)]}
    with GraderPool(GradingConfig(deadline=1000.0, workers=1)) as pool:
        with pytest.raises(StaleEngineError):
            list(sample_batches(engine, engine, pool.grade, sets, PARAMS, 4, 0, 0, cancel=pool.cancel))
        with pytest.raises(RunError, match="cancelled"):
            pool.grade(sets["a"], ["1"] * 4)


def evaluated(ranks: Ranks) -> tuple[list[Batch], list[int]]:
    """Return the batches, and the number of prompts of each sampling call on this rank."""
    engine = Streaming(ranks)
    return list(batches_of(engine, ranks=ranks)), engine.prompts


@pytest.mark.slow
def test_several_ranks_give_the_batches_of_one(tmp_path):
    """On every rank, whatever the times of sampling and grading."""
    expected, prompts = evaluated(SINGLE)
    results = run_ranks(3, tmp_path, evaluated)
    for batches, _ in results:
        assert batches == expected
    shares = [share for _, share in results]
    assert [sum(calls) for calls in zip(*shares, strict=True)] == prompts == [3, 3, 3, 2, 1, 3, 1]
    assert 0 in shares[0], "a rank without a problem of a batch takes part in it"
    assert max(max(calls) - min(calls) for calls in zip(*shares, strict=True)) == 1
