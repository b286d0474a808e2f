"""Ray pool: exit codes are returned, a stopped run can end itself, and a wrong address is one error line."""

import socket
import sys

import pytest

pytest.importorskip("ray")

from bandpo_cli.errors import UserError
from bandpo_cli.sweeps.scheduler import RayPool
from tests.processes.checks import wait_for
from tests.sweeps.test_scheduler import log_of, wait


@pytest.mark.slow
def test_jobs_run_and_can_be_stopped(tmp_path):
    pool = RayPool(None, 2, {"PLACE": "ray"})

    def start(name: str, code: str) -> None:
        pool.start(name, [sys.executable, "-c", code], tmp_path / "logs" / f"{name}.log")

    try:
        start("one", "import os; print(os.environ['PLACE'], os.environ['OMP_NUM_THREADS'])")
        start("two", "raise SystemExit(3)")
        assert pool.free_slots == 0
        assert wait(pool, 2) == {"one": 0, "two": 3}
        assert log_of(tmp_path, "one") == f"ray {pool.threads}\n"
        code = "import time; print('open', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('shut')"
        start("three", code)
        wait_for(lambda: log_of(tmp_path, "three"))
        pool.stop()
        assert log_of(tmp_path, "three") == "open\nshut\n"
        assert list(pool.poll_finished()) == ["three"]
    finally:
        pool.close()


LOCAL = "127.0.0.1"
IMPOSSIBLE = ["nowhere.invalid:6379", f"{LOCAL}:99999", f"{LOCAL}:x"]


@pytest.mark.parametrize("address", [f"{LOCAL}:CLOSED", f"ray://{LOCAL}:CLOSED", *IMPOSSIBLE])
def test_an_address_without_a_cluster_is_refused(address):
    with socket.socket() as closed:  # holds the port, and does not listen
        closed.bind((LOCAL, 0))
        cause = "" if address in IMPOSSIBLE else ".*[Cc]onnection refused"
        address = address.replace("CLOSED", f"{closed.getsockname()[1]}")
        with pytest.raises(UserError, match=f"--executor ray: no cluster at {address}: {cause}"):
            RayPool(address, 1, {})


def test_auto_without_a_cluster_is_refused(monkeypatch):
    # Raised by hand: Ray searches all processes of the machine, and another test may have started a cluster.
    def no_cluster(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nRun ray start.")

    monkeypatch.setattr("ray.init", no_cluster)
    with pytest.raises(UserError, match=r"^--executor ray: no cluster at auto: Could not .* instance\.$"):
        RayPool("auto", 1, {})


def test_runs_of_several_ranks_share_the_cores_and_a_machine_needs_their_gpus(tmp_path, monkeypatch):
    resources = {"CPU": 8.0, "GPU": 4.0}
    nodes = [{"Alive": True, "Resources": {"GPU": 2.0}}, {"Alive": True, "Resources": {"GPU": 2.0}}]
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    pool = RayPool(None, None, {}, ranks=2)
    assert (pool.slots, pool.threads) == (2, 2)
    assert pool._share == {"num_cpus": 4, "num_gpus": 2}
    with pytest.raises(UserError, match="--gpus-per-run 3: machines of the Ray cluster have at most 2 GPUs"):
        RayPool(None, None, {}, ranks=3)
    resources.pop("GPU")
    pool = RayPool(None, None, {}, ranks=3)
    assert (pool.slots, pool.threads) == (2, 1)
    assert pool._share == {"num_cpus": 3, "num_gpus": 0}
