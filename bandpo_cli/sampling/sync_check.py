"""Check after a weight sync: the engine's log-probs of a few tokens that it samples, against the trainer's.

The tokens are samples of the policy, so that rounding moves their log-probs as little as those of training's tokens;
`benchmarks/sync_noise.py` measures how much that is. Each of several ranks checks its own engine, and the largest gap
decides: all ranks run the same number of probes, because a pass of a sharded model needs all of them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import forward_dtype
from bandpo_cli.sampling.sampler import Sampler, SamplingParams, StaleEngineError, TransformersSampler
from bandpo_cli.types import Completion

SAMPLES, COMPLETION_TOKENS = 4, 8
"""Completions of the probe and their lengths: 32 tokens whose log-probs are compared."""
PROMPT_TOKENS = 72
"""Length of the probe's prompt: more than two blocks of the engine's prefix cache (16 tokens, 32 on a CPU), so that a
cache which a sync has not cleared is read."""
CHECK_EVERY = 10  # Syncs of which one is checked completely
ATTEMPTS = 2
"""Probes, with other tokens each, of which one must be within the limit: a single outlier does not end a run."""
LIMITS = {
    ("cpu", torch.float32): 1e-3,
    # Some of vLLM's attention kernels multiply float32 as TF32, which has a mantissa of 10 bits.
    ("cuda", torch.float32): 2e-2,
}
"""Largest mean absolute difference of the log-probs in nats, by device type and dtype of the weights."""
HALF_PRECISION_LIMIT = 0.1
"""The same for 16-bit weights, whose kernels round differently in the engine and in the trainer."""
_START = "1 + 1 ="  # Text from which the policy samples the first prompt of the probe


def probe_limit(model: PreTrainedModel) -> float:
    """Return the largest mean difference, in nats, that rounding explains for the model's device and dtype."""
    return LIMITS.get((model.device.type, forward_dtype(model)), HALF_PRECISION_LIMIT)


class SyncCheck:
    """Compares the engine with the trainer after a sync: after the first, one in ten, and one that follows a failure.

    The engine continues a prompt; the trainer computes the log-probs of the sampled tokens. The prompt is the start of
    the latest rollout that was long enough, whose keys and values under the old weights are in the engine's cache: a
    sync that does not clear the cache is noticed. Before the first rollout the policy itself samples the prompt.
    """

    gap = math.nan  # of the log-probs in nats, of the latest attempt and the rank where it is largest
    _remaining = 0  # syncs before the next complete check

    def __init__(self, policy: Policy | None, max_model_len: int) -> None:
        """Sample the first prompt with the trainer's model; without a policy `check` compares nothing.

        The engine allows `max_model_len` tokens, at least 2.
        """
        completion = min(COMPLETION_TOKENS, max_model_len - 1)
        self._params = SamplingParams(SAMPLES, 1.0, completion, stop_ids=(), stops=False)
        self._length = min(PROMPT_TOKENS, max_model_len - completion)
        self._policy = policy
        self._prompt = () if policy is None else _sampled_prompt(policy, self._length)

    @contextmanager
    def scheduled(self, always: bool = False) -> Iterator[bool]:
        """Yield whether the sync of the block is checked completely, in any case with `always`.

        The sync counts if the block raises no error.
        """
        remaining, self._remaining = 0 if always else self._remaining, 0
        yield remaining == 0
        self._remaining = (remaining or CHECK_EVERY) - 1

    def observe(self, prompt: Sequence[int], completion: Completion) -> None:
        """Take the start of a rollout as the prompt of the next checks if it is long enough."""
        rollout = (*prompt, *completion.token_ids)
        if len(rollout) >= self._length:
            self._prompt = rollout[: self._length]

    def check(self, model: PreTrainedModel, version: int, sampler: Sampler) -> None:
        """Compare log-probs of the engine's samples with those of the policy's model after `version` updates.

        Raise StaleEngineError if the mean difference is above the limit in every attempt. Raise what the engine of any
        rank raises: all ranks sample together.
        """
        if self._policy is None:
            return
        limit, ranks, prompt = probe_limit(model), self._policy.ranks, self._prompt
        for seed in range(0, ATTEMPTS * SAMPLES, SAMPLES):
            of_ranks = ranks.agree(lambda seed=seed: sampler.sample([prompt], self._params, seed)[0])  # type: ignore[misc]
            gaps = ranks.gather(mean_gap(model, prompt, of_ranks[ranks.rank]))
            self.gap = float(np.max(gaps))  # NaN if one of them is
            if self.gap <= limit:
                return
        raise StaleEngineError(
            f"vLLM's results differ from those of version {version} of the weights: log-probs of sampled tokens differ "
            f"by {self.gap:.3g} nats on average, rounding explains at most {limit:g}"
        )


@torch.no_grad()
def mean_gap(model: PreTrainedModel, prompt: Sequence[int], completions: Sequence[Completion]) -> float:
    """Return the mean absolute difference in nats between reported log-probs and those of the trainer's model.

    The completions continue `prompt`, have one length, and were sampled at temperature 1.
    """
    rows = torch.tensor([[*prompt, *completion.token_ids] for completion in completions], device=model.device)
    reported = torch.tensor([completion.logprobs for completion in completions])
    count = reported.shape[1]
    logits = model(input_ids=rows, use_cache=False, logits_to_keep=count + 1).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, rows[:, -count:, None]).squeeze(2)
    return (logprobs.cpu() - reported).abs().mean().item()


def _sampled_prompt(policy: Policy, length: int) -> tuple[int, ...]:
    """Return a short text and what the policy samples after it, `length` tokens in total."""
    ids = policy.tokenizer(_START)["input_ids"] if policy.tokenizer is not None else [policy.pad_id]
    start = tuple(ids)[: max(1, length - 1)]
    params = SamplingParams(samples=1, temperature=1.0, max_tokens=length, stop_ids=())
    ((completion,),) = TransformersSampler(policy.model, policy.pad_id).sample([start], params, seed=0)
    return (*start, *completion.token_ids)[:length]
