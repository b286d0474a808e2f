"""Differences between the package and the reference implementation after steps on the same rollouts.

The package runs its real loop with its loader, run folder and optimizer; only the sampler and the grader are replaced
by ones that return given completions and grades.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import with_dtype
from bandpo_cli.metric_names import TOTALS, without_clock
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.processes.ranks import is_gpu
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import read_token_values
from bandpo_cli.training.build import Components, build_components
from bandpo_cli.training.loop import train
from bandpo_cli.types import TIMEOUT, Completion, Grade, Insertion, Problem
from tests.conftest import random_model
from tests.oracle.reference import GivenGroup, GivenRollout, ReferenceTrainer, StepResult
from tests.sequential_sampler import SequentialSampler

PROMPTS = ("1 2 3=6:", "7 8=15:", "4 4 9 1=18:", "5=5:", "6 3=9:", "2 2 2=8:", "9 9=0:", "1 8 8=17:")
END, MAX_TOKENS, SAMPLES = 1, 6, 4
BASE: dict[str, Any] = {
    "steps": 5,
    "sampling": {"prompts": 4, "samples": SAMPLES, "max_tokens": MAX_TOKENS},
    # A large eps: AdamW divides the gradient by its own size, which would magnify rounding errors to complete steps.
    "optim": {"updates": 4, "lr": 4e-3, "warmup_steps": 2, "eps": 1e-5, "weight_decay": 0.01},
    "evaluation": {"every": 1},  # makes the loop write the token table; there is no evaluation set
    "checkpoint": {"every": 0},
    "tracking": {"mlflow": False, "tokens_every": 1},
}
"""Settings of all cases, with a learning rate at which ratios leave their bounds within the updates of a step."""


def save_model(folder: Path, kind: str = "qwen2") -> Path:
    """Write a random model of 2 layers with the bundled model's tokenizer; its distributions are far from uniform."""
    ids = {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": None}
    model = random_model(kind, seed=5, vocab_size=20, **ids)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10 / 6)
        if kind == "llama":
            model.get_output_embeddings().weight.mul_(10 / 6)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class GivenTask:
    """The prompts of `PROMPTS` as a task without evaluation sets."""

    name = "given"

    def train_problems(self) -> Sequence[Problem]:
        return [Problem(prompt, prompt, "", "given", "countdown") for prompt in PROMPTS]

    def heldout_sets(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    def notes(self) -> list[str]:
        return []


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_path())


def grade_text(text: str) -> Grade:
    """Return a grade that depends on the text alone: right, half right, wrong, or without a verdict.

    The grade of a grader error has a reward of 9, which must have no effect.
    """
    kind = sum(map(ord, text)) % 7
    verdicts = ["correct", "wrong", "partial", "malformed", "correct", "timeout", "grader-error"]
    credits = [1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 9.0]
    return Grade(credits[kind], credits[kind] == 1.0, verdicts[kind], has_reward=kind < 5)


