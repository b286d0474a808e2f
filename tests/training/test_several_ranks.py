"""The number of ranks does not change a run: completions, losses, gradients, metrics and weights are those of one rank.

The run with one rank is not sharded and communicates nothing. Every case checks that it exercises its settings.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import GraderFailedError
from bandpo_cli.experiments.plan import prepare_task
from bandpo_cli.grading.pool import GraderUse, training_grader
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate, empty_batch
from bandpo_cli.models.weights import checkpoint_weights, forward_dtype, full_tensor, shard, unsharded
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from bandpo_cli.types import GRADER_ERROR, Grade, Problem
from tests.conftest import random_model
from tests.training.recording import SETTINGS
from tests.training.several_ranks import check_lines, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [Row([3, 4, 5], [[6, 7], [8, 9, 10]]), Row([4, 4], [[5, 5]]), Row([1, 2, 3], [[7, 8]])]
COMMON: dict[str, Any] = {
    "steps": 3,
    "optim": {"lr": 5e-5, "warmup_steps": 0},
    "evaluation": {"every": 50, "problems": 3},
    "checkpoint": {"every": 0},
}

Trained = tuple[list[dict[str, float]], list[dict[str, Any]], dict[str, torch.Tensor]]
"""The lines of a run without times, its completions, and its final weights."""


def trained(ranks: Ranks, folder: Path, model: Path, name: str) -> Trained:
    """Train two of three steps; return the run, after a check that all ranks report the same."""
    layers = [SETTINGS, {"model": {"path": str(model)}}] if name != CONVERSATIONS else []
    config = resolve([*layers, COMMON, VARIANTS[name]])
    place = f"{[*VARIANTS].index(name)}-on-{ranks.size}"
    run = RunFolder.create(folder, place) if ranks.is_main else RunFolder(folder / place)
    components = build_components(config, prepare_task(config), ranks)
    is_exact: Any = nullcontext()
    if name in OTHER_ENGINE:
        components.params = replace(components.params, entropy=False)
        is_exact = mock.patch("bandpo_cli.training.loop.is_exact", return_value=False)
    try:
        with is_exact:
            reports = train(config, components, run)
            lines = [without_clock(report.record) for report in islice(reports, 3)]
            reports.close()
        weights = {key: weight.clone() for key, weight in checkpoint_weights(components.policy.model)}
    finally:
        components.close()
    assert len({repr(item) for item in ranks.gather(lines)}) == 1
    tables = [pq.read_table(run.path / f"samples/step-{step:06d}.parquet") for step in (1, 2)]
    columns = ["problem_id", "text", "reward", "length"]
    return lines, [row for table in tables for row in table.select(columns).to_pylist()], weights


CONVERSATIONS = "conversations with a tool"
VARIANTS: dict[str, dict[str, Any]] = {
    CONVERSATIONS: {
        "task": {"name": "calculator"},
        "sampling": {"prompts": 9, "samples": 4, "max_tokens": 20},
        "optim": {"updates": 3, "micro_batch_tokens": 200},
    },
    "many micro-batches, LoRA and a reference model": {
        "optim": {"micro_batch_tokens": 24},
        "model": {"lora": {"rank": 4}},
        "objective": {"reference_kl": 0.05, "entropy_bonus": 0.01},
        "evaluation": {"every": 2, "problems": 5},
    },
    "all tokens at once": {
        "bounds": {"method": "kl-cov", "share": 0.1},
        "sampling": {"dynamic": True, "dynamic_batches": 3},
    },
    "ratios of completions to the sampler": {
        "bounds": {"method": "gapo"},
        "model": {"gradient_checkpointing": True},
        "objective": {"old_logprobs": "sampler", "aggregation": "token-mean", "mask_truncated": True},
    },
    "log-probs of a pass without gradient": {},
    "metrics of all tokens, more ranks than groups of an update": {
        "objective": {"all_token_metrics": True, "top_entropy": 0.3},
        "optim": {"updates": 4},
    },
}
OTHER_ENGINE = [*VARIANTS][-2:]
"""Variants that treat the log-probs of the sampler as those of another engine, which reports no entropies."""


def train_variants(ranks: Ranks, folder: Path, model: Path) -> dict[str, Trained]:
    return {name: trained(ranks, folder, model, name) for name in VARIANTS}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> dict[str, Trained]:
    """Return all variants as rank 0 of two trains them."""
    folder = tmp_path_factory.mktemp("two")
    of_main: dict[str, Trained] = run_ranks(2, folder / "ranks", train_variants, folder, small_model)[0]
    return of_main


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_several_ranks_train_as_one(on_two, tmp_path, small_model, name):
    lines, completions, weights = trained(SINGLE, tmp_path, small_model, name)
    others, same_completions, other_weights = on_two[name]
    assert max(line.get("optim/grad_norm", 0.0) for line in lines) > 0.01
    assert lines[-1]["ratio/max"] > 1.0001
    assert 0 < lines[1]["train/truncated_fraction"] < 1
    assert (lines[1].get("conversation/inserted_tokens", 0) > 0) == (name == CONVERSATIONS)
    measured = [line.get("train/entropy_token_share", 1.0) for line in lines[1:]]
    assert (min(measured) < 1) == (name == "log-probs of a pass without gradient")
    assert completions == same_completions
    check_lines(others, lines)
    assert weights.keys() == other_weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(other_weights[key], weight, atol=1e-5, rtol=0)


def sharded_gradients(ranks: Ranks) -> list[dict[str, Any]]:
    """Return results of sharded models of each dtype: rank 0 has two rows, rank 1 one row and an empty batch."""
    return [sharded_gradient(ranks, dtype) for dtype in DTYPES]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sharded_gradient(ranks: Ranks, dtype: torch.dtype) -> dict[str, Any]:
    model = random_model().to(dtype)
    shard(model, ranks, torch.device("cpu"))
    own = [ROWS[:1], ROWS[1:2]] if ranks.rank == 0 else [ROWS[2:], []]
    for rows in own:
        batch = collate(rows, model.device) if rows else empty_batch(0, model.device)
        logprobs = token_logprobs(model, batch, temperature=0.7).logprobs
        logprobs.backward(torch.ones_like(logprobs))
    gradient = {name: full_tensor(value.grad) for name, value in model.named_parameters()}
    # The ranks sample different numbers of tokens, so that a pass which needs the other rank would wait for ever.
    params = SamplingParams(2, 1.0, max_tokens=3 + 4 * ranks.rank, stop_ids=(-1,))
    sampled = TransformersSampler(model, 0).sample([(1, 2)], params, seed=5)
    with unsharded(model), torch.no_grad():
        inside = token_logprobs(model, collate(ROWS[: 1 + ranks.rank], model.device)).logprobs
    return {
        "gradient": gradient,
        "stored": {parameter.dtype for parameter in model.parameters()},
        "dtype": forward_dtype(model),
        "sampled": [item.token_ids for item in sampled[0]],
        "inside": inside,
        "weights": dict(checkpoint_weights(model)),
    }


@pytest.mark.slow
def test_a_sharded_model_has_the_gradient_and_samples_of_the_model(tmp_path):
    of_ranks = run_ranks(2, tmp_path, sharded_gradients)
    for place, dtype in enumerate(DTYPES):
        model = random_model().to(dtype)
        logprobs = token_logprobs(model, collate(ROWS, model.device), temperature=0.7).logprobs
        logprobs.backward(torch.ones_like(logprobs))
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for rank, results in enumerate(of_ranks):
            of_rank = results[place]
            assert of_rank["stored"] == {torch.float32}
            assert of_rank["dtype"] == dtype
            for name, parameter in model.named_parameters():
                atol = tolerance * parameter.grad.abs().max().item()
                gradient = of_rank["gradient"][name]
                torch.testing.assert_close(gradient, parameter.grad.float(), atol=atol, rtol=0)
                assert torch.equal(of_rank["weights"][name], parameter.detach())
            params = SamplingParams(2, 1.0, max_tokens=3 + 4 * rank, stop_ids=(-1,))
            expected = TransformersSampler(model, 0).sample([(1, 2)], params, seed=5)
            assert of_rank["sampled"] == [item.token_ids for item in expected[0]]
            with torch.no_grad():
                outside = token_logprobs(model, collate(ROWS[: 1 + rank], model.device)).logprobs
            torch.testing.assert_close(of_rank["inside"], outside, atol=1e-5, rtol=0)


class OneRankFails:
    """A grader that reports errors for all answers of one rank."""

    def __init__(self, fails: bool, name: str) -> None:
        self._fails, self.uses = fails, {"countdown": GraderUse(error=f"broken on {name}" if fails else None)}

    def grade(self, problems: Any, texts: list[str]) -> list[Grade]:
        return [GRADER_ERROR if self._fails else Grade(1.0, True, "correct") for _ in texts]


def graded(ranks: Ranks) -> list[str]:
    return [graded_with(ranks, failing) for failing in ({1}, {0, 1})]


def graded_with(ranks: Ranks, failing: set[int]) -> str:
    problem = Problem(id="p", prompt="", answer="", source="test", grader="countdown")
    grade = training_grader(OneRankFails(ranks.rank in failing, f"rank {ranks.rank}"), None, ranks)
    try:
        grade([problem] * (1 + ranks.rank), ["x"] * (1 + ranks.rank))
    except GraderFailedError as error:
        return str(error)
    return "graded"


@pytest.mark.slow
def test_a_grader_has_failed_when_it_failed_on_all_ranks(tmp_path):
    for one_failed, both_failed in run_ranks(2, tmp_path, graded):
        assert one_failed == "graded"
        assert "all 3 answers" in both_failed
        assert "broken on rank 0" in both_failed
