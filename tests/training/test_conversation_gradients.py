"""Loss and gradient of conversations with a tool, against steps by hand; the oracle has steps without LoRA."""

from functools import partial
from pathlib import Path

import pytest

from tests.training.conversation_gradients import check, config_of, train
from tests.training.several_ranks import run_ranks


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_adapters_on_two_ranks(tmp_path: Path) -> None:
    config = config_of(model={"lora": {"rank": 4}}, optim={"lr": 5e-3})
    (steps, weights), _ = run_ranks(2, tmp_path / "ranks", partial(train, config=config), tmp_path)
    check(config, steps, weights)
