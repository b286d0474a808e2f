"""Memory: estimates, error messages and the limits of containers name settings that need less."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bandpo_cli.cli.preview import print_memory
from bandpo_cli.config.layers import read_assignments, resolve, with_values
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, UserError, system_error_message
from bandpo_cli.experiments.memory_check import memory_report, memory_savings, out_of_memory_errors
from bandpo_cli.models.memory_estimate import GIB, SLEEPING_ENGINE_BYTES, Device, estimate_memory
from bandpo_cli.sampling.engine_server import portable_error
from tests.cli import train_runs
from tests.commands import run_bandpo
from tests.config.shapes import use_gpus
from tests.conftest import output_of

GSM8K = {"task": {"name": "gsm8k"}, "model": {"path": "org/none"}}


def allocate_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def raise_cuda_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB")


def printed(config: RunConfig, ranks: int = 1) -> str:
    return output_of(print_memory, config, memory_report(config, ranks), width=300)


def settings_of(advice):
    return re.findall(r"--set (\S+?)(?:,|$)", advice)


@pytest.mark.parametrize("fail", [allocate_too_much, raise_cuda_error])
def test_out_of_memory_is_one_line_with_valid_settings(fail):
    config = resolve([GSM8K])
    with pytest.raises(RunError) as raised, out_of_memory_errors(config):
        fail()
    line = str(raised.value)
    assert line.startswith("out of memory (")
    assert "\n" not in line
    less = resolve([GSM8K, read_assignments(settings_of(line))])
    assert less.optim.pass_tokens < config.optim.pass_tokens
    assert less.model.gradient_checkpointing
    assert less.model.dtype == "bfloat16"


def test_the_estimate_of_several_ranks_is_that_of_each():
    text = printed(resolve([]), ranks=2)
    parts = ("weights (float32)", "complete parameters", "gradients", "activations of 2,048 tokens", "fits")
    for part in ("1.1M parameters, a rank of 2", *parts):
        assert part in text
    assert "at the peak of each rank by the estimate, this machine / 2 ranks (no GPU) has" in text
    one, two = memory_report(resolve([])), memory_report(resolve([]), ranks=2)
    assert two.device.total == one.device.total // 2
    assert two.always["AdamW"] == pytest.approx(one.always["AdamW"] / 2, rel=0.001)


def estimate_on(config, gib=2**20, on_gpu=True, ranks=1, engine_gib=None):
    """Return the estimate on an idle device with so many GiB."""
    device = Device("a device", int(gib * GIB), int(gib * GIB), on_gpu)
    engine = None if engine_gib is None else Device("cuda:1", int(engine_gib * GIB), int(engine_gib * GIB))
    return estimate_memory(config, device, ranks, engine)


def test_an_engine_that_sleeps_shares_memory_with_the_update():
    """The engine is awake while a complete weight is sent to it; in an update it has its graphs and buffers."""
    vllm = {"sleep": True, "memory_fraction": 0.5}
    config = resolve([{"sampling": {"engine": "vllm", "vllm": vllm}}])
    estimate = estimate_on(config, ranks=2)
    sent = estimate.sampling["a complete weight, to send it to the engine"]
    assert estimate.vllm == 2**19 * GIB
    assert estimate.peak == sum(estimate.always.values()) + estimate.vllm + sent
    assert estimate.update["vLLM while it sleeps"] == estimate.reduction["vLLM while it sleeps"] == 3 * GIB
    awake = estimate_on(resolve([config.model_dump(), {"sampling": {"vllm": {"sleep": False}}}]), ranks=2)
    updating = sum(estimate.update.values()) - 3 * GIB
    assert awake.peak == sum(estimate.always.values()) + estimate.vllm + updating
    on_cpu = estimate_on(config, on_gpu=False)
    assert "vLLM: weights and cache" in on_cpu.always, "an engine on a CPU does not sleep"


def test_no_estimate_without_the_gpu_or_the_config(add_gpus, tmp_path):
    add_gpus()
    with pytest.raises(UserError, match="'cuda:7': not usable on this machine: Invalid device id"):
        memory_report(resolve([{"model": {"device": "cuda:7"}}]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="its config cannot be read"):
        memory_report(resolve([{"model": {"path": str(tmp_path), "device": "cpu"}}]))


def lag_of_1(**sampling):
    """Return settings of rollouts one step ahead, with 8 prompts × 4 completions of 30 + 20 tokens per step."""
    sizes = {"prompts": 8, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20}
    return resolve([{"sampling": {**sizes, "max_lag": 1, **sampling}}])


def without_lag(config):
    return with_values(config, {"sampling.max_lag": 0})


VOCABULARY = 20
PARAMETERS = 5 * (4 * 128**2 + 3 * 128 + 3 * 128 * 384 + 2 * 128) + VOCABULARY * 128 + 128
"""Of the bundled model: 5 layers, the embedding, which is also the output layer, and the last norm."""
CACHE = 32 * 50 * 2 * 5 * 4 * 32
"""Elements of keys and values: sequences × tokens × 2 × layers × key-value heads × head size."""


def test_an_engine_process_on_a_cpu_has_a_copy_of_the_weights_and_samples_during_the_update():
    config = lag_of_1()
    estimate, before = estimate_on(config, on_gpu=False), estimate_on(without_lag(config), on_gpu=False)
    process = 4 * PARAMETERS + 4 * CACHE + 32 * 24 * VOCABULARY
    assert sum(estimate.always.values()) == sum(before.always.values()) + process
    assert estimate.sampling == {}
    assert estimate.update == before.update
    assert estimate.peak == sum(estimate.always.values()) + sum(estimate.update.values())
    assert estimate.peak - before.peak == process, "the update is the larger phase"
    lora = estimate_on(with_values(config, {"model.lora.rank": 8}), on_gpu=False)
    assert lora.always["weights of the engine process"] == 4 * PARAMETERS, "adapters are merged there"


def test_an_engine_process_on_the_trainers_gpu_does_not_sleep():
    config = lag_of_1(engine="vllm", vllm={"sleep": True, "memory_fraction": 0.25})
    estimate = estimate_on(config, 80)
    before = estimate_on(without_lag(config), 80)
    held = sum(before.always.values()) + 20 * GIB
    assert estimate.peak == held + sum(estimate.update.values())
    assert "vLLM while it sleeps" not in estimate.update


def test_each_gpu_must_have_enough_memory():
    """vLLM takes 85% of the engine's GPU, and at most 95% are used."""
    config = lag_of_1(engine="vllm", max_sequences=1, vllm={"memory_fraction": 0.85})
    minimum = SLEEPING_ENGINE_BYTES + 2 * PARAMETERS + 20 * VOCABULARY + 50 * CACHE / (32 * 50) * 2
    enough = estimate_on(config, 80, engine_gib=1.01 * minimum / 0.85 / GIB)
    assert enough.fits
    assert enough.vllm_minimum == minimum
    scarce = estimate_on(config, 80, engine_gib=0.99 * minimum / 0.85 / GIB)
    assert not scarce.fits
    most = resolve([config.model_dump(), {"sampling": {"vllm": {"memory_fraction": 0.951}}}])
    assert not estimate_on(most, 80, engine_gib=80).fits
    small = estimate_on(config, 0.01, engine_gib=80)
    assert small.engine_peak < small.engine_device.usable
    assert not small.fits


