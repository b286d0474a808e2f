"""Hardware that the headers of the shipped configs name, by the memory estimate of `--dry-run`; GPUs of engines."""

import re
from pathlib import Path

import pytest

from bandpo_cli.config.batch_and_sampling import engine_cards
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.memory_estimate import GIB, Device, MemoryEstimate, estimate_memory
from tests.config.shapes import config_on_disk

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "paper"
MODELS = sorted((PAPER / "models").glob("*.yaml"))
PROTOCOL = CONFIGS / "math" / "protocol.yaml"
QWEN3 = sorted(PROTOCOL.parent.glob("qwen3-*.yaml"))

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494e9, "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9, "Qwen/Qwen2.5-3B-Instruct": 3.09e9,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78e9, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.62e9,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03e9, "Qwen/Qwen3-1.7B-Base": 1.72e9, "Qwen/Qwen3-4B-Base": 4.02e9,
}  # fmt: skip
"""The numbers of parameters on the models' cards."""

GPU_SIZES = [16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288]
CPU_GIB = 8
"""The memory of a small machine without a GPU."""

_HEADER = r"# Needs one GPU of (\d+) GB: (\d+) GiB at the peak, of which .* take (\d+) GiB\."
_MODEL_HEADER = re.compile(_HEADER + "\n")
_LORA_HEADER = re.compile(
    _HEADER + r" With\n# sampling\.vllm\.memory_fraction (0\.\d+) it is one of (\d+) GB\.\n"
)
_EIGHT_GPUS = re.compile(
    r"\n# On 8 GPUs of (\d+) GB, with (?:paper/)?eight-gpus\.yaml and --nproc 8: (\d+) GiB at the peak of each, "
    r"(\d+) GiB of them always\.\n"
)
_ONE_GPU = re.compile(r"one GPU of (\d+) GB")
_OTHER_MODEL = re.compile(r"--model (\S+) \(one GPU of (\d+) GB\)")


@pytest.mark.parametrize(
    ("card", "ranks", "cards", "expected"),
    [
        (0, 1, 1, [0]), (0, 1, 2, [1]), (0, 1, 8, [1]), (0, 2, 2, [0, 1]), (1, 2, 4, [2, 3]), (0, 4, 8, [4, 5, 6, 7]),
        (1, 1, 2, [0]), (2, 1, 4, [0]),  # model.device: cuda:1, cuda:2
        (1, 2, 3, [0, 1]), (0, 4, 7, [0, 1, 2, 3]),  # too few free GPUs: each engine shares the GPU of its rank
    ],
)  # fmt: skip
def test_engines_have_gpus_of_their_own_if_there_is_one_for_each(card, ranks, cards, expected):
    assert engine_cards(card, ranks, cards) == expected


def report_on_gpu(config: RunConfig, gigabytes: int, ranks: int = 1) -> MemoryEstimate:
    """Return the estimate for each of `ranks` GPUs. GB count as 10⁹ bytes, less than any card of that size has."""
    return estimate_memory(config, Device("a GPU", gigabytes * 10**9, gigabytes * 10**9), ranks)


def fits(config: RunConfig, report: MemoryEstimate, available: int) -> bool:
    """Return whether a run fits, by hand: the trainer's memory, and an update or the engine, leave 5% free."""
    engine = config.sampling.vllm.memory_fraction * available
    used = sum(report.always.values()) + max(sum(report.update.values()), engine)
    return used < 0.95 * available


