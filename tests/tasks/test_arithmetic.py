"""Generated tasks: exactly the solvable problems, the fixed splits, the calculator, and the stream of problems."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.task import CalculatorTask, CountdownTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import evaluate
from bandpo_cli.experiments.plan import check_model_and_task
from bandpo_cli.grading.countdown import calculate, grade_countdown
from bandpo_cli.grading.tools import tool_schemas
from bandpo_cli.grading.verl_graders import grade_gsm8k_flexible
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.tool_calls import parse_calls
from bandpo_cli.tasks.task import ProblemStream, calculator, countdown
from bandpo_cli.types import Problem
from scripts.embedded_model.build import ALPHABET, CALL, build_calculator_tokenizer

COUNTDOWN = countdown(CountdownTask())
HELDOUT = COUNTDOWN.heldout_sets()["countdown"]
ALL = [*COUNTDOWN.train_problems(), *HELDOUT]
CALCULATOR = calculator(CalculatorTask())
CALCULATOR_HELDOUT, CALCULATOR_TRAIN = CALCULATOR.heldout_sets()["calculator"], CALCULATOR.train_problems()
FOLDER = embedded_model_path("embedded-calculator")


def solve_by_brute_force(config: CountdownTask) -> dict[str, str]:
    """Return an answer to each prompt, from all orders and operators."""
    answers = {}
    for order in itertools.product(range(1, config.max_number + 1), repeat=config.numbers):
        for signs in itertools.product("+-*", repeat=config.numbers - 1):
            text = "".join(f"{sign}{number}" for sign, number in zip(("", *signs), order, strict=True))
            terms = text.replace("-", "+-").split("+")
            value = sum(math.prod(map(int, term.split("*"))) for term in terms)
            if config.min_target <= value <= config.max_target:
                answers[f"{' '.join(map(str, sorted(order)))}={value}:"] = text
    return answers


@pytest.mark.parametrize("sizes", [(2, 10, 0, 50), (3, 5, 0, 30), (4, 4, 17, 99), (5, 2, 0, 20)])
def test_problems_are_exactly_the_solvable_ones_and_have_answers_that_the_grader_accepts(sizes):
    names = ("numbers", "max_number", "min_target", "max_target")
    config = CountdownTask.model_validate(dict(zip(names, sizes, strict=True)))
    task = countdown(config)
    problems = [*task.train_problems(), *task.heldout_sets()["countdown"]]
    answers = solve_by_brute_force(config)
    assert sorted(problem.prompt for problem in problems) == sorted(answers)
    assert all(grade_countdown(problem, answers[str(problem.prompt)]).correct for problem in problems)


def test_training_and_heldout_problems_are_disjoint():
    ids = [problem.id for problem in ALL]
    assert len(set(ids)) == len(ids)
    assert len({(problem.extra["numbers"], problem.answer) for problem in ALL}) == len(ids)
    assert all(problem.prompt == f"{problem.extra['numbers']}={problem.answer}:" for problem in ALL)
    assert 0.08 < len(HELDOUT) / len(ids) < 0.12


@pytest.mark.slow
def test_split_does_not_depend_on_other_settings():
    heldout = {problem.id for problem in HELDOUT}
    smaller = countdown(CountdownTask(max_number=6, max_target=40, heldout_fraction=0.05))
    assert {problem.id for problem in smaller.heldout_sets()["countdown"]} < heldout
    fewer = countdown(CountdownTask(heldout_fraction=0.05)).heldout_sets()["countdown"]
    assert fewer == HELDOUT[: len(fewer)]


def test_the_splits_are_fixed():
    # Literal ids: another hash would hold out problems that the bundled models were trained on.
    first = ["countdown/1 1 4 4=16", "countdown/1 2 2 5=2", "calculator/37*69+26", "calculator/17*70+89"]
    assert [problem.id for problem in (*HELDOUT[:2], *CALCULATOR_HELDOUT[:2])] == first
    assert (len(COUNTDOWN.train_problems()), len(HELDOUT), len(CALCULATOR_HELDOUT)) == (9548, 1077, 786)
    ids = {problem.id for problem in CALCULATOR_HELDOUT}
    assert not ids & {problem.id for problem in CALCULATOR_TRAIN}


def test_settings_without_a_heldout_problem_are_rejected():
    with pytest.raises(ConfigError, match=r"max_number=2.*heldout_fraction=0\.001"):
        countdown(CountdownTask(numbers=2, max_number=2, max_target=3, heldout_fraction=0.001))


def expression_of(problem: Problem) -> str:
    assert not isinstance(problem.prompt, str)
    return problem.prompt[0].content.removesuffix("=")


def test_every_problem_has_the_value_of_its_expression_as_its_answer():
    problems = [*CALCULATOR_HELDOUT, *CALCULATOR_TRAIN]
    assert len(problems) == 89**2
    for problem in problems:
        assert int(problem.answer) == calculate(expression_of(problem)) > 0
        assert grade_gsm8k_flexible(problem, problem.answer).correct
    assert {operator for problem in problems for operator in "+-" if operator in problem.id} == {"+", "-"}


@pytest.mark.slow
def test_the_tool_has_a_schema_and_refuses_what_is_no_expression():
    (schema,) = tool_schemas(CalculatorTask().functions, of_environment=False)
    assert schema["function"]["name"] == "calculate"
    assert schema["function"]["parameters"]["properties"].keys() == {"expression"}
    assert calculate("12*(3+4)") == 84
    for text in ("12/4", "__import__('os')", "2**9", ""):
        with pytest.raises(ValueError, match="not an expression of whole numbers"):
            calculate(text)


@pytest.mark.parametrize("source", [FOLDER, None], ids=["shipped", "built"])
def test_tokens_and_template_of_the_model(source):
    tokenizer = build_calculator_tokenizer() if source is None else AutoTokenizer.from_pretrained(source)
    assert len(tokenizer) == len(ALPHABET) + 8
    text = "37*58+9".join(CALL)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    call = {"name": "calculate", "arguments": {"expression": "37*58+9"}}
    assert parse_calls(text)["tool_calls"] == [{"type": "function", "function": call}]
    encoder = PromptEncoder.of_run(tokenizer, resolve([{"task": {"name": "calculator"}}]))
    problem = next(problem for problem in CALCULATOR_TRAIN if expression_of(problem).startswith("37*58"))
    (prompt,) = encoder.encode([problem])
    assert prompt.text == f"<tools><user>{expression_of(problem)}=<assistant>"
    assert tokenizer.decode(encoder.turn_ids([{"role": "tool", "content": "21"}])) == "<tool>21<assistant>"
    message = {"role": "assistant", "content": "", "tool_calls": parse_calls(text)["tool_calls"]}
    assert tokenizer.apply_chat_template([message], tokenize=False) == f"<assistant>{text}<eos>"


def test_the_model_belongs_to_the_task():
    task = {"task": {"name": "calculator"}}
    assert resolve([task]).model.path == "embedded-calculator"
    assert resolve([task, {"model": {"path": "org/name"}}]).sampling.max_tokens == 1024
    assert resolve([task, {"model": {"dtype": "float32"}}]).sampling.max_tokens == 48
    assert resolve([{"model": {"path": "embedded-calculator"}}]).task.name == "calculator"
    for model, task in (("embedded", "calculator"), ("embedded-calculator", "countdown")):
        config = resolve([{"task": {"name": task}, "model": {"path": model}}])
        trained = {"calculator": "countdown", "countdown": "calculator"}[task]
        message = f"trained on {trained} only; add --model MODEL, .*, or take --task {trained}$"
        with pytest.raises(ConfigError, match=message):
            check_model_and_task(config, "--task")


@pytest.mark.slow
def test_the_model_calls_its_tool_for_some_problems(tmp_path):
    """Fails for a damaged or replaced file. With 64 problems × 4 the standard error is about 0.03."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1e6
    settings = [{"tracking": {"mlflow": False}}]
    result = evaluate("embedded-calculator", n=4, k=[1], limit=64, settings=settings, runs_dir=tmp_path)
    assert 0.1 < result.scores["calculator"].metrics["mean_at_4"].value < 0.3


