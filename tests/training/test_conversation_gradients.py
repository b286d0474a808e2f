"""Loss and gradient of conversations with a tool, against steps by hand: ranks, LoRA, batches sampled ahead."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.processes.ranks import SINGLE
from tests.training.conversation_gradients import check, config_of, train
from tests.training.several_ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"model": {"lora": {"rank": 4}}, "optim": {"lr": 5e-3}},
    "sampled ahead": {"sampling": {"max_lag": 1}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", VARIANTS)
def test_one_rank(tmp_path: Path, name: str) -> None:
    config = config_of(**VARIANTS[name])
    check(config, *train(SINGLE, tmp_path, config))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [*VARIANTS][:2])
def test_two_ranks(tmp_path: Path, name: str) -> None:
    config = config_of(**VARIANTS[name])
    (steps, weights), _ = run_ranks(2, tmp_path / "ranks", partial(train, config=config), tmp_path)
    check(config, steps, weights)
