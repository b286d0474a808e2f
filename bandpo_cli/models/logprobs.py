"""Log-probabilities and entropy of sampled tokens under a policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from bandpo_cli.errors import UserError
from bandpo_cli.models.batch import TokenBatch


class TokenLogprobs(NamedTuple):
    """[N] float32 each, nats: log π(token) at the sampling temperature; the entropy of π (T=1) where it was drawn."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


def token_logprobs(
    model: PreTrainedModel, batch: TokenBatch, temperature: float = 1.0, with_entropy: bool = False
) -> TokenLogprobs:
    """Run the model on a batch and read off its completion tokens.

    Logits are formed for the N completion positions alone, never for the prompts. Gradients flow when enabled.

    Args:
        temperature: the sampling temperature, so that these agree with what the sampler drew from.
        with_entropy: also return the entropy at T=1 (detached).
    """
    hidden = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attend,
        use_cache=False,
    ).last_hidden_state
    predicting = hidden.flatten(0, 1)[batch.predictors]
    logits = model.get_output_embeddings()(predicting).float()
    entropy = None
    if with_entropy:
        log_p = torch.log_softmax(logits.detach(), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    scaled = logits if temperature == 1.0 else logits / temperature
    chosen = scaled.gather(-1, batch.targets[:, None]).squeeze(-1)
    return TokenLogprobs(chosen - torch.logsumexp(scaled, dim=-1), entropy)


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
