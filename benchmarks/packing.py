"""Training throughput on packed rows, compared with rows padded to the longest of their batch.

    python benchmarks/packing.py --data FILE.jsonl [--budget N ...] [--rows N] [--rounds R] [--threads T]

Each line of the file has a `question` and an `answer`; a byte-pair tokenizer trained on the file gives their lengths. A
random Qwen2 network of a few million parameters computes log-probs of the answers, forward and backward, on the CPU.
Both layouts use the same rows in the same shuffled order, the same maximum tokens per batch (padding included) and
the same output layer; a row is a question with one answer. Rates are tokens of the rows per second, without padding.
The layouts alternate; reported are medians of the rounds without the first.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from shared import command_line, random_qwen2
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedModel

from bandpo_cli.models.logprobs import linear_logprobs, token_logprobs
from bandpo_cli.models.packing import Row, batch_rows, collate

VOCABULARY = 8192
CPU = torch.device("cpu")


def read_rows(file: Path, count: int) -> list[Row]:
    """Return shuffled rows of questions and answers as tokens."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = ByteLevelBPETokenizer()
    texts = [problem[key] for problem in problems for key in ("question", "answer")]
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    chosen = random.Random(0).sample(problems, count)
    return [
        Row(tokenizer.encode(problem["question"]).ids, [tokenizer.encode(problem["answer"]).ids])
        for problem in chosen
    ]


def packed(model: PreTrainedModel, rows: Sequence[Row], budget: int) -> list[torch.Tensor]:
    """Accumulate the gradient over packed batches and return the log-probs."""
    results = []
    for batch in batch_rows(rows, budget):
        logprobs = token_logprobs(model, collate(batch, CPU)).logprobs
        logprobs.sum().backward()
        results.append(logprobs.detach())
    return results


def padded(model: PreTrainedModel, rows: Sequence[Row], budget: int) -> list[torch.Tensor]:
    """Accumulate the gradient over batches padded on the right and return the log-probs."""
    results = []
    for batch in padded_batches(rows, budget):
        sequences = [[*row.prompt_ids, *row.completions[0]] for row in batch]
        width = max(map(len, sequences))
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
        attended = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        hidden = model.base_model(input_ids=ids, attention_mask=attended, use_cache=False).last_hidden_state
        predictor_index = torch.tensor(
            [
                index * width + column
                for index, row in enumerate(batch)
                for column in range(len(row.prompt_ids) - 1, len(row) - 1)
            ]
        )
        targets = torch.tensor([token for row in batch for token in row.completions[0]])
        head = model.get_output_embeddings()
        predicting = hidden.flatten(0, 1)[predictor_index]
        logprobs = linear_logprobs(predicting, head.weight, head.bias, targets).logprobs
        logprobs.sum().backward()
        results.append(logprobs.detach())
    return results


def padded_batches(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Split rows, in order, into lists whose padded size is at most `budget` tokens."""
    batches: list[list[Row]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row))
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = len(row)
        batches[-1].append(row)
    return batches


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="jsonl with the fields question and answer")
    parser.add_argument("--budget", type=int, nargs="+", default=[4096, 16384], help="tokens per batch")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, model = read_rows(arguments.data, arguments.rows), random_qwen2(VOCABULARY, 256, 1024, 4, 8, 4)
    lengths = sorted(map(len, rows))
    tokens = sum(lengths)
    print(
        f"{len(rows)} rows, {tokens} tokens; lengths: median {lengths[len(rows) // 2]}, longest {lengths[-1]}"
    )
    print(f"{'budget':>7} {'padding':>8} {'padded tok/s':>13} {'packed tok/s':>13} {'packed/padded':>14}")
    layouts: list[Callable[..., list[torch.Tensor]]] = [padded, packed]
    for budget in arguments.budget:
        size = sum(len(batch) * max(map(len, batch)) for batch in padded_batches(rows, budget))
        seconds: list[list[float]] = [[], []]
        for _ in range(arguments.rounds + 1):
            results = []
            for layout, durations in zip(layouts, seconds, strict=True):
                model.zero_grad()
                started = time.perf_counter()
                results.append(torch.cat(layout(model, rows, budget)))
                durations.append(time.perf_counter() - started)
            torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
        padded_rate, packed_rate = (tokens / statistics.median(durations[1:]) for durations in seconds)
        print(
            f"{budget:7d} {1 - tokens / size:8.1%} {padded_rate:13.0f} {packed_rate:13.0f} "
            f"{packed_rate / padded_rate:14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
