"""Problems as data files of verl, and the chat template with which verl's prompts have the token ids of a run here.

A row has verl's columns: `data_source`, `prompt`, `ability`, `reward_model` and `extra_info`. The complete problem is
in `extra_info.problem` as JSON, which `exports.verl_reward` reads back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.storage.files import write_json
from bandpo_cli.tasks.task import Task
from bandpo_cli.types import Message, Problem

JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The chat template that returns the text of the only message."""


def chat_template(config: RunConfig, problems: Sequence[Problem]) -> str | None:
    """Return the value of verl's `custom_chat_template` for these prompts; None for the model's own template.

    The tokenizer is loaded unless `model.prompts` is `chat`: it decides whether messages are converted by a template,
    and adds its special tokens to messages that are joined.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or no template gives verl the same token ids.
    """
    model = config.model
    if isinstance(problems[0].prompt, str):
        return JOINED
    if model.prompts == "chat":
        return None
    from bandpo_cli.models.load import load_tokenizer
    from bandpo_cli.sampling.rollouts import PromptEncoder

    tokenizer: Any = load_tokenizer(model)
    if model.prompts == "auto" and getattr(tokenizer, "chat_template", None) is not None:
        return None
    encoded = PromptEncoder(tokenizer, model.prompts).encode(problems)

    def token_ids(template: str, text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    for template in (JOINED, "{{ bos_token }}" + JOINED):
        if all(token_ids(template, prompt.text) == prompt.token_ids for prompt in encoded):
            return template
    raise ConfigError(
        f"model.prompts = {model.prompts!r}: the tokenizer of {model.path} adds special tokens to a text that verl "
        "cannot have in a prompt; use model.prompts=chat"
    )


def heldout_problems(config: RunConfig, task: Task) -> dict[str, Sequence[Problem]]:
    """Return the problems of each evaluation set that a run evaluates, `evaluation.problems` of them."""
    return {
        label: list(islice(problems, config.evaluation.problems))
        for label, problems in task.heldout_sets().items()
    }


def write_problems(
    path: Path, split: str, sets: Mapping[str, Sequence[Problem]], join_messages: bool
) -> None:
    """Write a Parquet file in verl's layout.

    Args:
        path: the file.
        split: `train` or `test`, in `extra_info`.
        sets: problems by `data_source`, by which verl names its metrics.
        join_messages: the messages of a prompt become one, joined with blank lines; a prompt that is a text is a single
            message in any case.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    schema = pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(message)),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([("split", text), ("index", pa.int64()), ("problem", text)])),
        ]
    )
    labelled = [(label, problem) for label, problems in sets.items() for problem in problems]
    rows = [
        {
            "data_source": label,
            "prompt": _messages(problem, join_messages),
            "ability": problem.source,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "problem": problem_to_json(problem)},
        }
        for index, (label, problem) in enumerate(labelled)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _messages(problem: Problem, join: bool) -> list[dict[str, str]]:
    prompt = problem.prompt
    if isinstance(prompt, str) or join:
        text = prompt if isinstance(prompt, str) else "\n\n".join(message.content for message in prompt)
        return [{"role": "user", "content": text}]
    return [vars(message) for message in prompt]


def copy_embedded_model(folder: Path) -> None:
    """Copy the bundled model, and add two tokens to its tokenizer that verl asks every Qwen2 model for.

    verl looks up the newline and the end of a chat turn (`utils/tokenizer/continuous_token.py`) before it has a prompt.
    No prompt of the model contains them, and it cannot sample them: they are beyond its vocabulary.
    """
    from bandpo_cli.models.load import embedded_model_path

    shutil.copytree(embedded_model_path(), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": first + index, "content": text, "special": special}
        for index, (text, special) in enumerate((("\n", False), ("<|im_end|>", True)))
    ]
    write_json(file, tokenizer)


def problem_to_json(problem: Problem) -> str:
    """Return a problem as JSON; `problem_from_json` is the inverse."""
    prompt = problem.prompt
    messages = prompt if isinstance(prompt, str) else [[item.role, item.content] for item in prompt]
    return json.dumps({**vars(problem), "prompt": messages, "extra": dict(problem.extra)}, ensure_ascii=False)


def problem_from_json(text: str) -> Problem:
    """Return the problem that `problem_to_json` wrote."""
    fields = json.loads(text)
    if not isinstance(fields["prompt"], str):
        fields["prompt"] = tuple(Message(role, content) for role, content in fields["prompt"])
    return Problem(**fields)
