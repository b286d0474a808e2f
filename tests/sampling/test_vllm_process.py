"""What an engine's start changes for the whole process is undone, and its words are held back unless it fails."""

from __future__ import annotations

import os

import pytest
import torch

from bandpo_cli.sampling.vllm_worker import (
    engine_threads,
    prepare_environment,
    preserve_process_state,
    stderr_on_failure,
)


def test_the_process_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    set_threads, threads, dice = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()

    @preserve_process_state()
    def start() -> None:
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda count: None  # type: ignore[assignment]
        torch.manual_seed(5)
        os.environ["LD_PRELOAD"] = "libgomp.so"
        os.environ["LD_LIBRARY_PATH"] = "/after"
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        start()
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), dice)
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["LD_LIBRARY_PATH"] == "/before"


def test_a_turn_of_the_engine_has_its_own_threads_and_dice() -> None:
    threads, dice = torch.get_num_threads(), torch.get_rng_state()
    with engine_threads(threads + 1):
        assert torch.get_num_threads() == threads + 1
        torch.rand(3)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), dice)


def test_words_are_held_back_until_something_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)

    @stderr_on_failure()
    def start(words: bytes, fails: bool = False) -> None:
        os.write(2, words)
        if fails:
            raise ValueError("no engine")

    start(b"Warning: NUMA binding\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="no engine"):
        start(b"the cause\n", fails=True)
    assert capfd.readouterr().err == "the cause\n"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    start(b"asked for\n")
    assert capfd.readouterr().err == "asked for\n"


def test_the_users_own_level_of_logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
