"""Inputs of the commands: a small language model, problem files and settings files, all deterministic."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL = "model"
"""Folder of the text model."""

_ANSWERS = ("1", "2", "x+1", "1+x", "\\frac{1}{2}", "\\frac{2}{4}", "2\\sqrt{3}", "\\sqrt{12}")
"""Values that the model can answer with. Pairs of them are equal as expressions only, which math-verify finds."""

_QUESTIONS = ("half of one", "x plus one", "root of twelve", "one plus one")
_REFERENCES = ("\\frac{1}{2}", "x+1", "\\sqrt{12}", "2")
_WORDS = ("What", "is", "half", "of", "one", "x", "plus", "root", "twelve", "number", "?", "0", "3", "4", "5")

_GRADER = '''"""A grader that gives partial credit."""


def digits(text, answer, extra):
    count = sum(character.isdigit() for character in text)
    return {"score": min(count, 10) / 10, "correct": answer in text, "verdict": f"digits-{count}"}
'''

SETTINGS: dict[str, str] = {
    "small.yaml": """
sampling: {prompts: 8, samples: 4}
optim: {lr: 4.0e-4, warmup_steps: 1, updates: 4}
evaluation: {every: 2, problems: 8, samples: 4, k: [1, 4]}
checkpoint: {every: 2, keep_last: 2, keep_best: 1}
grading: {workers: 1, deadline: 60}
tracking: {mlflow: false}
""",
    "rich.yaml": """
sampling: {dynamic: true, dynamic_batches: 3}
reward: {wrong: -1, overlong_buffer: 3, overlong_penalty: 0.5}
objective: {reference_kl: 0.05}
optim: {schedule: cosine, weight_decay: 0.01, betas: [0.9, 0.95], micro_batch_tokens: 256}
""",
    "clip.yaml": """
bounds: {eps_low: 0.05, eps_high: 0.05}
objective: {aggregation: token-mean, advantage_std: false, dual_clip: null}
optim: {schedule: linear}
checkpoint: {keep_last: null}
sampling: {max_sequences: 10}
evaluation: {batch: 8}
""",
    "relaxed.yaml": """
bounds: {relax: {eps_low: 0.02, eps_high: 0.03}, max_ratio: null}
objective: {aggregation: seq-sum-norm, old_logprobs: sampler}
model: {gradient_checkpointing: true, dtype: bfloat16}
""",
    "file.yaml": """
sampling: {max_tokens: 6, max_prompt_tokens: 52}
task: {name: data, train: [problems.jsonl], heldout: [heldout.jsonl, {path: hard.csv, grader: "mine:digits"}]}
model: {path: model}
""",
    "sweep.yaml": """
axes:
  bounds.method: [dcpo, band]
  bounds.divergence: [kl]
  bounds.delta: ["match:clip"]
recorded: kl
seeds: [5]
baseline: dcpo
""",
    "broken.yaml": "optim: {lr: [1\nsteps: 3\n",
    "twice.yaml": "steps: 3\nsteps: 4\n",
    "list.yaml": "- 1\n- 2\n",
    "axis.yaml": "axis: {bounds.delta: [0.1]}\n",
}
"""Settings files by name."""


def write_inputs(folder: Path) -> None:
    """Write all inputs into `folder`."""
    for name, text in SETTINGS.items():
        (folder / name).write_text(text.lstrip(), encoding="utf-8")
    problems = [
        {"question": f"What is {question} number {index} ?", "answer": reference}
        for index in range(6)
        for question, reference in zip(_QUESTIONS, _REFERENCES, strict=True)
    ]
    _write_lines(folder / "problems.jsonl", problems[:16])
    _write_lines(folder / "heldout.jsonl", problems[16:])
    (folder / "hard.csv").write_text("question,answer\nroot of x,2\nhalf of twelve,1\n", encoding="utf-8")
    (folder / "mine.py").write_text(_GRADER, encoding="utf-8")
    stored = [
        {**problem, "completions": [f"It is \\boxed{{{answer}}}." for answer in _ANSWERS] + ["Answer: 7"]}
        for problem in problems[:4]
    ]
    _write_lines(folder / "stored.jsonl", [*stored, {**problems[4], "completions": ["no idea", "#### 2"]}])
    (folder / "torn.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question": "r", "ans\n')
    (folder / "unanswered.jsonl").write_text('{"question": "q"}\n')
    (folder / "empty").mkdir()
    write_model(folder / MODEL)


def write_model(folder: Path) -> None:
    """Write a Llama folder with random weights whose vocabulary is words and whole answers.

    transformers gives every Qwen2 model the tokenizer of Qwen2, which reads no words.

    A random model over single letters never writes an answer; this one does in most completions.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ("<pad>", "<unknown>", "<end>")
    answers = [f"\\boxed{{{answer}}}" for answer in _ANSWERS]
    vocabulary = {
        word: index for index, word in enumerate([*special, *_WORDS, "Answer:", *_ANSWERS, *answers])
    }
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=vocabulary["<end>"],
            pad_token_id=vocabulary["<pad>"],
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
