"""A small training run that records every call of the loop: to the sampler, grader, optimizer and run folder."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.grading.pool import GraderUse
from bandpo_cli.models.load import load_policy, save_policy
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import Components, build_components
from bandpo_cli.training.loop import StepReport, train
from bandpo_cli.types import Completion, Grade, Problem
from tests.conftest import random_model
from tests.sequential_sampler import SequentialSampler

Weights = dict[str, torch.Tensor]

SETTINGS: dict[str, Any] = {
    "seed": 7,
    "steps": 5,
    "task": {"name": "countdown", "numbers": 3, "max_number": 6},
    "sampling": {"prompts": 4, "samples": 4, "temperature": 0.7, "max_tokens": 6},
    "reward": {"correct": 1.0, "wrong": -1.0, "overlong_buffer": 3, "overlong_penalty": 0.5},
    "optim": {"updates": 2, "lr": 1e-3, "warmup_steps": 3, "schedule": "cosine"},
    "evaluation": {"every": 2, "problems": 8, "samples": 3, "temperature": 1.3, "batch": 7, "k": [1, 2]},
    "checkpoint": {"every": 3, "keep_last": None, "background": False},
}
"""Training and evaluation differ in every setting, so that a test fails if one is used for the other. Checkpoints are
written in the main thread, so that tests know when each is on the disk; test_resume.py has a run that
trains meanwhile."""


def save_small_model(folder: Path) -> Path:
    """Write a random model of 2 layers with the tokenizer of the bundled model."""
    embedded = load_policy(ModelConfig())
    model = random_model(vocab_size=len(embedded.tokenizer), eos_token_id=1, pad_token_id=0)
    save_policy(replace(embedded, model=model), folder)
    return folder


class SampleCall(NamedTuple):
    """A call of `Sampler.sample` and what it returned."""

    prompts_P: list[tuple[int, ...]]
    params: SamplingParams
    seed: int
    completions_PG: list[list[Completion]]


class GradeCall(NamedTuple):
    """A call of the grader and what it returned."""

    problems: list[Problem]
    texts: list[str]
    grades: list[Grade]


class Sampled(NamedTuple):
    """A completion, with what the grader received and returned for it."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    grade: Grade


def shaped_reward(sampled: Sampled, config: RunConfig) -> float:
    """Return the grader's reward on the scale from wrong to correct, less the penalty for the last tokens."""
    reward, length = config.reward, len(sampled.completion.token_ids)
    scaled = reward.wrong + (reward.correct - reward.wrong) * sampled.grade.reward
    if not reward.overlong_buffer:
        return scaled
    free = config.sampling.max_tokens - reward.overlong_buffer
    return scaled - reward.overlong_penalty * max(0, length - free) / reward.overlong_buffer


class Update(NamedTuple):
    """An AdamW step: the largest gradient entry, and the weights after it."""

    largest_gradient: float
    weights: Weights


class Sync(NamedTuple):
    """A call of `Sampler.sync`: the model object, its weights at that moment, and the version."""

    model: PreTrainedModel
    weights: Weights
    version: int


@dataclass
class Step:
    """The calls of one step in order, by name in `order` and with their arguments in the lists."""

    order: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    samples: list[SampleCall] = field(default_factory=list)
    grades: list[GradeCall] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    checkpoints_at_line: list[int] | None = None
    report: StepReport | None = None

    def _training_calls(self) -> int:
        """Return the number of sampling calls before the weights moved; at step 0 there are none."""
        return self.order[: self.order.index("sync")].count("sample") if self.syncs else 0

    @property
    def training(self) -> list[SampleCall]:
        return self.samples[: self._training_calls()]

    @property
    def evaluation(self) -> list[SampleCall]:
        return self.samples[self._training_calls() :]

    def training_groups(self) -> list[list[Sampled]]:
        """Return the groups that were sampled for training, batch after batch."""
        return self._groups(slice(None, self._training_calls()))

    def evaluation_groups(self) -> list[list[Sampled]]:
        return self._groups(slice(self._training_calls(), None))

    def _groups(self, calls: slice) -> list[list[Sampled]]:
        groups = []
        for sampled, graded in zip(self.samples[calls], self.grades[calls], strict=True):
            answers = iter(zip(*graded, strict=True))
            for prompt, completions in zip(sampled.prompts_P, sampled.completions_PG, strict=True):
                of_prompt = zip(completions, islice(answers, len(completions)), strict=True)
                groups.append(
                    [
                        Sampled(problem, prompt, value, text, grade)
                        for value, (problem, text, grade) in of_prompt
                    ]
                )
            assert next(answers, None) is None
        return groups


class Recording:
    """All steps of a run, with the objects that it ran on.

    Attributes:
        steps: the complete steps by number.
        current: the step in progress; after an error the one that did not complete.
        initial: the weights before the first update.
    """

    def __init__(self, config: RunConfig, components: Components, folder: RunFolder) -> None:
        self.config, self.components, self.folder = config, components, folder
        self.steps: dict[int, Step] = {}
        self.current = Step()
        self.initial = weights_of(components.policy.model)

    def weights_before(self, step: int, update: int = 0) -> Weights:
        """Return the trainer's weights before an update (from 0) of a step."""
        if update:
            return self.steps[step].updates[update - 1].weights
        return self.steps[step - 1].updates[-1].weights if step > 1 else self.initial

    def line(self, step: int) -> dict[str, Any]:
        """Return the step's line in metrics.jsonl."""
        (line,) = [read_metric for read_metric in self.folder.read_metrics() if read_metric["step"] == step]
        return line

    def seeds(self, kind: str) -> dict[int, list[int]]:
        """Return the sampling seeds of each step, of `training` or `evaluation`."""
        return {step: [call.seed for call in getattr(value, kind)] for step, value in self.steps.items()}


