"""Performance metrics of a step, against counts of the matrix products that torch dispatches and against the record."""

from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.metric_names import TOTALS
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.lora import adapter_parameters, add_adapters
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.training.performance import (
    PEAK_FLOPS,
    PackedWork,
    StepTimer,
    peak_flops,
    sampling_rows,
)
from bandpo_cli.training.rollout_batches import SampledGroups
from bandpo_cli.types import CORRECT, Completion, Group, Insertion, Problem, Rollout
from tests.conftest import random_model

ROWS = [Row([1] * 30, [[2] * 5, [3] * 9]), Row([1] * 23, [[2] * 14])]


def test_the_metrics_of_a_step_follow_from_its_record(recorded):
    """Every completion of a step is sampled in `sample` and trained on in `logprobs` and `update`."""
    for step in (1, 5):
        line = recorded.line(step)
        table = pq.read_table(recorded.folder.path / "samples" / f"step-{step:06d}.parquet")
        tokens = sum(table["length"].to_pylist())
        assert line["perf/sampled_tokens_per_s"] * line["time/sample"] == pytest.approx(tokens)
        trainer = line["time/logprobs"] + line["time/update"]
        assert line["perf/trained_tokens_per_s"] * trainer == pytest.approx(tokens)
        assert 0 <= line["perf/padding_fraction"] < 1
        assert not {"perf/peak_memory_gib", "perf/model_flop_utilisation"} & line.keys(), "of a GPU"
    assert not [key for key in recorded.line(0) if key.startswith("perf/")]


@pytest.mark.parametrize(
    ("rows", "positions", "padding"),
    [
        (ROWS, 44 + 37, 0),  # a row with two completions and one with one: two blocks
        ([ROWS[0], Row([1] * 30, [[2] * 5, [3] * 6])], 2 * 44, 3),  # rows of 44 and 41 tokens share a block
        # A row of more than 512 tokens is computed as one sequence per completion: 300 + 200 and 300 + 150 tokens.
        ([Row([1] * 300, [[2] * 200, [3] * 150])], 2 * 500, 50),
    ],
)
def test_padding_counts_the_positions_beyond_each_sequence(embedded, rows, positions, padding):
    with PackedWork(embedded.model).counted() as work, torch.no_grad():
        token_logprobs(embedded.model, collate(rows, embedded.device))
    assert (work.positions, work.padding) == (positions, padding)