def stream_of(size: int, seed: int, position: int = 0) -> ProblemStream:
    problems = [Problem(str(index), "", "", "test", "math") for index in range(size)]
    return ProblemStream(problems, seed, position)


SIZES, SEEDS = st.integers(1, 12), st.integers(0, 2**32)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 50))
def test_each_epoch_contains_each_problem_once(size, seed, epoch):
    problems = stream_of(size, seed, epoch * size).next(size)
    assert sorted(int(problem.id) for problem in problems) == list(range(size))


@given(size=SIZES, seed=SEEDS, start=st.integers(0, 100), counts=st.lists(st.integers(0, 15), max_size=5))
def test_consecutive_batches_equal_one_sequence(size, seed, start, counts):
    """A run that is stopped after any batch, and resumed at its position in a new process, gets the same problems."""
    pieces, stream = [], stream_of(size, seed, start)
    for count in counts:
        pieces += stream.next(count)
        stream = stream_of(size, seed, stream.position)
    assert pieces == stream_of(size, seed, start).next(sum(counts))
    assert stream.position == start + sum(counts)


def test_the_order_is_fixed_and_differs_between_epochs_and_seeds():
    first, second = stream_of(100, 0).next(200)[:100], stream_of(100, 0).next(200)[100:]
    assert first not in (second, stream_of(100, 1).next(100))
    # Literal: a run resumed with another version of Python must get the same problems.
    assert "".join(problem.id for problem in stream_of(6, 7).next(6)) == "245103"
