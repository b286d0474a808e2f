"""Ranks of an experiment: a lost connection is one error, and settings must be equal on all of them."""

import contextlib
import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import LostRankError, RunError, UserError
from bandpo_cli.experiments.run import load_components
from bandpo_cli.grading.pool import GraderUse
from bandpo_cli.processes.ranks import (
    SINGLE,
    Ranks,
    connected,
    connected_ranks,
    lost_rank_errors,
)
from tests.training.several_ranks import run_ranks


def lose_rank_1(ranks: Ranks, place: str) -> None:
    """End rank 1, and check the error of a collective of rank 0."""
    model = torch.nn.Linear(4, 4)
    if place == "fsdp":
        fully_shard(model)
    ranks.wait()
    if ranks.is_main:
        message = "^lost the connection to another rank, whose process has ended$"
        with pytest.raises(LostRankError, match=message), lost_rank_errors():
            ranks.gather(1) if place == "gather" else model(torch.ones(1, 4)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["gather", "fsdp"])
def test_the_end_of_another_rank_is_one_error(tmp_path, place):
    """In a gloo collective, also one that FSDP calls in a forward pass."""
    run_ranks(2, tmp_path, lose_rank_1, place)


def test_a_store_that_cannot_be_reached_is_a_lost_rank():
    with pytest.raises(LostRankError), lost_rank_errors():
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=1))


def test_other_errors_are_unchanged():
    for error in (RuntimeError("shape mismatch"), ValueError("gloo/transport"), RunError("disk full")):
        with pytest.raises(type(error)) as raised, lost_rank_errors():
            raise error
        assert raised.value is error


def compare_settings(ranks: Ranks) -> str:
    ranks.check_same("steps: 1")
    with pytest.raises(UserError) as raised:
        ranks.check_same("steps: 1", f"{ranks.rank}")
    return str(raised.value)


@pytest.mark.slow
def test_all_ranks_find_that_their_settings_differ(tmp_path):
    errors = run_ranks(2, tmp_path, compare_settings)
    assert ["different settings" in error for error in errors] == [True, True]


def grader_warnings(ranks: Ranks) -> list[list[str]]:
    """Return the warnings of two runs on this rank; in the second, rank 0 ends with an error and rank 1 does not.

    The pool has graded 10 answers on rank 0, 20 on rank 1, and failed on one per rank.
    """
    uses = {"math": GraderUse(10 * (ranks.rank + 1), 1, f"error of rank {ranks.rank}")}
    components = SimpleNamespace(ranks=ranks, grader=SimpleNamespace(uses=uses), close=lambda: None)
    warnings = []
    for fails in (False, True):
        with (
            mock.patch("bandpo_cli.training.build.build_components", return_value=components),
            mock.patch.multiple(
                "bandpo_cli.experiments.run",
                connected_ranks=lambda *_: contextlib.nullcontext(ranks),
                check_memory=lambda config, *_, **__: config,
            ),
            mock.patch("bandpo_cli.experiments.run.log.warning") as warn,
            contextlib.suppress(RunError),
            lost_rank_errors(),
            contextlib.ExitStack() as stack,
        ):
            load_components(RunConfig(), mock.Mock(), mock.Mock(), stack)
            if fails and ranks.is_main:
                raise RunError("disk full")
        warnings.append([call.args[1] for call in warn.call_args_list])
    return warnings


@pytest.mark.slow
def test_rank_0_reports_the_grader_errors_of_all_ranks_and_after_an_error_its_own(tmp_path):
    """After an error, rank 0 waits for no other rank, and rank 1 loses the connection before it has the answers."""
    main, other = run_ranks(2, tmp_path, grader_warnings)
    assert other == [[], []]
    for (line,), counts in zip(main, ("2 of 30 answers (6.7%)", "1 of 10 answers (10.0%)"), strict=True):
        assert line.startswith(f"grader 'math' failed on {counts}, which")
        assert line.endswith("the first error: error of rank 0")


def test_without_torchrun_nothing_is_connected():
    assert "RANK" not in os.environ
    with connected_ranks("auto", 600.0) as ranks:
        assert ranks == SINGLE
        assert not dist.is_initialized()


def test_ranks_on_gpus_do_not_wait_after_an_error(monkeypatch):
    closed = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", closed)
    with contextlib.suppress(RunError), connected(Ranks(0, 2), "cuda"):
        raise RunError("disk full")
    assert not closed.called
    with connected(Ranks(0, 2), "cuda"):
        pass
    assert closed.called
