"""Batches of an evaluation: sizes, seeds, and equal batches after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bandpo_cli.evaluation.batches import Batch, regrade_batches
from bandpo_cli.evaluation.evaluate import sample_batches
from bandpo_cli.sampling.base import SamplingParams
from bandpo_cli.sampling.rollouts import EncodedPrompt
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.tasks.completions import StoredCompletion, StoredProblem
from bandpo_cli.types import Completion, Grade, Problem

SAMPLES = 4


def problems(label: str, count: int) -> list[Problem]:
    return [Problem(f"{label}/{index}", "?", "1", label, "number") for index in range(count)]


class Recorder:
    """Sampler, prompt encoder and grader in one; records the seeds of `sample` and the sizes of `grade`."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.graded: list[int] = []
        self.tokenizer = SimpleNamespace(
            batch_decode=lambda ids, skip_special_tokens: [str(each) for each in ids]
        )

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        return [EncodedPrompt("?", (1,)) for _ in problems_P]

    def sample(self, prompts_P: Sequence[Any], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.seeds.append(seed)
        each = Completion((seed % 1000,), (-1.0,), "stop", policy_version=0)
        return [[each] * params.samples for _ in prompts_P]

    def grade(self, problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        self.graded.append(len(texts_N))
        return [Grade(0.0, correct=False, verdict="wrong") for _ in texts_N]

    def sampled_batches(
        self, sets: dict[str, list[Problem]], seed: int = 0, done: Sequence[PartKey] = ()
    ) -> list[Batch]:
        """Sample batches of two problems."""
        params = SamplingParams(SAMPLES, 1.0, 10, (0,))
        encoder: Any = self
        return list(sample_batches(self, encoder, self.grade, sets, params, 2 * SAMPLES, seed, 0, done))  # type: ignore[arg-type]


SETS = {"a": problems("a", 5), "b": problems("b", 4)}


def test_seeds_differ_by_batch_set_and_run_seed() -> None:
    recorder = Recorder()
    recorder.sampled_batches(SETS, seed=0)
    recorder.sampled_batches(SETS, seed=1)
    assert len(recorder.seeds) == len(set(recorder.seeds)) == 2 * 5


def test_sampled_batches_cover_each_problem_once_with_unique_keys() -> None:
    recorder = Recorder()
    batches = recorder.sampled_batches(SETS)
    assert [batch.key for batch in batches] == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2)]
    assert [batch.label for batch in batches] == ["a", "a", "a", "b", "b"]
    assert recorder.graded == [8, 8, 4, 8, 8]
    ids = [row["problem_id"] for batch in batches for row in batch.rows]
    assert ids == [problem.id for each in SETS.values() for problem in each for _ in range(SAMPLES)]


def test_a_resume_samples_only_the_missing_batches_unchanged() -> None:
    all_of_them = Recorder().sampled_batches(SETS)
    done = [PartKey(0, 2), PartKey(1, 0)]
    assert Recorder().sampled_batches(SETS, done=done) == [
        batch for batch in all_of_them if batch.key not in done
    ]


def test_the_batch_size_limits_batches_of_stored_completions() -> None:
    """The problem with the most completions sets the size: batches of six are three problems of two."""
    recorder = Recorder()
    sizes = [1, 2, 1, 2, 2, 1, 2]
    sets = {
        "a": [
            StoredProblem(problem, [StoredCompletion("1")] * size)
            for problem, size in zip(problems("a", len(sizes)), sizes, strict=True)
        ]
    }
    batches = list(regrade_batches(recorder.grade, sets, batch_size=6))
    assert [batch.key for batch in batches] == [(0, 0), (0, 3), (0, 6)]
    assert recorder.graded == [1 + 2 + 1, 2 + 2 + 1, 2]
    again = list(regrade_batches(recorder.grade, sets, batch_size=6, done=[PartKey(0, 3)]))
    assert again == [batches[0], batches[2]]
    (alone, *_) = list(regrade_batches(recorder.grade, sets, batch_size=1))
    assert len(alone.rows) == 1
