"""One dummy entry in each registry. A process imports this module before it runs the command line."""

from collections.abc import Mapping
from typing import Any, Literal

from bandpo_cli.bounds.band import Divergence
from bandpo_cli.bounds.intervals import BoundsFunction, fixed_bounds
from bandpo_cli.config.batch_and_sampling import SamplingConfig
from bandpo_cli.config.task import TaskSettings
from bandpo_cli.methods import METHODS, MethodEntry
from bandpo_cli.methods.settings import MethodSettings
from bandpo_cli.registries import (
    DATASETS,
    DIVERGENCES,
    ENGINES,
    GRADERS,
    TASKS,
    Dataset,
    DivergenceEntry,
    EngineEntry,
    GraderEntry,
    TaskEntry,
)
from bandpo_cli.types import Completion, Problem


class DummySettings(MethodSettings):
    """The interval [1−width, 1+width]."""

    method: Literal["dummy"] = "dummy"
    width: float = 0.1

    def ratio_bounds(self) -> BoundsFunction:
        return fixed_bounds(1.0 - self.width, 1.0 + self.width)


def f_dummy(u: Any, x: Any) -> Any:
    """Return (u−1)², which is chi2."""
    return x * x


DIVERGENCE = Divergence(f_dummy)


def dummy_sampler(config: SamplingConfig, policy: Any) -> Any:
    """Return an engine with the same completions for every prompt: "4" and "5" in turn."""
    from tests.sequential_sampler import SequentialSampler  # imports torch

    tokenizer = policy.tokenizer
    answers = [(*tokenizer.encode(text), tokenizer.eos_token_id) for text in ("4", "5")]

    class DummySampler(SequentialSampler):
        shares_weights = True
        version = 0

        def sample(self, prompts_P: Any, params: Any, seed: int) -> list[list[Completion]]:
            group = [answers[index % 2] for index in range(params.samples)]
            completions = [Completion(ids, (-1.0,) * len(ids), "stop", self.version) for ids in group]
            return [completions for _ in prompts_P]

        def sync(self, model: Any, version: int) -> None:
            self.version = version

    return DummySampler()


class DummyTaskSettings(TaskSettings):
    """Sums of two numbers."""

    name: Literal["dummy"] = "dummy"
    problems: int = 2


class DummyTask:
    """Problems whose answer is 4, and one held-out problem."""

    name = "dummy"

    def __init__(self, config: DummyTaskSettings) -> None:
        self._config, self.notes = config, list[str]()

    def train_problems(self) -> list[Problem]:
        return [_problem(index) for index in range(self._config.problems)]

    def heldout_sets(self) -> Mapping[str, list[Problem]]:
        return {self.name: [_problem(self._config.problems)]}


def _problem(index: int) -> Problem:
    return Problem(f"dummy/{index}", f"{index} + {4 - index} =", "4", "dummy", "dummy")


def first_stage(problem: Problem, text: str) -> tuple[str, str]:
    """Return the arguments of `judge`."""
    return text, problem.answer


def judge(text: str, answer: str) -> bool:
    """Return whether the text is the answer. It runs in a worker process."""
    return text == answer


METHODS.register(MethodEntry("dummy", "a dummy", f"{__name__}:DummySettings"))
DIVERGENCES.register(DivergenceEntry("dummy", "a dummy", f"{__name__}:DIVERGENCE"))
ENGINES.register(EngineEntry("dummy", "a dummy", f"{__name__}:dummy_sampler", shares_weights=True))
GRADERS.register(GraderEntry("dummy", "a dummy", f"{__name__}:first_stage", worker=f"{__name__}:judge"))
TASKS.register(TaskEntry("dummy", "a dummy", f"{__name__}:DummyTaskSettings", f"{__name__}:DummyTask"))
DATASETS.register(
    Dataset("dummy-set", "a dummy", "", "q", "a", train_split="train", eval_split="test", grader="dummy")
)