class RecordingSampler(SequentialSampler):
    """Samples from a copy of the weights that only `sync` replaces, and records every call.

    Args:
        stale: `sync` replaces the weights but not the version that completions report.
    """

    shares_weights = True

    def __init__(self, components: Components, stale: bool = False) -> None:
        self.recording: Recording
        self._stale = stale
        self._model = copy.deepcopy(components.policy.model)
        self._sampler = TransformersSampler(self._model, components.policy.pad_id)

    def sample(
        self, prompts_P: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        completions_PG = self._sampler.sample(prompts_P, params, seed)
        step = self.recording.current
        step.order.append("sample")
        step.samples.append(SampleCall([tuple(ids) for ids in prompts_P], params, seed, completions_PG))
        return completions_PG

    def sleep(self) -> int:
        self.recording.current.order.append("sleep")
        return 0

    def sync(self, model: PreTrainedModel, version: int) -> None:
        step, weights = self.recording.current, weights_of(model)
        step.order.append("sync")
        step.syncs.append(Sync(model, weights, version))
        self._model.load_state_dict(weights)
        self._sampler.sync(self._model, 0 if self._stale else version)


class RecordingGrader:
    """Grades by a hash of problem and text: rewards, correctness and verdicts that do not follow from each other.

    Args:
        uniform: ids of the problems whose completions all receive the same reward.
    """

    def __init__(self, uniform: Collection[str] = ()) -> None:
        self.recording: Recording
        self.uses: dict[str, GraderUse] = {}
        self._uniform = uniform

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        grades = [
            replace(hashed_grade(problem, text), reward=0.5)
            if problem.id in self._uniform
            else hashed_grade(problem, text)
            for problem, text in zip(problems, texts, strict=True)
        ]
        step = self.recording.current
        step.order.append("grade")
        step.grades.append(GradeCall(list(problems), list(texts), grades))
        return grades

    def begin(self, problems: Sequence[Problem], texts: Sequence[str]) -> Callable[[], list[Grade]]:
        return partial(self.grade, problems, texts)

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def hashed_grade(problem: Problem, text: str) -> Grade:
    """Return a grade that depends on the problem and every character of the text."""
    first, second, third = blake2b(f"{problem.id}|{text}".encode(), digest_size=3).digest()
    verdicts = ("correct", "wrong", "malformed", "timeout", "grader-error")
    return Grade(first % 17 / 16, correct=second % 3 == 0, verdict=verdicts[third % 5])


class RecordingFolder(RunFolder):
    """A run folder that records the order of its writes."""

    recording: Recording

    def __getattribute__(self, name: str) -> Any:
        if name in ("write_samples", "write_tokens", "write_eval", "append_metrics"):
            self.recording.current.order.append(name.replace("_", " "))
        if name == "append_metrics":
            self.recording.current.checkpoints_at_line = list(model_checkpoints(self))
        return super().__getattribute__(name)


def prepare_run(
    path: Path,
    model: Path,
    *layers: dict[str, Any],
    uniform: Callable[[list[str]], Collection[str]] = lambda ids: (),
    **sampler: Any,
) -> Recording:
    """Build the components of a run and put the recording ones in place.

    Args:
        uniform: from the ids of the training problems in their order to those whose completions `RecordingGrader`
            gives equal rewards.
        sampler: options of `RecordingSampler`.
    """
    config = resolve([SETTINGS, {"model": {"path": str(model)}}, *layers])
    # No process of an engine, which the recording sampler would replace.
    in_place = resolve([config.model_dump(), {"sampling": {"max_lag": 0}}])
    components = build_components(in_place, build_task(config.task))
    heldout = components.heldout["countdown"]
    ids = [problem.id for problem in components.stream.take(0, 40)]
    recorder, grader = RecordingSampler(components, **sampler), RecordingGrader(uniform(ids))
    folder = RecordingFolder(RunFolder.create(path.parent, path.name).path)
    components = replace(
        components, sampler=recorder, grader=grader, heldout={"first": heldout[:5], "second": heldout[5:]}
    )
    recording = Recording(config, components, folder)
    recorder.recording = grader.recording = folder.recording = recording
    return recording


def execute(recording: Recording, first: int = 0, stop: Callable[[], bool] = lambda: False) -> Recording:
    """Run `train` to its end and record its steps."""

    def note_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        (group,) = optimizer.param_groups
        largest = max(item.grad.abs().max().item() for item in group["params"] if item.grad is not None)
        recording.current.order.append("update")
        recording.current.updates.append(Update(largest, weights_of(recording.components.policy.model)))

    hook = register_optimizer_step_post_hook(note_update)
    config, components, folder = recording.config, recording.components, recording.folder
    try:
        for report in train(
            config,
            components,
            folder,
            watch=lambda phase: recording.current.phases.append(phase),
            first=first,
            stop=stop,
        ):
            recording.current.report = report
            recording.steps[report.step] = recording.current
            recording.current = Step()
    finally:
        hook.remove()
    return recording


def run(path: Path, model: Path, *layers: dict[str, Any], **options: Any) -> Recording:
    """Prepare and execute a run."""
    return execute(prepare_run(path, model, *layers, **options))


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_weights(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
