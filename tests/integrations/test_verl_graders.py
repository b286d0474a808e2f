"""Graders of verl, compared with the installed verl on chat lines, real references and adversarial texts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bandpo_cli.grading import verl_graders as ours
from bandpo_cli.types import Grade, Problem
from tests.integrations.answer_texts import (
    ENDS,
    PIECES,
    REFERENCES,
    STARTS,
    garbled_completions,
    phrased_answers,
    random_cases,
    real_references,
)


def verl_module(name: str) -> ModuleType:
    """Import one grader of verl from its file: `import verl` needs ray and more, and the graders need nothing."""
    try:
        verl = distribution("verl")
    except PackageNotFoundError:
        pytest.skip("needs verl", allow_module_level=True)
    path = verl.locate_file(f"verl/utils/reward_score/{name}.py")
    spec = importlib.util.spec_from_file_location(f"verl_{name}", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


math_dapo, gsm8k = verl_module("math_dapo"), verl_module("gsm8k")


def minerva_score(text: str, reference: str) -> bool:
    """Return verl's verdict before 0.9.1, which is that of the paper's code: no fallback to a box."""
    correct, _ = math_dapo.is_correct_minerva(text[-300:], reference)
    return bool(correct)


def gsm8k_score(method: str) -> Callable[[str, str], bool]:
    """Return verl's verdict; its data preparation removes the commas of a reference."""
    return lambda text, reference: bool(gsm8k.compute_score(text, reference.replace(",", ""), method=method))


VERL: dict[str, Callable[[str, str], bool]] = {
    "math-dapo": minerva_score,
    "math-dapo-boxed": lambda text, reference: bool(math_dapo.compute_score(text, reference)["acc"]),
    "gsm8k": gsm8k_score("strict"),
    "gsm8k-flexible": gsm8k_score("flexible"),
}
OURS: dict[str, Callable[[Problem, str], Grade]] = {
    "math-dapo": ours.grade_math_dapo,
    "math-dapo-boxed": ours.grade_math_dapo_boxed,
    "gsm8k": ours.grade_gsm8k,
    "gsm8k-flexible": ours.grade_gsm8k_flexible,
}


def is_correct(grader: str, text: str, reference: str) -> bool:
    """Return this package's verdict; a grader error counts as not correct, as in the accuracy."""
    try:
        return OURS[grader](Problem("p", "?", reference, "s", grader), text).correct
    except ValueError:
        return False


def has_digit(text: str) -> bool:
    return any(digit in text for digit in "0123456789")


def is_comparable(grader: str, reference: str) -> bool:
    """Return whether verdicts must be equal: for verl, "#### ." is correct where the reference is "."."""
    return not grader.startswith("gsm8k") or has_digit(reference)


def compare(grader: str, cases: Iterable[tuple[str, str]]) -> tuple[int, int, list[Any]]:
    """Return the numbers of all and of correct answers, and the cases whose verdicts differ."""
    count = correct = 0
    different = []
    for text, reference in cases:
        if not is_comparable(grader, reference):
            continue
        expected = VERL[grader](text, reference)
        count += 1
        correct += expected
        if is_correct(grader, text, reference) != expected:
            different.append((text, reference, expected))
    print(f"{grader}: {count:,} texts, {correct:,} correct, {len(different)} differ")
    return count, correct, different


@pytest.mark.parametrize("grader", VERL)
def test_verdicts_on_references_in_many_phrasings(grader: str) -> None:
    """Correct answers are counted too, so that equal verdicts are not all `wrong`."""
    references = [*REFERENCES * 2, *real_references()[::4]]
    count, correct, different = compare(grader, phrased_answers(references))
    assert different == []
    assert count > 2_000
    assert correct >= 50


@pytest.mark.parametrize("grader", VERL)
def test_verdicts_on_garbled_completions(grader: str) -> None:
    """Prefixes of a completion are texts; the reference is 18, and then what verl's flexible form reads in it."""
    texts = garbled_completions()
    if not texts:
        pytest.skip("needs garbled_completions.jsonl")
    cases = [
        (text[:end], reference)
        for text in texts
        for end in range(1, min(len(text), 400), 5)
        for reference in ("18", gsm8k.extract_solution(text[:end], "flexible") or "18")
    ]
    assert compare(grader, cases)[2] == []


@pytest.mark.parametrize("grader", VERL)
def test_verdicts_on_random_pieces(grader: str) -> None:
    pieces = (*PIECES, *math_dapo.REMOVED_EXPRESSIONS)
    count, correct, different = compare(grader, random_cases(6_000, pieces))
    assert different == []
    assert count > 2_400
    assert correct > 75


TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=12).map("".join)


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    before=TEXTS,
    start=st.sampled_from(STARTS),
    answer=TEXTS,
    end=st.sampled_from(ENDS),
    other=st.none() | TEXTS,
)
def test_verdicts_and_votes_on_generated_texts(
    before: str, start: str, answer: str, end: str, other: str | None
) -> None:
    text, reference = before + start + answer + end, answer if other is None else other
    for grader, score in VERL.items():
        if is_comparable(grader, reference):
            assert is_correct(grader, text, reference) == score(text, reference)
    check_votes(text)


def test_votes_are_the_answers_that_verl_extracts() -> None:
    for text, _ in random_cases(5_000, PIECES, seed=1):
        check_votes(text)


def check_votes(text: str) -> None:
    """Compare the votes with verl's `pred`, where [INVALID] or None stands for no answer.

    verl reads punctuation as a number; it does not vote here.
    """
    vote = ours.vote_math_dapo(text)
    assert ("[INVALID]" if vote is None else vote) == math_dapo.is_correct_minerva(text[-300:], "")[1]
    vote = ours.vote_math_dapo_boxed(text)
    assert ("[INVALID]" if vote is None else vote) == math_dapo.compute_score(text, "")["pred"]
    for method, voted in (("strict", ours.vote_gsm8k(text)), ("flexible", ours.vote_gsm8k_flexible(text))):
        number = gsm8k.extract_solution(text, method)
        assert voted == (number if number and has_digit(number) else None)