class GivenSampler(SequentialSampler):
    """Samples one token at a time, reports log-probs with `noise` nats, and keeps what it returned in `given`.

    Without noise it reports entropies, unless `ahead`: then it samples from a copy that only `sync` replaces.

    With `turns` there are tokens that are not sampled before the second and the fourth token of a completion.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        noise: float,
        shares_weights: bool,
        seed: int,
        ahead: bool,
        turns: bool = False,
    ) -> None:
        self.shares_weights, self._ahead, self._turns = shares_weights, ahead, turns
        self.given: list[list[GivenGroup]] = []
        self._model = copy.deepcopy(model) if ahead else model
        self._temperature, self._noise, self._reports_entropies = temperature, noise, not noise and not ahead
        self._random, self._version = random.Random(seed), 0

    def sample(self, prompts_P: Sequence[Any], params: SamplingParams, seed: int) -> list[list[Completion]]:
        groups = [self._group(tuple(prompt), place) for place, prompt in enumerate(prompts_P)]
        self.given.append(groups)
        return [[self._completion(rollout) for rollout in group] for group in groups]

    def _completion(self, rollout: GivenRollout) -> Completion:
        reason = "length" if rollout.truncated else "stop"
        entropies = rollout.sampler_entropies if self._reports_entropies else ()
        inserted = tuple(starmap(Insertion, rollout.inserted))
        return Completion(
            rollout.token_ids, rollout.sampler_logprobs, reason, self._version, entropies, inserted
        )

    @torch.no_grad()
    def _group(self, prompt: tuple[int, ...], place: int) -> GivenGroup:
        rows = [list(prompt) for _ in range(SAMPLES)]
        logprobs: list[list[float]] = [[] for _ in rows]
        entropies: list[list[float]] = [[] for _ in rows]
        sampled: list[list[int]] = [[] for _ in rows]
        inserted = ((1, (3, 4 + place % 5)), (3, (6,))) if self._turns else ()
        for step in range(MAX_TOKENS):
            rows = [
                row + [token for index, ids in inserted if index == step for token in ids] for row in rows
            ]
            logits = self._model(input_ids=torch.tensor(rows), use_cache=False).logits[:, -1].double()
            policies = torch.log_softmax(logits / self._temperature, dim=-1).tolist()
            for row, tokens, entry, policy in zip(rows, sampled, logprobs, policies, strict=True):
                # Partly uniform and more often at an end than the model: rare tokens, completions of every length.
                shares = [0.7 * math.exp(item) + 0.3 / len(policy) for item in policy]
                shares[END] += 0.15
                tokens += self._random.choices(range(len(policy)), shares)
                row.append(tokens[-1])
                noise = self._random.gauss(0, self._noise)
                entry.append(min(policy[row[-1]] + noise, -1e-3) if self._noise else policy[row[-1]])
            entropy = torch.distributions.Categorical(logits=logits).entropy().tolist()
            for entry, value in zip(entropies, entropy, strict=True):
                entry.append(value)
        columns = zip(sampled, logprobs, entropies, strict=True)
        rollouts = [self._rollout(prompt, inserted, *values) for values in columns]
        # Every third group repeats one completion, so that its rewards are all equal.
        return [rollouts[0]] * SAMPLES if place % 3 == 2 else rollouts

    def _rollout(
        self, prompt: tuple[int, ...], inserted: Any, ids: list[int], *values: list[float]
    ) -> GivenRollout:
        length = ids.index(END) + 1 if END in ids else len(ids)
        inserted = tuple(item for item in inserted if item[0] < length)
        last = inserted[-1][0] if inserted else 0  # where the last turn begins, which is graded
        grade = grade_text(tokenizer().decode(ids[last:length], skip_special_tokens=True))
        columns = (tuple(column[:length]) for column in (ids, *values))
        about = grade.reward, grade.correct, grade.verdict, END not in ids
        return GivenRollout(prompt, *columns, *about, inserted)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        self._version = version
        if self._ahead:
            self._model.load_state_dict(model.state_dict())


class TextGrader:
    """Grades by `grade_text`; a timeout has the grade that the workers of the package give it."""

    def __init__(self, timeout_reward: str) -> None:
        self._timeout = replace(TIMEOUT, has_reward=timeout_reward == "wrong")

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        grades = map(grade_text, texts)
        return [self._timeout if grade.verdict == "timeout" else grade for grade in grades]

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class Differences(NamedTuple):
    """Largest differences between package and reference over the steps of a case, relative unless said otherwise.

    A metric, a column of the token table or a loss is compared relative to its size or 0.01, whichever is larger.
    Counts may differ by tokens whose ratio is a bound up to rounding; where there are such tokens, gradient weights are
    not compared. Gradients and weights are compared by norms, weights in proportion to their change since the start.
    """

    loss: float
    gradient: float
    weights: float
    metrics: float
    columns: float
    worst_metric: str


@dataclass(frozen=True)
class Case:
    """The outcome of a comparison: metrics after step 0 without `time/`, and what the reference computed."""

    differences: Differences
    records: list[dict[str, float]]
    results: list[StepResult]
    components: Components
    reference: ReferenceTrainer


def compare(
    folder: Path,
    model_folder: Path,
    layer: dict[str, Any],
    steps: int = 1,
    exact_sampler: bool = True,
    ahead: bool = False,
    seed: int = 0,
    turns: bool = False,
) -> Case:
    """Run `steps` steps of the package below `folder` and of the reference on the same rollouts.

    In bfloat16, where gradients are inexact, the reference's AdamW uses the package's gradients.

    Args:
        exact_sampler: the sampler reports that it runs the trainer's own model.
        ahead: the package samples each batch during the step before; the reference trains on them in their order.
        seed: of the completions.
        turns: the completions have tokens that were not sampled.
    """
    config = resolve([BASE, {"model": {"path": str(model_folder)}}, layer])
    config = with_dtype(config, is_gpu(config.model.device))
    settings = config.model_dump()
    dtype = getattr(torch, config.model.dtype)
    start = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
    built = build_components(config, GivenTask())
    if ahead:  # after the components, which would start the process of an engine
        config = resolve([config.model_dump(), {"sampling": {"max_lag": 1}}])
    narrow = config.model.dtype == "bfloat16"
    noise = 0.05 if narrow else 0.0 if exact_sampler else 0.3
    about = config.sampling.temperature, noise, exact_sampler, seed, ahead, turns
    sampler = GivenSampler(built.policy.model, *about)
    grader = TextGrader(config.grading.timeout_reward)
    components = replace(built, sampler=sampler, grader=grader)
    gradients = record_gradients(components)
    run = RunFolder.create(folder, "package")
    # In 16 bits no sampler is exact, not even one that runs the trainer's own model.
    reference = ReferenceTrainer(start, settings, exact_sampler and not narrow and not ahead, narrow=narrow)
    results = []
    columns = 0.0
    loop = train(config, components, run)
    assert next(loop).step == 0
    for step in range(1, steps + 1):
        done = len(gradients)
        assert next(loop).step == step
        take = (lambda index, done=done: gradients[done + index]) if narrow else None
        batches = 1 if ahead else len(sampler.given)
        given, sampler.given = sampler.given[:batches], sampler.given[batches:]
        result = reference.step(given, take)
        results.append(result)
        columns = max(columns, _column_difference(run.path / f"tokens/step-{step:06d}.parquet", result))
        if (
            not narrow and not config.sampling.dynamic
        ):  # the groups that were sampled are those of the updates
            check_token_values(run.path / f"token_values/step-{step:06d}.parquet", result, reference)
    loop.close()
    lines = [without_clock(record) for record in run.read_metrics()[1:]]
    records = [{key: value for key, value in line.items() if key not in TOTALS} for line in lines]
    lags, ages = (
        [record.pop(name, 0) for record in records] for name in ("sampler/lag", "sampler/lag_steps")
    )
    assert lags == [config.optim.updates * age for age in ages]
    assert ages == [0, *([1] * (steps - 1))] if ahead else not any(ages)
    differences = _differences(records, results, gradients, components, reference, columns)
    return Case(differences, records, results, components, reference)


def record_gradients(components: Components) -> list[list[torch.Tensor]]:
    """Return a list that receives the gradients of each update, float64 copies from before clipping."""
    recorded: list[list[torch.Tensor]] = []
    step = components.optimizer.step

    def spy(*args: Any) -> float:
        pairs = [(p, p.grad) for p in components.optimizer._parameters]
        recorded.append([(torch.zeros_like(p) if g is None else g).double().clone() for p, g in pairs])
        return step(*args)

    components.optimizer.step = spy
    return recorded


def relative(value: float, expected: float) -> float:
    """Return |value − expected| in proportion to |expected|, or to 0.01 where that is larger."""
    if value == expected:
        return 0.0
    return abs(value - expected) / max(abs(expected), 0.01)


def _column_difference(path: Path, result: StepResult) -> float:
    """Return the largest relative difference between the token table and the tokens of the reference."""
    table = pd.read_parquet(path)
    tokens = [token for update in result.updates for token in update.tokens if token.has_ratio]
    assert len(table) == len(tokens)
    names = ("old_logprob", "ratio", "lower", "upper")
    expected = {name: [getattr(token, name) for token in tokens] for name in names}
    expected["advantage"] = [
        0.0 if token.is_dropped or not (token.importance and token.has_top_entropy) else token.advantage
        for token in tokens
    ]
    return max(
        relative(*values)
        for column, wanted in expected.items()
        for values in zip(table[column].tolist(), wanted, strict=True)
    )


def check_token_values(path: Path, result: StepResult, reference: ReferenceTrainer) -> None:
    """Require the values per token to be those of the reference; some are stored in float16."""
    found, tokens = read_token_values(path), [token for update in result.updates for token in update.tokens]
    is_exact, corrects = reference.exact_sampler, reference.corrects()
    expected = {
        "old_logprob": [(reference.known_old_logprob(t), True) for t in tokens],
        "entropy": [(t.entropy, is_exact or t.is_measured) for t in tokens],
        "importance": [(t.importance, corrects and t.is_measured) for t in tokens],
        "ratio": [(t.ratio, t.has_ratio) for t in tokens],
    }
    if reference.has_interval:
        expected |= {end: [(getattr(t, end), t.has_ratio) for t in tokens] for end in ("lower", "upper")}
    for name, pairs in expected.items():
        wanted = [value if is_known else math.nan for value, is_known in pairs]
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-3, atol=1e-4, err_msg=name)
    differ = sum(t.clipped != kind for t, kind in zip(tokens, found.clipped.tolist(), strict=True))
    assert differ <= _undecided(result) * len(tokens)
    advantages = [tokens[start].advantage for start in np.cumsum(found.lengths) - found.lengths]
    np.testing.assert_allclose(found.advantage, advantages, rtol=1e-4, atol=1e-6)


def _differences(
    records: Any, results: Any, gradients: Any, components: Any, reference: ReferenceTrainer, columns: float
) -> Differences:
    """Return all differences of a case; `columns` is that of the token tables."""
    updates = [update for result in results for update in result.updates]
    assert len(updates) == len(gradients)
    gradient = max(
        norm([a - b for a, b in zip(ours, update.gradient, strict=True)]) / max(norm(update.gradient), 1e-6)
        for ours, update in zip(gradients, updates, strict=True)
    )
    weights = [parameter.detach().double() for parameter in components.optimizer._parameters]
    start = list(reference.start.parameters())
    change = norm([a - b.detach() for a, b in zip(reference.masters, start, strict=True)])
    apart = norm([a - b for a, b in zip(weights, reference.masters, strict=True)])
    worst, name = 0.0, ""
    for record, result in zip(records, results, strict=True):
        assert set(record) ^ {"step", *result.record} == set()
        for key, expected in result.record.items():
            difference = relative(record[key], expected)
            is_count = key.startswith("clip/") and abs(record[key] - expected) <= _undecided(result) + 1e-12
            is_undecided = key.startswith("gradient/") and _undecided(result) > 0
            if difference > worst and not is_count and not is_undecided:
                worst, name = difference, key
    pairs = zip(records, results, strict=True)
    loss = max(relative(a["optim/loss"], b.record["optim/loss"]) for a, b in pairs)
    return Differences(loss, gradient, apart / change, worst, columns, name)


def _undecided(result: StepResult) -> float:
    """Return the share of tokens that rounding moves across a bound: counts may differ by as much."""
    tokens = [token for update in result.updates for token in update.tokens]
    close = [t for t in tokens if min(abs(t.ratio - t.lower), abs(t.ratio - t.upper)) < 1e-5 * t.ratio]
    return len(close) / len(tokens)


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors))