def test_model_flops_are_those_of_the_matrix_products(embedded):
    """Independent: torch counts the products that it dispatches, apart from those within the attention kernel."""
    batch = collate([Row([1] * 40, [[2] * 8])], embedded.device)
    with (
        PackedWork(embedded.model).counted() as work,
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
    ):
        token_logprobs(embedded.model, batch)
    config = embedded.model.config
    per_pair = 4 * config.num_hidden_layers * config.hidden_size
    # torch 2.15 counts the kernel too, as complete squares; some versions of transformers have one more small product.
    counts = counter.get_flop_counts()["Global"].items()
    products = sum(flops for operator, flops in counts if "attention" not in str(operator))
    assert work.flops == pytest.approx(products + per_pair * (48 * 49 // 2), rel=1e-4)
    with PackedWork(embedded.model).counted() as trained:
        token_logprobs(embedded.model, batch)
    assert trained.flops == 3 * work.flops


def test_completions_of_a_row_do_not_attend_to_each_other(embedded):
    """The FLOPs of a shared row are those of its two rows, without the second pass over the prompt."""
    flops = []
    for row in (ROWS[0], *(Row(ROWS[0].prompt_ids, [completion]) for completion in ROWS[0].completions)):
        with PackedWork(embedded.model).counted() as work, torch.no_grad():
            token_logprobs(embedded.model, collate([row], embedded.device))
        flops.append(work.flops)
    with PackedWork(embedded.model).counted() as prompt, torch.no_grad():
        token_logprobs(embedded.model, collate([Row([1] * 29, [[1]])], embedded.device))
    head = 2 * embedded.model.get_output_embeddings().weight.numel()
    assert flops[1] + flops[2] - flops[0] == prompt.flops - head


def test_the_flops_of_frozen_weights_have_no_gradient():
    """Forward: 2 per weight and token. Backward: 4 of those that are trained, 2 of the others, and attention twice."""
    model = random_model()  # 2 layers, 32 wide, a tied output layer of 23 words
    plain = sum(
        value.numel() for name, value in model.named_parameters() if "layers" in name and value.ndim == 2
    )
    add_adapters(model, LoraSettings(rank=3), seed=0, base="")
    adapters = sum(adapter_parameter.numel() for _, adapter_parameter in adapter_parameters(model))
    batch = collate([Row([1, 2, 3], [[4, 5]])], torch.device("cpu"))
    with PackedWork(model).counted() as work:
        token_logprobs(model, batch)
        with_gradient, work.flops = work.flops, 0.0
        with torch.no_grad():
            token_logprobs(model, batch)
    tokens, predicted, pairs = 5, 2, 15  # pairs of a token with itself and those before it
    attention = 4 * 2 * 32 * pairs
    assert work.flops == 2 * (plain + adapters) * tokens + 2 * 23 * 32 * predicted + attention
    backward = (2 * plain + 4 * adapters) * tokens + 2 * 23 * 32 * predicted + 2 * attention
    assert with_gradient == work.flops + backward


def test_utilisation_and_peak_memory_of_a_card(embedded, monkeypatch):
    """The card is a stand-in: 1e12 FLOP in 2 seconds on a card of 10e12 FLOP/s are 5 percent."""
    resets: list[Any] = []
    peaks = iter([2 * 2**30, 7 * 2**30])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    timer = StepTimer(lambda phase: None)
    timer._seconds = {"time/sample": 1.0, "time/logprobs": 0.5, "time/update": 1.5, "time/eval": 9.0}
    with PackedWork(embedded.model).counted() as work:
        work._device, work.peak, work.flops = torch.device("cuda"), 10e12, 1e12
        work.note_memory()
        metrics = work.metrics(
            timer, SampledGroups(1, 0, 0, 0, 1.0, [], []), [], dict.fromkeys(TOTALS, 0), released=4 * 2**30
        )
    assert metrics["perf/model_flop_utilisation"] == pytest.approx(0.05)
    assert metrics["perf/peak_memory_gib"] == 3.0, "that of the updates, without the engine"
    assert resets == [torch.device("cuda")] * 2, "each peak is its own"
    assert (work.flops, work.positions) == (0, 0)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_of_a_card_is_found_by_its_name(name, key):
    assert peak_flops(name) == (None if key is None else PEAK_FLOPS[key])


def test_a_mixture_of_experts_has_no_utilisation(monkeypatch):
    """Nor has a float32 model: the peak is that of products in 16 bits."""
    policy = load_policy(ModelConfig())
    card = SimpleNamespace(type="cuda")
    monkeypatch.setattr(type(policy.model), "device", card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert PackedWork(policy.model).peak is None
    policy.model.bfloat16()
    assert PackedWork(policy.model).peak == PEAK_FLOPS["H100"]
    monkeypatch.setattr(policy.model.config, "num_local_experts", 8, raising=False)
    assert PackedWork(policy.model).peak is None


def test_the_totals_are_the_sums_over_the_steps(recorded):
    """The tokens of the samples, and of FLOPs the passes of sampling at least; a step is a forward pass more than 3."""
    tokens, work = 0, PackedWork(recorded.components.policy.model)
    flops = 0.0
    assert [recorded.line(0)[name] for name in TOTALS[:3]] == [0, 0, 0]
    for step in range(1, 6):
        line, before = recorded.line(step), recorded.line(step - 1)
        table = pq.read_table(recorded.folder.path / "samples" / f"step-{step:06d}.parquet")
        tokens += sum(table["length"].to_pylist())
        assert line["compute/sampled_tokens"] == line["compute/trained_tokens"] == tokens
        rows = [
            (len(group[0].prompt_ids), *(len(item.completion.token_ids) for item in group))
            for group in recorded.steps[step].training_groups()
        ]
        sampling, taken = work.flops_of(rows), line["compute/flops"] - flops
        assert 2 * sampling < taken <= 5 * sampling, (
            "sampling, and at most an old-policy pass and 3 of the update"
        )
        flops = line["compute/flops"]
        seconds = line["time/step"] - line.get("time/eval", 0) - line.get("time/checkpoint", 0)
        assert line["time/total"] - before["time/total"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("prompt_once", "rows"), [(True, [(10, 5, 9)]), (False, [(10, 5), (10, 4), (17, 2)])]
)
def test_a_prompt_and_the_turns_before_are_computed_once_or_each_time(prompt_once, rows):
    """The second completion has 4 tokens, 3 inserted ones after them, and 2 more."""
    completions = [
        Completion([1] * 5, [0.0] * 5, "stop", 0),
        Completion([1] * 6, [0.0] * 6, "stop", 0, inserted=(Insertion(4, (7, 8, 9)),)),
    ]
    problem = Problem("a", "prompt", "1", "a", "math")
    rollouts = [Rollout(problem, "", (1,) * 10, item, "", CORRECT) for item in completions]
    assert [*sampling_rows([Group(problem, tuple(rollouts))], prompt_once)] == rows


def test_of_a_mixture_of_experts_the_active_weights_count():
    """2 of 8 experts of 5 × 6 weights, and a router of 8 × 6."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.router = torch.nn.Parameter(torch.zeros(8, 5, 6)), torch.nn.Linear(6, 8)

    config = SimpleNamespace(num_local_experts=8, num_experts_per_tok=2, hidden_size=6, num_hidden_layers=1)
    config.get_text_config = lambda: config
    head = torch.nn.Linear(6, 3)
    model = SimpleNamespace(
        base_model=Layers(), config=config, device=torch.device("cpu"), dtype=torch.float32,
        get_output_embeddings=lambda: head,
    )  # fmt: skip
    assert PackedWork(model).flops_of([(1, 0)]) == 2 * (2 * 5 * 6 + 8 * 6)
