"""Grader `reasoning-gym`: extraction of answers, scores of the library, and texts that its scorers would execute."""

import ast
import json
import multiprocessing
import random
import string
import sys
from ast import literal_eval
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sympy

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.answers import MAX_TAGGED_CHARS, tagged_answer, voted_answer
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import CORRECT, MALFORMED, Grade, Problem

reasoning_gym = pytest.importorskip("reasoning_gym")

FIVE = ("leg_counting", "basic_arithmetic", "spell_backward", "prime_factorization", "graph_color")


def problem(name: str, entry: dict[str, Any], options: str = "{}") -> Problem:
    extra = {"generator": name, "options": options, "entry": repr(entry)}
    return Problem(f"{name}/0", entry["question"], entry["answer"] or "", name, "reasoning-gym", extra)


def entry_of(name: str, **options: Any) -> dict[str, Any]:
    return dict(reasoning_gym.create_dataset(name, seed=7, size=1, **options)[0])


def tagged(answer: object) -> str:
    return f"<think>Hm, <b>well</b>.</think>\n<answer> {answer}\n</answer> Done."


@pytest.mark.slow
def test_the_grade_is_the_library_s_score(pool):
    for name in FIVE:
        entry, data = entry_of(name), reasoning_gym.create_dataset(name)
        right = entry["answer"] or json.dumps(entry["metadata"]["possible_answer"])
        texts = [right, f"{right}1", "1", "x", "{}"]
        *grades, untagged = pool.grade([problem(name, entry)] * 6, [*map(tagged, texts), right])
        assert (grades[0], untagged) == (CORRECT, MALFORMED)
        for text, grade in zip(texts, grades, strict=True):
            expected = MALFORMED
            with suppress(ValueError):  # prime_factorization, for a text that is not a number
                score = data.score_answer(text, literal_eval(repr(entry)))
                expected = Grade(score, correct=score == 1, verdict="correct" if score == 1 else "wrong")
            assert grade == expected, (name, text)


@pytest.mark.slow
def test_a_score_above_1_by_rounding_is_correct(pool):
    """For this word the library's score of its own doubled answer is 1.0000000000000002."""
    data = reasoning_gym.create_dataset("spell_backward", seed=0, size=50)
    scores = [data.score_answer(2 * entry["answer"], entry) for entry in data]
    entry = data[max(range(50), key=scores.__getitem__)]
    assert 1 < max(scores) < 1 + 1e-9
    assert pool.grade([problem("spell_backward", entry)], [tagged(2 * entry["answer"])]) == [CORRECT]


def test_options_reach_the_scorer(pool):
    """puzzle24 accepts numbers up to its option max_value."""
    entry = entry_of("puzzle24")
    problems = [problem("puzzle24", entry, options) for options in ('{"max_value": 9}', "{}")]
    low, high = pool.grade(problems, [tagged("10 + 10 + 6 - 2")] * 2)
    assert (low.reward, high.reward) == (0.01, 1)


@pytest.mark.slow
def test_tuples_of_a_problem_are_kept(pool):
    """arc_agi compares tuples: after a conversion to JSON its own reference would score 0.05."""
    entry = entry_of("arc_agi")
    data = reasoning_gym.create_dataset("arc_agi")
    assert data.score_answer(entry["answer"], json.loads(json.dumps(entry))) < 1
    assert pool.grade([problem("arc_agi", entry)], [tagged(entry["answer"])]) == [CORRECT]


def test_a_problem_that_the_scorer_cannot_read_is_a_grader_error(pool):
    """Errors of the scorer count as malformed answers only if it accepts the reference."""
    entry, name = entry_of("prime_factorization"), "prime_factorization"
    problems = [problem(name, entry | {"answer": "2 x"}), problem("no_such", entry), problem("gcd", entry)]
    grades = pool.grade(problems, [tagged("two"), tagged("3"), "no tags"])
    assert [grade.verdict for grade in grades] == ["grader-error", "grader-error", "malformed"]
    assert pool.uses["reasoning-gym"].error
    bare = Problem("p", "q", "1", "s", "reasoning-gym")
    with GraderPool(GradingConfig()) as other:
        assert other.grade([bare], [tagged(1)])[0].verdict == "grader-error"
        assert "generator" in other.uses["reasoning-gym"].error


def test_extraction_agrees_with_the_library_on_random_texts():
    from reasoning_gym.utils import extract_answer

    rng = random.Random(0)
    pieces = ["<answer>", "</answer>", " ", "\n", "\t", "\u00a0", "<", ">", *string.ascii_letters[:4]]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(3000)]
    texts += ["<ANSWER>1</ANSWER>", "answer: 4", "<answer>1</answer> or <answer>2</answer>"]
    answers = {text: tagged_answer(text) for text in texts}
    assert answers == {text: extract_answer(text) for text in texts}
    assert answers[texts[-1]] == "2"
    assert len(set(answers.values())) > 50


def test_extraction_takes_linear_time_and_long_answers_are_malformed_without_a_worker():
    """The regular expression of the library takes minutes for a million opening tags; a test times out there."""
    assert tagged_answer("<answer>" * 1_000_000) is None
    with GraderPool(GradingConfig()) as pool:
        too_long = tagged("1" * (MAX_TAGGED_CHARS + 1))
        assert pool.grade([problem("gcd", entry_of("gcd"))], [too_long]) == [MALFORMED]
        assert not pool._worker_pools


