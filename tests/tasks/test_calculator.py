"""The calculator task: its problems and their split, its tool, its bundled model."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.task import CalculatorTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import evaluate
from bandpo_cli.experiments.preflight import check_model_and_task
from bandpo_cli.grading.countdown import calculate
from bandpo_cli.grading.tools import tool_schemas
from bandpo_cli.grading.verl_graders import grade_gsm8k_flexible
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.tool_calls import parse_calls
from bandpo_cli.tasks.arithmetic import calculator
from bandpo_cli.types import Problem
from scripts.embedded_model.build import ALPHABET, CALL, build_calculator_tokenizer

FOLDER = embedded_model_path("embedded-calculator")
TASK = calculator(CalculatorTask())
HELDOUT, TRAIN = TASK.heldout_sets()["calculator"], TASK.train_problems()


def expression_of(problem: Problem) -> str:
    assert not isinstance(problem.prompt, str)
    return problem.prompt[0].content.removesuffix("=")


def test_every_problem_has_the_value_of_its_expression_as_its_answer() -> None:
    problems = [*HELDOUT, *TRAIN]
    assert len(problems) == 89**2
    for problem in problems:
        assert int(problem.answer) == calculate(expression_of(problem)) > 0
        assert grade_gsm8k_flexible(problem, problem.answer).correct
    assert {operator for problem in problems for operator in "+-" if operator in problem.id} == {"+", "-"}


def test_split_is_fixed() -> None:
    # Literal ids: another hash would hold out problems that the bundled model was trained on.
    assert [problem.id for problem in HELDOUT[:2]] == ["calculator/37*69+26", "calculator/17*70+89"]
    assert len(HELDOUT) == 786
    assert not {problem.id for problem in HELDOUT} & {problem.id for problem in TRAIN}


@pytest.mark.slow
def test_the_tool_has_a_schema_and_refuses_what_is_no_expression() -> None:
    (schema,) = tool_schemas(CalculatorTask().functions, of_environment=False)
    assert schema["function"]["name"] == "calculate"
    assert schema["function"]["parameters"]["properties"].keys() == {"expression"}
    assert calculate("12*(3+4)") == 84
    for text in ("12/4", "__import__('os')", "2**9", ""):
        with pytest.raises(ValueError, match="not an expression of whole numbers"):
            calculate(text)


@pytest.mark.parametrize("source", [FOLDER, None], ids=["shipped", "built"])
def test_tokens_and_template_of_the_model(source: Path | None) -> None:
    tokenizer: Any = build_calculator_tokenizer() if source is None else AutoTokenizer.from_pretrained(source)
    assert len(tokenizer) == len(ALPHABET) + 8
    text = "37*58+9".join(CALL)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    call = {"name": "calculate", "arguments": {"expression": "37*58+9"}}
    assert parse_calls(text)["tool_calls"] == [{"type": "function", "function": call}]
    encoder = PromptEncoder.of_run(tokenizer, resolve([{"task": {"name": "calculator"}}]))
    problem = next(problem for problem in TRAIN if expression_of(problem).startswith("37*58"))
    (prompt,) = encoder.encode([problem])
    assert prompt.text == f"<tools><user>{expression_of(problem)}=<assistant>"
    assert tokenizer.decode(encoder.turn_ids([{"role": "tool", "content": "21"}])) == "<tool>21<assistant>"
    message = {"role": "assistant", "content": "", "tool_calls": parse_calls(text)["tool_calls"]}
    assert tokenizer.apply_chat_template([message], tokenize=False) == f"<assistant>{text}<eos>"


def test_the_model_belongs_to_the_task() -> None:
    assert resolve([{"task": {"name": "calculator"}}]).model.path == "embedded-calculator"
    assert (
        resolve([{"task": {"name": "calculator"}, "model": {"path": "org/name"}}]).sampling.max_tokens == 1024
    )
    assert (
        resolve([{"task": {"name": "calculator"}, "model": {"dtype": "float32"}}]).sampling.max_tokens == 48
    )
    assert resolve([{"model": {"path": "embedded-calculator"}}]).task.name == "calculator"
    for model, task in (("embedded", "calculator"), ("embedded-calculator", "countdown")):
        config = resolve([{"task": {"name": task}, "model": {"path": model}}])
        trained = {"calculator": "countdown", "countdown": "calculator"}[task]
        with pytest.raises(
            ConfigError, match=f"trained on {trained} only; give another --model or --task {trained}$"
        ):
            check_model_and_task(config, "--task")


@pytest.mark.slow
def test_the_model_calls_its_tool_for_some_problems(tmp_path: Path) -> None:
    """Fails for a damaged or replaced file. With 64 problems × 4 the standard error is about 0.03."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1e6
    settings: Any = [{"tracking": {"mlflow": False}}]
    result = evaluate("embedded-calculator", n=4, k=[1], limit=64, settings=settings, runs_dir=tmp_path)
    assert 0.1 < result.scores["calculator"].metrics["mean_at_4"].value < 0.3
