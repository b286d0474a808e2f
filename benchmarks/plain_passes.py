"""Sampling and updates of bandpo beside plain calls of transformers on the same tokens.

    python benchmarks/plain_passes.py [--model FOLDER] [--rounds N] [--prompts P] [--tokens T] [--compile]

P prompts of 12 random tokens with 8 completions of T tokens each and two updates, in one process, alternately:

- sampling by the built-in sampler, and `generate` of transformers with a dynamic and a static cache;
- two updates (log-probs and entropies of the tokens, the Band, the loss, gradients, clipping, AdamW), and two plain
  forward and backward passes: logits of all completion tokens and their cross-entropy, without an optimizer. A
  plain pass has a row per prompt with all its completions, so both compute the same number of tokens.

`--compile` also measures the updates with `model.compile`.

Reported is the processor time, whose smallest value a busy machine changes least.
"""

import statistics
import time
from collections.abc import Callable

import torch
from shared import command_line

from bandpo_cli.config.layers import resolve
from bandpo_cli.methods.loss import policy_loss
from bandpo_cli.models.load import load_policy
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.training.experience import prepare_updates
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import update_policy
from bandpo_cli.types import Grade, Group, Problem, Rollout

SAMPLES, PROMPT_TOKENS, UPDATES = 8, 12, 2


def actions(path: str, prompts: int, tokens: int, compiled: bool = False) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    sizes = {"prompts": prompts, "samples": SAMPLES, "max_tokens": tokens}
    optim = {"updates": UPDATES, "lr": 1e-7, "warmup_steps": 0}
    config = resolve([{"model": {"path": path, "compile": compiled}, "sampling": sizes, "optim": optim}])
    policy = load_policy(config.model, for_training=True)
    model = policy.model
    ids = torch.randint(5, model.config.vocab_size - 5, (prompts, PROMPT_TOKENS))
    params = SamplingParams(SAMPLES, 1.0, tokens, ())
    sampler = TransformersSampler(model, policy.pad_id)
    completions = sampler.sample(ids.tolist(), params, seed=0)

    @torch.inference_mode()
    def generate(cache: str | None) -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            cache_implementation=cache,
            pad_token_id=0,
        )

    def group(index: int) -> Group:
        problem = Problem(str(index), "", "", "", "")
        grades = [Grade(float(number % 2), bool(number % 2), "correct") for number in range(SAMPLES)]
        pairs = zip(completions[index], grades, strict=True)
        rollouts = [
            Rollout(problem, "", tuple(ids[index].tolist()), item, "", grade) for item, grade in pairs
        ]
        return Group(problem, tuple(rollouts))

    groups = [group(index) for index in range(prompts)]
    advantages = torch.tensor([1.0, -1.0]).repeat(prompts, SAMPLES // 2)
    optimizer = Optimizer(model, config.optim, total_updates=10**6)
    loss = policy_loss(config.bounds, config.objective)

    def update() -> None:
        experiences = prepare_updates(policy, None, groups, advantages, loss, config, sampler_is_exact=True)
        update_policy(policy, optimizer, experiences, config)
        optimizer.zero_grad()

    sampled = torch.tensor(
        [[token for item in of_prompt for token in item.token_ids] for of_prompt in completions]
    )

    def plain() -> None:
        for rows in torch.cat([ids, sampled], dim=1).chunk(UPDATES):
            logits = model(input_ids=rows, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), rows[:, PROMPT_TOKENS:].flatten()
            ).backward()
            model.zero_grad()

    return {
        "sampling": lambda: sampler.sample(ids.tolist(), params, seed=0),
        "generate, dynamic cache": lambda: generate(None),
        "generate, static cache": lambda: generate("static"),
        "updates": update,
        "plain passes": plain,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    size = (arguments.model, arguments.prompts, arguments.tokens)
    timed = actions(*size)
    if arguments.compile:
        timed["updates, compiled"] = actions(*size, compiled=True)["updates"]
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(arguments.rounds + 1):
        for name, action in timed.items():
            start = time.process_time()
            action()
            if number:  # the first round is not counted
                seconds[name].append(time.process_time() - start)
    for name, values in seconds.items():
        print(f"{name:24} {min(values):8.3f} s of the processor, median {statistics.median(values):.3f} s")
    fastest = {name: min(values) for name, values in seconds.items()}
    generate = min(value for name, value in fastest.items() if name.startswith("generate"))
    print(f"sampling / generate      {fastest['sampling'] / generate:8.2f}")
    print(f"updates / plain passes   {fastest['updates'] / fastest['plain passes']:8.2f}")
    if arguments.compile:
        print(f"compiled / not compiled  {fastest['updates, compiled'] / fastest['updates']:8.2f}")


if __name__ == "__main__":
    main()
