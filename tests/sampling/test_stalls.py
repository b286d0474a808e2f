"""A stopped engine process is named, and continues when it is continued."""

import os
import signal
import threading
import time
from contextlib import closing

import pytest

from bandpo_cli.models.load import load_policy
from bandpo_cli.processes import watch
from bandpo_cli.sampling.engine_process import EngineProcess
from tests.sampling.stub_engine import forked_engines
from tests.sampling.test_engine_process import PARAMS, PROMPTS, settings


@pytest.mark.slow
def test_a_stopped_engine_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    policy = load_policy(settings().model)
    with forked_engines(), closing(EngineProcess(settings(), policy)) as engine:
        expected = engine.sample(PROMPTS, PARAMS, 7)
        assert engine._child is not None
        process = engine._child.pid
        caplog.clear()
        monkeypatch.setattr(watch, "stall_after", 0.3)

        def continue_when_named() -> None:
            until = time.monotonic() + 60
            while not caplog.messages and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(process, signal.SIGCONT)

        os.kill(process, signal.SIGSTOP)
        thread = threading.Thread(target=continue_when_named)
        thread.start()
        assert engine.sample(PROMPTS, PARAMS, 7) == expected
        thread.join()
    assert caplog.messages[0].startswith(f"waiting for the engine (process {process}) since ")
    assert len(caplog.messages) == 1
