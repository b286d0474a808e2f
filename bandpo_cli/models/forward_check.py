"""Whether a model's log-probs can be computed the way `token_logprobs` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from bandpo_cli.errors import UserError
from bandpo_cli.models.batch import Row, collate
from bandpo_cli.models.logprobs import token_logprobs

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats. Rounding stays well below; attention across rows or a factor at the logits does not."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep packed rows apart; others pass a state on or cut rows into chunks of their own."""


def check_plain_head(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are more than its output embedding times its hidden state.

    Raises:
        UserError: the architecture scales or caps its logits, which `token_logprobs` would miss.
    """
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UserError(
                f"model.path: {config.model_type} models change their logits by '{name}', not supported"
            )


@torch.no_grad()
def check_forward(model: PreTrainedModel) -> None:
    """Compare `token_logprobs` on packed rows with the model's own forward pass on each sequence alone.

    Layers that carry a state from token to token would carry it from one packed row into the next, and architectures
    differ in what they do to their logits. A few tokens tell, whatever the architecture.

    Raises:
        UserError: they differ, or the model cannot be called this way.
    """
    kind, text = model.config.model_type, model.config.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - PACKED_LAYERS:
        raise UserError(
            f"model.path: {kind} models have {sorted(others)[0]} layers, which do not run on packed rows"
        )
    known = min(text.vocab_size, 1000)
    ids = [(7 * i + 3) % known for i in range(12)]
    rows = [Row(ids[:3], [ids[3:6], ids[6:8]]), Row(ids[8:10], [ids[10:]])]
    try:
        packed = token_logprobs(model, collate(rows, model.device)).logprobs
    except torch.OutOfMemoryError:
        raise  # says nothing about the architecture
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {kind} models do not run on packed rows: {reason}") from None
    alone = torch.cat(
        [_alone(model, row.prompt_ids, completion) for row in rows for completion in row.completions]
    )
    gap = (packed - alone).abs().max().item()
    if not gap <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        raise UserError(
            f"model.path: {kind} models are not supported: in rows without padding their log-probs are off by {gap:.3g}"
        )


def _alone(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
