"""Sampling with the trainer's own model: always in step with the policy, no second copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from bandpo_cli.sampling.base import SamplingParams, TokenIds
from bandpo_cli.types import Completion


class TransformersSampler:
    """Prefills each prompt once, branches its cache n ways, and drops completions from the batch as they end."""

    shares_weights = True

    def __init__(self, model: PreTrainedModel, pad_id: int, max_sequences: int = 2048) -> None:
        self._model = model
        self._pad_id = pad_id
        self._max_sequences = max_sequences
        self._version = 0

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Note the version: the weights are shared with the trainer, so they are current by construction."""
        self._model = model
        self._version = version

    def sleep(self) -> None:
        """Nothing to give back: between calls nothing is held beyond the trainer's model."""

    def close(self) -> None:
        """Nothing is held beyond the trainer's model."""

    @torch.inference_mode()
    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return [P][n] completions; see `Sampler`."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        prompts_at_once = max(1, self._max_sequences // params.samples)
        groups: list[list[Completion]] = []
        for start in range(0, len(prompts_P), prompts_at_once):
            groups += self._sample_batch(prompts_P[start : start + prompts_at_once], params, generator)
        return groups

    def _sample_batch(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, generator: torch.Generator
    ) -> list[list[Completion]]:
        device, n = self._model.device, params.samples
        ids, attended = _left_pad(prompts_P, self._pad_id, device)
        lengths = attended.sum(dim=1)
        cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids, attended, (attended.cumsum(dim=1) - 1).clamp(min=0), cache)
        cache.batch_repeat_interleave(n)
        logits, attended = logits.repeat_interleave(n, dim=0), attended.repeat_interleave(n, dim=0)
        positions = lengths.repeat_interleave(n)

        total = len(prompts_P) * n
        tokens = torch.full((total, params.max_tokens), self._pad_id, device=device)
        logprobs = torch.zeros(total, params.max_tokens, device=device)
        counts = torch.full((total,), params.max_tokens, device=device)
        stopped = torch.zeros(total, dtype=torch.bool, device=device)
        stop_ids = torch.tensor(params.stop_ids, device=device)
        alive = torch.arange(total, device=device)
        for step in range(params.max_tokens):
            # One number a sequence, alive or not: what a sequence draws does not depend on when others end.
            uniforms = torch.rand(total, generator=generator, dtype=torch.float64).to(device)[alive]
            drawn, drawn_logprobs = sample_tokens(logits, uniforms, params.temperature)
            tokens[alive, step], logprobs[alive, step] = drawn, drawn_logprobs
            ends = torch.isin(drawn, stop_ids)
            counts[alive[ends]], stopped[alive[ends]] = step + 1, True
            if step + 1 == params.max_tokens:
                break
            if ends.any():
                going = (~ends).nonzero().squeeze(1)
                if not len(going):
                    break
                cache.batch_select_indices(going)
                alive, drawn, attended = alive[going], drawn[going], attended[going]
            attended = torch.cat([attended, attended.new_ones(len(alive), 1)], dim=1)
            logits = self._forward(drawn[:, None], attended, (positions[alive] + step)[:, None], cache)
        return self._collect(tokens, logprobs, counts, stopped, n)

    def _forward(
        self, ids: torch.Tensor, attended: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Run the model on new tokens and return the logits after the last of them, float32 [B, V]."""
        output = self._model(
            input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _collect(
        self,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        counts: torch.Tensor,
        stopped: torch.Tensor,
        n: int,
    ) -> list[list[Completion]]:
        rows = zip(tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        flat = [
            Completion(tuple(ids[:count]), tuple(lps[:count]), "stop" if stop else "length", self._version)
            for ids, lps, count, stop in rows
        ]
        return [flat[i : i + n] for i in range(0, len(flat), n)]


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: [B, V] float32.
        uniforms: [B] in [0, 1), one a row.
        temperature: 0 takes the likeliest token, with its log-prob at temperature 1.

    Returns:
        (tokens [B] int64, their log-probs [B] float32 at this temperature).
    """
    if temperature == 0:
        best = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return best.indices, best.values
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    # Scaled by the last entry, not by 1: rounding must not leave a draw beyond the end. `right` skips zero widths.
    points = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, points, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(-1, tokens).squeeze(1)


def _left_pad(
    prompts: Sequence[TokenIds], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, both int64 [P, longest], with padding on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    attended = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(attended, device=device)