@pytest.fixture
def add_gpus(monkeypatch):
    """Return a function that gives this machine GPUs of so many GiB, all of them free; vLLM is installed."""
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda package: True)
    return lambda *sizes: use_gpus(monkeypatch, [(gib * GIB, gib * GIB) for gib in sizes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "device", "ranks", "expected"),
    [
        ([80], "auto", 1, None),
        ([80, 40], "cuda:1", 1, ("GPU 0 (cuda:0)", 80)),
        ([80, 80, 80], "auto", 2, None),
        ([80, 80, 24, 24], "auto", 2, ("GPU 2 (cuda:2, cuda:3)", 24)),
    ],
)
def test_the_engine_is_estimated_on_the_gpu_that_it_will_have(add_gpus, sizes, device, ranks, expected):
    add_gpus(*sizes)
    config = with_values(lag_of_1(), {"model.device": device})
    engine = memory_report(config, ranks).engine_device
    assert (engine and (engine.name, engine.total // GIB)) == expected
    assert memory_report(without_lag(config), ranks).engine_device is None


def test_both_gpus_are_printed(add_gpus):
    add_gpus(80, 40)
    half = {"memory_fraction": 0.5}
    text = printed(lag_of_1(vllm=half))
    assert "by the estimate, GPU 0 has 80.0 GiB; the engine 20.0 GiB, GPU 1 (cuda:1) has 40.0 GiB;" in text
    rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()}
    assert rows["vLLM: weights and cache"] == "GPU"
    assert rows["weights"] == "always"
    assert "cuda:1" not in printed(without_lag(lag_of_1(vllm=half)))


def test_the_advice_is_for_the_gpu_with_too_little_memory(add_gpus):
    add_gpus(80, 8)
    text = printed(lag_of_1(vllm={"memory_fraction": 0.999}))
    assert "too much" in text
    assert "it fits with --set sampling.vllm.memory_fraction=null\n" in text
    assert "optim.micro_batch_tokens" not in text


PROCESS = "sampling.engine_process=false"


@pytest.mark.parametrize(
    ("engine", "on_gpu", "of_the_engine"),
    [
        ("transformers", False, [PROCESS, "sampling.max_sequences=512"]),
        ("vllm", False, [PROCESS, "sampling.vllm.kv_cache_gb=1"]),
        ("vllm", True, [PROCESS, "sampling.vllm.sleep=true", "sampling.vllm.memory_fraction=0.3"]),
    ],
)
def test_less_memory_without_an_engine_process(engine, on_gpu, of_the_engine):
    """Not where the engine has a GPU to itself: without a process it would be on that of the trainer."""
    config = lag_of_1(engine=engine, vllm={"sleep": False, "memory_fraction": 0.6})
    found = [f"{key}={value}" for key, value in memory_savings(config, on_gpu)]
    names = ("sampling.engine_process", "sampling.vllm", "sampling.max_seq")
    assert [item for item in found if item.startswith(names)] == of_the_engine
    resolve([config.model_dump(mode="json"), read_assignments(found)])
    apart = [f"{key}={value}" for key, value in memory_savings(config, on_gpu, engine_has_gpu=True)]
    assert apart == [item for item in found if item not in (PROCESS, "sampling.vllm.sleep=true")]
    assert "sampling.engine_process" not in dict(memory_savings(config, on_gpu, training=False))
    assert "sampling.engine_process" not in dict(memory_savings(without_lag(config), on_gpu))


@pytest.mark.parametrize(("cards", "helps"), [(1, True), (2, False)])
def test_out_of_memory_of_an_engine_process(add_gpus, cards, helps):
    """Settings of the updates, and no process, are advised where the trainer shares its GPU, and only there."""
    add_gpus(*[80] * cards)
    with pytest.raises(RunError) as raised, out_of_memory_errors(lag_of_1()):
        raise_cuda_error()
    assert (f"--set {PROCESS}" in str(raised.value)) == helps
    with pytest.raises(RunError) as raised, out_of_memory_errors(lag_of_1()):
        raise portable_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."))
    assert str(raised.value).startswith("out of memory (engine process: ")
    settings = settings_of(str(raised.value))
    assert ("optim.micro_batch_tokens" in settings[0]) == helps
    assert any(setting.startswith("sampling.") for setting in settings)
    assert any(setting.startswith("model.lora") for setting in settings) == helps


SMALL = [*train_runs.SMALL, "--name", "a"]


def train(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return run_bandpo("train", *arguments, cwd=cwd, **options, OMP_NUM_THREADS="1")


@contextmanager
def small_disk(place):
    """Return a disk of 8 MiB; skip the test where none can be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        state = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize))
        done = train("--steps", "2", *SMALL, "--runs-dir", str(disk / "runs"), cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith("error: ")
        assert "no space is left on the disk" in done.stderr


@pytest.mark.slow
def test_a_read_only_runs_folder_is_reported_before_loading(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = train("--steps", "2", *SMALL, "--runs-dir", str(disk / "runs"), cwd=tmp_path)
        assert done.returncode == 2
        assert "is not writable; name another folder" in done.stderr


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))


@pytest.mark.slow
def test_a_limit_that_a_thread_meets_ends_the_run_at_its_next_step(tmp_path):
    """The line of the checkpoint's step is written, the checkpoint is not."""
    done = train("--steps", "5", *SMALL, cwd=tmp_path, before=limit_file_size)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: runs/a/checkpoints/step-000002: the checkpoint cannot be written: ")
    content = json.loads((tmp_path / "runs/a/summary.json").read_text())
    assert content["status"] == "FAILED"
    assert 2 <= content["steps"] <= 4, "the checkpoint of step 4 waits for that of step 2"
    assert not list((tmp_path / "runs/a/checkpoints").iterdir())
    again = train("--resume", "a", "--set", "checkpoint.every=0", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3_500_000_000, 3_500_000_000))


@pytest.mark.slow
def test_out_of_memory_names_settings_to_change(tmp_path):
    many = "sampling.prompts=2048 sampling.samples=64 sampling.max_sequences=200000 evaluation.every=0"
    done = train("--steps", "1", *SMALL, *train_runs.sets(many), cwd=tmp_path, before=limit_memory)
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert "--set sampling.max_sequences=50000" in done.stderr


def test_only_known_system_errors_have_a_message():
    assert system_error_message(OSError("no number")) is None
    assert system_error_message(FileNotFoundError(errno.ENOENT, "gone", "x")) is None
    assert system_error_message(PermissionError(errno.EACCES, "no", "x")) == "x: permission denied"
    full = system_error_message(OSError(errno.ENOSPC, "full"))
    assert full == "no space is left on the disk; free some, then continue"
