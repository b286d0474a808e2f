"""Time of every policy loss relative to clip: the loss alone, and a complete update of the bundled model.

    python benchmarks/policy_losses.py [--tokens N] [--rounds R] [--threads T] [--only NAME ...]

The loss alone is `PolicyLoss.prepare` and `policy_objective` (loss and gradient) on N tokens in completions of 1 to 500
tokens, with log-ratios of standard deviation 0.1. The update is `prepare` and `update_policy`, that is forward and
backward passes, clip metrics and an AdamW step, on 128 completions of 16 random tokens. Rounds go through all methods,
so that other load on the machine slows all alike; each value is the minimum over the rounds.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from shared import command_line

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.loss import LossBatch, PolicyLoss, policy_loss
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.objective.policy_objective import AGGREGATIONS, policy_objective
from bandpo_cli.training.experience import Experience, prepare_updates
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import update_policy
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout

REFERENCE = "clip"
PROMPTS, SAMPLES, LENGTH = 16, 8, 16


def loss_of(method: str) -> tuple[RunConfig, PolicyLoss]:
    """Return a method's loss and a run's settings, all with defaults."""
    config = resolve([{"bounds": {"method": method}, "optim": {"warmup_steps": 0}}])
    return config, policy_loss(config.bounds, config.objective)


def random_tokens(count: int) -> tuple[LossBatch, torch.Tensor, torch.Tensor]:
    """Return `count` tokens, their new log-probs [N] and their weights [N]; advantages have both signs."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 501, (count,), generator=generator)
    lengths = lengths[: int((lengths.cumsum(0) < count).sum()) + 1]
    lengths[-1] += count - int(lengths.sum())
    old = -8 * torch.rand(count, generator=generator) ** 3 - 1e-4
    new = (old + 0.1 * torch.randn(count, generator=generator)).clamp(max=-1e-5)
    advantages = torch.randn(len(lengths), generator=generator).repeat_interleave(lengths)
    weights = AGGREGATIONS["token-mean"](lengths, 500).repeat_interleave(lengths)
    return LossBatch(lengths, advantages, old, wrong_peers=torch.ones(len(lengths))), new, weights


def run_loss(loss: PolicyLoss, tokens: LossBatch, new: torch.Tensor, weights: torch.Tensor) -> None:
    """Compute loss and gradient of all tokens at once."""
    columns = loss.prepare(tokens.old_logprobs, tokens.advantages)
    policy_objective(loss, new, replace(tokens, columns=columns), weights)


def random_experience(policy: Policy) -> Experience:
    """Return an experience of random prompts and completions, with random advantages.

    It is that of a method that needs all tokens: its values under π_old are known before the update.
    """
    config, loss = loss_of("kl-cov")
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 20, (count,), generator=generator).tolist())

    groups = []
    for index in range(PROMPTS):
        problem = Problem(str(index), "", "", "random", "countdown")
        prompt = tokens(16)
        rollouts = tuple(
            Rollout(problem, "", prompt, Completion(tokens(LENGTH), (-1.0,) * LENGTH, "length", 0), "",
                    Grade(0.0, False, "wrong"))
            for _ in range(SAMPLES)
        )  # fmt: skip
        groups.append(Group(problem, rollouts))
    advantages = torch.randn(PROMPTS, SAMPLES, generator=generator)
    one_update = config.model_copy(update={"optim": config.optim.model_copy(update={"updates": 1})})
    (experience,) = prepare_updates(policy, None, groups, advantages, loss, one_update, sampler_is_exact=True)
    return experience


def run_update(
    policy: Policy, optimizer: Optimizer, experience: Experience, config: RunConfig, loss: PolicyLoss
) -> None:
    """Prepare the method's columns and apply one update."""
    columns = loss.prepare(experience.old_logprobs, experience.advantages)
    update_policy(policy, optimizer, [replace(experience, loss=loss, columns=columns)], config)


def milliseconds(work: Callable[[], None]) -> float:
    """Return the wall time of one call."""
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Parse the arguments and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    methods = [REFERENCE, *(name for name in arguments.only if name != REFERENCE)]

    config, loss = loss_of(REFERENCE)
    policy = load_policy(config.model)
    experience = random_experience(policy)
    optimizer = Optimizer(policy.model, config.optim, total_updates=10_000)
    tokens, new, weights = random_tokens(arguments.tokens)
    losses: dict[str, Callable[[], None]] = {}
    updates: dict[str, Callable[[], None]] = {}
    for name in methods:
        config, loss = loss_of(name)
        losses[name] = partial(run_loss, loss, tokens, new, weights)
        updates[name] = partial(run_update, policy, optimizer, experience, config, loss)

    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in methods}
    for _ in range(arguments.rounds):
        for name in methods:
            times[name][0].append(milliseconds(losses[name]))
            times[name][1].append(milliseconds(updates[name]))

    print(
        f"{arguments.tokens:,} tokens; update of {len(experience.old_logprobs):,} tokens, "
        f"{policy.model.num_parameters():,} parameters; {arguments.threads} thread(s), "
        f"torch {torch.__version__}; minimum of {arguments.rounds} rounds"
    )
    print(f"{'method':<12}{'loss, ms':>10}{'÷ clip':>8}{'update, ms':>13}{'÷ clip':>8}")
    loss_of_reference, update_of_reference = map(min, times[REFERENCE])
    for name in methods:
        loss_time, update_time = map(min, times[name])
        print(
            f"{name:<12}{loss_time:>10.2f}{loss_time / loss_of_reference:>8.2f}"
            f"{update_time:>13.1f}{update_time / update_of_reference:>8.2f}"
        )


if __name__ == "__main__":
    main()
