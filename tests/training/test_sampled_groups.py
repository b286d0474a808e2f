"""The groups of a step: their choice under dynamic sampling, and the file of the batches that were sampled ahead."""

import math
import struct
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.config.layers import resolve
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.rollouts import decode_completions
from bandpo_cli.storage.checkpoints import ROLLOUTS, Progress
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.training.checkpoint_writer import CheckpointWriter, TrainedState
from bandpo_cli.training.rollout_batches import SampledGroups, read_sampled, select_groups, write_sampled
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout
from tests.training.trained import State, fresh, update

PROBLEMS = [Problem(f"p{n}", f"{n} {n}={2 * n}:", str(n), "t", "g", {"n": n}) for n in range(5)]
VERSION = 6


def batch_of(
    policy: Policy, completions: list[list[Completion]], grades: list[Grade], position: int, wanted: int
) -> SampledGroups:
    """Return a batch of the stream's problems from a position, as the loop makes it with dynamic sampling."""
    stream, encoder = ProblemStream(PROBLEMS, seed=3, position=position), PromptEncoder(policy.tokenizer)
    given = iter(grades)
    sampled = []
    for group in completions:
        (problem,) = stream.next(1)
        (prompt,) = encoder.encode([problem])
        texts = decode_completions(policy.tokenizer, [group])
        sampled.append(
            Group(
                problem,
                tuple(
                    Rollout(problem, prompt.text, prompt.token_ids, value, text, next(given))
                    for value, text in zip(group, texts, strict=True)
                ),
            )
        )
    return SampledGroups(9, VERSION, 2, position, 1.5, select_groups(sampled, wanted, 1), sampled)


def read(path: Path, policy: Policy) -> list[SampledGroups]:
    stream, encoder = ProblemStream(PROBLEMS, seed=3), PromptEncoder(policy.tokenizer)
    return read_sampled(path, stream, encoder, policy.tokenizer)


float32s = st.floats(-50, 0, width=32)
float64s = st.floats(-50, 0)


@st.composite
def completions(draw: st.DrawFn) -> list[list[Completion]]:
    values = draw(st.sampled_from([float32s, float64s]))
    with_entropies = draw(st.booleans())

    def one() -> Completion:
        ids = tuple(draw(st.lists(st.integers(0, 19), min_size=1, max_size=4)))
        logprobs, entropies = (tuple(draw(values) for _ in ids) for _ in range(2))
        reason: Any = draw(st.sampled_from(["stop", "length"]))
        return Completion(ids, logprobs, reason, VERSION, entropies if with_entropies else ())

    return [[one(), one()] for _ in range(draw(st.integers(2, 7)))]


@given(completions(), st.data())
def test_batches_are_read_as_they_were_written(tmp_path_factory, embedded, drawn, data):
    count = 2 * len(drawn)
    rewards = data.draw(st.lists(st.sampled_from([-1.0, 0.1, 1 / 3]), min_size=count, max_size=count))
    grades = [
        Grade(
            reward,
            reward > 0,
            "correct" if reward > 0 else "timeout",
            place % 5 > 0,
            {"é": None, "b": reward},
        )
        for place, reward in enumerate(rewards)
    ]
    position = data.draw(st.integers(0, 12))
    batch = batch_of(embedded, drawn, grades, position, wanted=data.draw(st.integers(1, len(drawn))))
    path = tmp_path_factory.mktemp("sampled") / "rollouts.safetensors"
    write_sampled(path, [batch, one_batch(embedded, 10)])
    found, other = read(path, embedded)
    assert (found, other) == (replace(batch, seconds=0.0), replace(one_batch(embedded, 10), seconds=0.0))
    assert [item.logprobs for item in found.completions] == [item.logprobs for item in batch.completions]
    assert all(
        struct.pack("d", one) == struct.pack("d", other)
        for a, b in zip(found.completions, batch.completions, strict=True)
        for one, other in zip(a.logprobs, b.logprobs, strict=True)
    ), "also the sign of 0"


def test_log_probs_of_engines_take_four_bytes(embedded, tmp_path):
    """Engines report float32. A batch of 2 × 500 tokens takes about what its estimate says."""
    value = struct.unpack("f", struct.pack("f", -1 / 3))[0]
    group = [Completion((3,) * 500, (value,) * 500, "length", VERSION)] * 2
    batch = batch_of(embedded, [group], [Grade(1.0, True, "correct")] * 2, 0, wanted=1)
    write_sampled(tmp_path / "a", [batch])
    progress = Progress(4, 8, 0, 12, "")
    estimate = TrainedState({}, {}, progress, [batch]).nbytes
    assert 8 * 1000 < (tmp_path / "a").stat().st_size < estimate == 2 * (12 * 500 + 128)
    assert math.isclose(read(tmp_path / "a", embedded)[0].completions[0].logprobs[0], -1 / 3, rel_tol=1e-7)


def one_batch(policy: Policy, step: int) -> SampledGroups:
    group = [Completion((3, step), (-0.5, -1.0), "length", VERSION)] * 2
    return replace(batch_of(policy, [group], [Grade(1.0, True, "correct")] * 2, 0, wanted=1), step=step)


def test_a_thread_writes_the_batch_of_its_step(embedded, tmp_path, monkeypatch):
    """Training has taken the batch and sampled another one before the thread gets to it."""
    taken, run = threading.Event(), RunFolder.create(tmp_path, "a")
    monkeypatch.setattr(RunFolder, "sync_metrics", lambda _: taken.wait(60))  # the first that the thread does
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    state = State(*trained, deque([one_batch(embedded, 5)]))
    with CheckpointWriter(resolve([{"checkpoint": {"every": 1}}]), state, run) as writer:
        writer.prepare(4)
        run.append_metrics({"step": 4})
        writer.commit()
        state.ahead.popleft()
        state.ahead.append(one_batch(embedded, 6))
        taken.set()
    assert read(run.checkpoint_dir(4) / ROLLOUTS, embedded) == [replace(one_batch(embedded, 5), seconds=0.0)]


def group(name: str, *rewards: float) -> Group:
    problem = Problem(name, name, "", "test", "math")
    completion = Completion((1,), (-0.5,), "stop", 0)
    return Group(
        problem,
        tuple(
            Rollout(problem, name, (0,), completion, "", Grade(reward, False, "wrong")) for reward in rewards
        ),
    )


@pytest.mark.parametrize(
    ("sampled", "updates", "expected"),
    [
        ("ABCD", 2, "ABCD"),
        ("xAyB", 2, "AxBy"),
        ("ABCx", 2, "ABCx"),
        ("ABCxyz", 2, "ABxCyz"),
        ("xyzA", 4, "Axyz"),
        ("wxyz", 2, "wxyz"),
        ("ABCDEuvwxyza", 4, "ABuCvwDxyEza"),
        ("ABwx", 1, "ABwx"),
    ],
)
def test_the_order_of_groups_over_updates(sampled, updates, expected):
    """Capital letters are groups whose rewards differ."""
    groups = [group(name, 0.0, float(name.isupper())) for name in sampled]
    selected = select_groups(groups, len(groups), updates)
    assert "".join(item.problem.id for item in selected) == expected
