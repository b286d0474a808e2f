"""Two ranks with an engine each train and evaluate as one process does.

The engines of two processes on a CPU share its cores: these tests take a minute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.sampling.sampler import SampleRequest
from tests.training.several_ranks import run_module
from tests.vllm.conftest import Running
from tests.vllm.test_sampling import PARAMS, PROMPTS

pytestmark = pytest.mark.vllm

STEPS = 5


def trained(folder: Path, ranks: int) -> dict[str, Any]:
    folder.mkdir()
    run_module(ranks, "tests.vllm.train_ranks", str(folder), str(STEPS))
    result: dict[str, Any] = torch.load(folder / "trained.pt", weights_only=False)
    return result


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """The policy of two ranks is sharded, and each engine gets its weights one tensor at a time."""
    one, two = trained(tmp_path / "one", 1), trained(tmp_path / "two", 2)
    assert two["equal"], "all ranks report the same metrics"
    assert len(one["completions"]) == STEPS
    assert two["completions"] == one["completions"]
    assert 0 < two["gap"] < 1e-4
    for line, expected in zip(two["lines"], one["lines"], strict=True):
        assert expected["optim/grad_norm"] > 0.1
        assert 0 < line["sampler/logprob_gap_max"] < 1e-4
        for name in ("optim/loss", "optim/grad_norm", "kl/old_new", "train/entropy"):
            assert line[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5)
        assert line["train/reward"] == expected["train/reward"]
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)


def test_two_ranks_evaluate_as_one(tmp_path: Path) -> None:
    settings = [
        "evaluation.samples=4",
        "evaluation.k=[1,4]",
        "evaluation.batch=12",
        "sampling.vllm.eager=true",
    ]
    command = [
        "bandpo_cli",
        "eval",
        "--sampler",
        "vllm",
        "--limit",
        "7",
        "--no-mlflow",
        "--runs-dir",
        str(tmp_path),
    ]
    command += [word for setting in settings for word in ("--set", setting)]
    for ranks in (1, 2):
        run_module(ranks, *command, "--name", f"ranks-{ranks}")
    one, two = (pd.read_parquet(tmp_path / f"ranks-{ranks}" / "samples.parquet") for ranks in (1, 2))
    assert len(one) == 28
    pd.testing.assert_frame_equal(two.drop(columns="logprob_sum"), one.drop(columns="logprob_sum"))
    pd.testing.assert_series_equal(two["logprob_sum"], one["logprob_sum"], atol=1e-4, rtol=0)
    env = json.loads((tmp_path / "ranks-2" / "env.json").read_text())
    assert (env["ranks"], env["sampler"]["engine"]) == (2, "vllm")


def test_a_share_without_prompts_keeps_its_place_in_a_stream(running: Running) -> None:
    """A rank without a problem of a batch asks for no completions of it."""
    requests = [SampleRequest([], 1), SampleRequest(PROMPTS, 2), SampleRequest([], 3)]
    found = list(running.sampler.sample_stream(requests, PARAMS))
    assert [len(groups) for groups in found] == [0, len(PROMPTS), 0]