@pytest.mark.slow
@pytest.mark.parametrize("file", [*MODELS, *QWEN3], ids=lambda file: file.stem)
def test_the_header_of_a_model_names_the_smallest_gpu_that_fits_and_the_memory_of_8(tmp_path, file):
    text, general = file.read_text("utf-8"), PROTOCOL if file in QWEN3 else PAPER / "base.yaml"
    base = [read_layer(general), read_layer(file)]
    header, eight = _MODEL_HEADER.match(text), _EIGHT_GPUS.search(text)
    size, peak, held = map(int, header.groups())
    model = base[1]["model"]["path"]
    config = config_on_disk(tmp_path, model, *base)
    report = report_on_gpu(config, size)
    assert report.parameters == pytest.approx(PARAMETERS[model], rel=0.005)
    assert report.fits
    assert round(report.peak / GIB) == peak
    assert round(sum(report.always.values()) / GIB) == held
    assert report.vllm > 1.5 * report.always["weights"]  # the engine's weights, and room for its cache
    assert not fits(config, report, GPU_SIZES[GPU_SIZES.index(size) - 1] * 10**9)
    assert fits(config, report, size * 10**9)
    for overlay in (PAPER / "dapo.yaml", PAPER / "dynamic-sampling.yaml") if file == MODELS[-1] else ():
        assert "the same hardware" in overlay.read_text("utf-8")
        assert report_on_gpu(config_on_disk(tmp_path, model, *base, read_layer(overlay)), size).fits

    # Of 8 GPUs: masters and two moments of float32, and a reference in bfloat16, an eighth of each.
    size, peak, held = map(int, eight.groups())
    assert round((4 + 8 + 2 * (config.objective.reference_kl > 0)) * PARAMETERS[model] / 8 / GIB) == held
    eight_gpus = read_layer(PAPER / "eight-gpus.yaml")
    report = report_on_gpu(config_on_disk(tmp_path, model, *base, eight_gpus), size, 8)
    assert report.fits
    assert round(report.peak / GIB) == peak
    assert report.vllm > 1.5 * 2 * PARAMETERS[model]  # the engine has all weights, and room for its cache


@pytest.mark.slow
def test_the_header_of_lora_names_the_smallest_gpus_that_fit(tmp_path):
    """The base in bfloat16, and adapters with 14 bytes per parameter: 2, a master and two moments."""
    file, model = PAPER / "lora-7b.yaml", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    header = _LORA_HEADER.search(file.read_text("utf-8"))
    size, peak, held, smaller = (int(header[group]) for group in (1, 2, 3, 5))
    files = (PAPER / "base.yaml", PAPER / "models" / "r1-distill-qwen-7b.yaml", file)
    config = config_on_disk(tmp_path, model, *map(read_layer, files))
    report = report_on_gpu(config, size)
    # inputs and outputs of q, k, v, o, gate, up and down, times the rank, in 28 layers
    adapters = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert report.trained == adapters
    assert report.parameters - adapters == pytest.approx(PARAMETERS[model], rel=0.005)
    assert report.fits
    assert report.vllm > 1.5 * 2 * PARAMETERS[model]  # the engine's weights, and room for its cache
    assert round(report.peak / GIB) == peak
    assert sum(report.always.values()) / GIB == pytest.approx(held, abs=0.5)
    assert sum(report.always.values()) == pytest.approx(2 * PARAMETERS[model] + 14 * adapters, rel=0.005)
    less = {"sampling": {"vllm": {"memory_fraction": float(header[4])}}}
    reduced = resolve([config.model_dump(mode="json"), less])
    for value, gigabytes in ((config, size), (reduced, smaller)):
        assert fits(value, report, gigabytes * 10**9)
        assert not fits(value, report, GPU_SIZES[GPU_SIZES.index(gigabytes) - 1] * 10**9)


@pytest.mark.slow
def test_both_models_in_the_header_of_gsm8k_fit_with_vllm(tmp_path):
    """The header asks for vLLM, which `auto` is where it is installed."""
    file = CONFIGS / "gsm8k.yaml"
    text, own = file.read_text("utf-8"), read_layer(file)
    own_size, other = _ONE_GPU.search(text), _OTHER_MODEL.search(text)
    for model, size in ((own["model"]["path"], own_size[1]), (other[1], other[2])):
        config = config_on_disk(tmp_path, model, own, {"sampling": {"engine": "vllm"}})
        report = report_on_gpu(config, int(size))
        assert report.parameters == pytest.approx(PARAMETERS[model], rel=0.005)
        assert report.vllm > 1.5 * report.always["weights"]
        assert report.fits


@pytest.mark.parametrize("name", ["countdown", "sweeps/rare-tokens-pilot"])
def test_a_config_for_a_cpu_fits_a_small_machine(name):
    text = (CONFIGS / f"{name}.yaml").read_text("utf-8")
    assert "Needs a CPU" in text or "minute of a CPU" in text
    layer = {key: value for key, value in read_layer(CONFIGS / f"{name}.yaml").items() if key != "model"}
    device = Device("this machine", CPU_GIB * GIB, CPU_GIB * GIB, on_gpu=False)
    assert estimate_memory(resolve([layer]), device).fits


def test_no_other_header_names_a_gpu():
    files = {file for file in CONFIGS.rglob("*.yaml") if _ONE_GPU.search(file.read_text("utf-8"))}
    assert files == {*MODELS, *QWEN3, PAPER / "lora-7b.yaml", CONFIGS / "gsm8k.yaml"}