def test_votes_are_the_answers_with_single_spaces():
    assert voted_answer("<answer>1  0\n1 1</answer>", "reasoning-gym") == "1 0 1 1"
    for text in ("Answer: 4", "<answer> </answer>", f"<answer>{'1' * 30_000}</answer>"):
        assert voted_answer(text, "reasoning-gym") is None


PAYLOADS = [
    "open({path!r}, 'w')", "[open({path!r}, 'w')]", "[[open({path!r}, 'w').name]]",
    "__import__('pathlib').Path({path!r}).touch()", "(lambda: open({path!r}, 'w'))()",
    "x + eval(\"open({path!r}, 'w')\")", "S(\"open({path!r}, 'w')\")",
    "x.__class__.__init__.__globals__['__builtins__']['open']({path!r}, 'w')", "f\"{{open({path!r}, 'w')}}\"",
    "sin(open({path!r}, 'w'))",
]  # fmt: skip
EVALUATING = ("n_queens", "spiral_matrix", "string_insertion", "binary_matrix", "countdown", "puzzle24",
              "simple_integration", "intermediate_integration", "polynomial_multiplication")  # fmt: skip
"""The generators of this version whose scorers evaluate the answer."""


def test_the_library_alone_executes_answers(tmp_path, monkeypatch):
    """The tests below can fail: the same text creates the file when the library scores it."""
    path = tmp_path / "executed"
    data = reasoning_gym.create_dataset("n_queens")
    # another test of this process may have imported the grader, which replaces it
    monkeypatch.delattr(sys.modules[type(data).__module__], "eval", raising=False)
    data.score_answer(PAYLOADS[0].format(path=str(path)), entry_of("n_queens"))
    assert path.exists()


@pytest.mark.slow
def test_no_answer_is_executed(pool, tmp_path):
    path = tmp_path / "executed"
    problems = [problem(name, entry_of(name)) for name in EVALUATING for _ in PAYLOADS]
    texts = [tagged(payload.format(path=str(path))) for _ in EVALUATING for payload in PAYLOADS]
    grades = pool.grade(problems, texts)
    assert not path.exists()
    assert not any(grade.correct for grade in grades)
    assert {grade.verdict for grade in grades} <= {"wrong", "malformed"}


def test_no_field_of_a_problem_is_executed(pool, tmp_path):
    """A table of completions may come from anyone, with its problems; some scorers evaluate fields of the problem."""
    path = tmp_path / "executed"
    payload = PAYLOADS[0].format(path=str(path))
    names = ("number_sorting", "polynomial_multiplication")
    problems = [problem(name, entry_of(name) | {"answer": payload}) for name in names]
    for name, key in (("bitwise_arithmetic", "problem"), ("simple_integration", "integrand")):
        entry = entry_of(name)
        entry["metadata"][key] = payload
        problems.append(problem(name, entry))
    # A field that is not a literal is refused before the library sees it.
    extra = dict(problems[0].extra) | {"entry": payload}
    problems.append(Problem("p", "q", "1", "s", "reasoning-gym", extra))
    grades = pool.grade(problems, [*map(tagged, ("[1, 2]", "x", "1", "x", "1"))])
    assert not path.exists()
    assert not any(grade.correct for grade in grades)


def check_replaced_calls() -> None:
    """Import the grader, and require that all modules of the library call its versions of `eval` and `parse_expr`."""
    from sympy.parsing import sympy_parser

    from bandpo_cli.grading import gym_scores as graders

    calling = set()
    for name, module in [*sys.modules.items()]:
        if not name.startswith("reasoning_gym.") or not getattr(module, "__file__", None):
            continue
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if called == "eval":
                assert vars(module)["eval"] is graders.evaluate_literal
                calling.add(name)
            elif called == "parse_expr" and "propositional_logic" not in name:
                assert (vars(module).get("parse_expr") or sympy.parse_expr).__wrapped__, name
                calling.add(name)
            # codeio runs its own programs to make problems
            assert called not in ("exec", "sympify") or name.endswith("code.codeio"), f"{name} calls {called}"
    assert len(calling) >= 10
    assert sympy_parser.parse_expr.__wrapped__
    with pytest.raises((sympy.SympifyError, ValueError), match="not allowed"):
        sympy.sympify("open('x')")
    texts = ["[1, -2]", "[['_', 'Q']]", "(1, 2)", "(0x3 << 2) + ~1 * 5", " 7 ", "7 & 3 | 8 ^ 2 >> 1"]
    assert [*map(graders.evaluate_literal, texts)] == [[1, -2], [["_", "Q"]], (1, 2), 2, 7, 11]
    for text in ("2 ** 3", "f'{1}'", "len('x')", "[1][0]", "x", "not 1", "1 if 1 else 2"):
        with pytest.raises(ValueError, match="not allowed"):
            graders.evaluate_literal(text)


@pytest.mark.slow
def test_every_call_that_evaluates_text_is_replaced():
    """In a forked process, because the replacement cannot be undone."""
    process = multiprocessing.get_context("fork").Process(target=check_replaced_calls)
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback on stderr"


@pytest.mark.slow
def test_correct_answers_of_all_evaluating_scorers_pass_the_checks(pool):
    """The allowed functions and operators are those that the library's answers need."""
    for name in (*EVALUATING, "bitwise_arithmetic", "number_sorting"):
        entry = entry_of(name)
        assert pool.grade([problem(name, entry)], [tagged(entry["answer"])]) == [CORRECT], name
