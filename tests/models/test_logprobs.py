"""Log-probs from shared-prompt rows are those of each sequence run alone through the whole model."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.errors import UserError
from bandpo_cli.models.batch import Row, collate, split_rows
from bandpo_cli.models.logprobs import check_plain_head, token_logprobs
from tests.conftest import random_model

ROWS = [
    Row([1, 2, 3], [[4, 5], [6], [7, 8, 9, 10]]),
    Row([11, 12, 13, 14, 15], [[1, 1, 1]]),
    Row([16], [[2], [3, 4]]),
]
CPU = torch.device("cpu")


def alone(
    model: PreTrainedModel, row: Row, completion: list[int], temperature: float
) -> tuple[torch.Tensor, ...]:
    """Run prompt + completion as one plain sequence and read off the completion: (log-probs, entropies at T=1)."""
    ids = torch.tensor([[*row.prompt_ids, *completion]])
    logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].double()
    logprobs = torch.log_softmax(logits / temperature, -1)[range(len(completion)), completion]
    return logprobs, torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_shared_prompts_change_nothing(model: PreTrainedModel, temperature: float) -> None:
    ours = token_logprobs(model, collate(ROWS, 0, CPU), temperature, with_entropy=True)
    expected = [alone(model, row, list(c), temperature) for row in ROWS for c in row.completions]
    torch.testing.assert_close(
        ours.logprobs.double(), torch.cat([e[0] for e in expected]), atol=2e-5, rtol=1e-5
    )
    assert ours.entropy is not None
    torch.testing.assert_close(
        ours.entropy.double(), torch.cat([e[1] for e in expected]), atol=2e-5, rtol=1e-5
    )


def test_shared_prompts_give_the_same_gradient(model: PreTrainedModel) -> None:
    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    together = gradient(token_logprobs(model, collate(ROWS, 0, CPU)).logprobs.sum())
    apart = gradient(sum(alone(model, row, list(c), 1.0)[0].sum() for row in ROWS for c in row.completions))
    torch.testing.assert_close(together, apart.to(together.dtype), atol=1e-3, rtol=1e-3)


def test_a_row_does_not_see_its_neighbours() -> None:
    """If completions attended to one another, changing the first would change the second's log-probs."""
    model = random_model()
    one = token_logprobs(model, collate([Row([1, 2], [[3, 4], [5, 6]])], 0, CPU)).logprobs
    other = token_logprobs(model, collate([Row([1, 2], [[7, 8], [5, 6]])], 0, CPU)).logprobs
    assert torch.equal(one[2:], other[2:])
    assert not torch.equal(one[:2], other[:2])


def test_splitting_keeps_order_and_size() -> None:
    rows = [Row([0] * n, [[1] * m]) for n, m in [(3, 2), (1, 1), (9, 9), (2, 2), (2, 1)]]
    parts = split_rows(rows, max_tokens=10)
    assert [row for part in parts for row in part] == rows
    assert [len(part) for part in parts] == [2, 1, 2]
    for part in parts:
        assert len(part) == 1 or max(map(len, part)) * len(part) <= 10


def test_a_model_with_capped_logits_is_refused() -> None:
    model = random_model()
    check_plain_head(model)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        check_plain_head(model)
