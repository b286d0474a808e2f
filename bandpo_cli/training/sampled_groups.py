"""Graded rollouts of a step, and the checkpoint file with rollouts that were sampled ahead.

The batch of the next step cannot be sampled again after a resume: it is from the weights before those of the
checkpoint. The file has what its sampling and grading gave; problems and prompts follow from their place in the stream,
texts from the tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from bandpo_cli.sampling.rollouts import EncodedPrompt
from bandpo_cli.types import FLOAT_TYPE, TOKEN_TYPE, Completion, FinishReason, Grade, Group, Problem, Rollout

_METADATA = "rollouts"


@dataclass(frozen=True)
class SampledGroups:
    """The graded rollouts of a step.

    Attributes:
        step: the step that trains on them.
        version: number of optimizer updates of the weights that sampled them.
        position: place of their first problem in the stream of training problems.
        seconds: the time that sampling took; 0 where a file was read, which does not have it.
        groups: the groups that the step trains on, `sampling.prompts` of them.
        sampled: all groups sampled for the step, of consecutive problems; more than `groups` where dynamic sampling
            dropped some.
    """

    step: int
    version: int
    position: int
    seconds: float
    groups: Sequence[Group]
    sampled: Sequence[Group]

    @property
    def nbytes(self) -> int:
        """Approximate size of the file that `write_sampled` writes, in bytes."""
        completions = [rollout.completion for group in self.sampled for rollout in group.rollouts_G]
        return sum(12 * len(completion.token_ids) + 128 for completion in completions)


def write_sampled(path: Path, batch: SampledGroups) -> None:
    """Write a batch as a safetensors file: a tensor per value of the tokens, the rest as JSON in its metadata."""
    rollouts = [rollout for group in batch.sampled for rollout in group.rollouts_G]
    completions = [rollout.completion for rollout in rollouts]
    tensors = {
        "lengths": torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int32),
        "token_ids": _joined(completion.token_ids for completion in completions),
        "logprobs": _joined(completion.logprobs for completion in completions),
        "entropies": _joined(completion.entropies for completion in completions),
    }
    indices = {id(group): index for index, group in enumerate(batch.sampled)}
    metadata = {
        "step": batch.step,
        "version": batch.version,
        "position": batch.position,
        "trained": [indices[id(group)] for group in batch.groups],
        "group_sizes": [len(group.rollouts_G) for group in batch.sampled],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "grades": [_as_json(rollout.grade) for rollout in rollouts],
    }
    save_file(tensors, path, {_METADATA: json.dumps(metadata)})


def read_sampled(
    path: Path,
    problems_at: Callable[[int, int], Sequence[Problem]],
    encode: Callable[[Sequence[Problem]], Sequence[EncodedPrompt]],
    decode: Callable[[Sequence[Sequence[Completion]]], Sequence[str]],
) -> SampledGroups:
    """Return the batch that `write_sampled` wrote.

    Args:
        problems_at: returns the training problems at a place of the stream: (position, count) → [count].
        encode: returns the prompts of problems.
        decode: returns the texts of completions, [P][G] → [P·G].

    Raises:
        OSError, ValueError, LookupError, TypeError, SafetensorError: the file is damaged.
    """
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()[_METADATA])
        columns = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 - not a dict
    completions_PG = _completions(columns, metadata)
    problems = problems_at(metadata["position"], len(completions_PG))
    texts = iter(decode(completions_PG))
    grades = map(_grade, metadata["grades"])
    sampled = []
    for problem, prompt, completions in zip(problems, encode(problems), completions_PG, strict=True):
        rollouts = [
            Rollout(problem, prompt.text, prompt.token_ids, completion, next(texts), next(grades))
            for completion in completions
        ]
        sampled.append(Group(problem, tuple(rollouts)))
    return SampledGroups(
        step=metadata["step"],
        version=metadata["version"],
        position=metadata["position"],
        seconds=0.0,
        groups=[sampled[index] for index in metadata["trained"]],
        sampled=sampled,
    )


def _completions(columns: dict[str, NDArray[Any]], metadata: dict[str, Any]) -> list[list[Completion]]:
    """Return the completions of each group, [P][G]."""
    ends = [0, *accumulate(columns["lengths"].tolist())]
    tokens = array(TOKEN_TYPE, columns["token_ids"].tobytes())
    # An earlier version wrote float64 where a value was not exact in float32.
    logprobs, entropies = (columns[name].astype(np.float32).tobytes() for name in ("logprobs", "entropies"))
    flat = [
        Completion(
            tokens[start:end],
            array(FLOAT_TYPE, logprobs[4 * start : 4 * end]),
            cast(FinishReason, reason),
            metadata["version"],
            array(FLOAT_TYPE, entropies[4 * start : 4 * end]),  # empty if the engine reported none
        )
        for (start, end), reason in zip(pairwise(ends), metadata["finish_reasons"], strict=True)
    ]
    bounds = pairwise([0, *accumulate(metadata["group_sizes"])])
    return [flat[start:end] for start, end in bounds]


def _joined(arrays: Iterable[array[int] | array[float]]) -> torch.Tensor:
    """Return the concatenated arrays, [N] int32 or float32."""
    return torch.from_numpy(np.concatenate([np.asarray(values) for values in arrays]))


def _as_json(grade: Grade) -> list[object]:
    return [grade.reward, grade.correct, grade.verdict, grade.has_reward, dict(grade.components)]


def _grade(saved: list[Any]) -> Grade:
    reward, correct, verdict, has_reward, components = saved
    return Grade(reward, correct=correct, verdict=verdict, has_reward=has_reward, components=components)
