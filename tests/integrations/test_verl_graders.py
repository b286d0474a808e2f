"""Graders of verl, compared with the installed verl on chat lines, real references and adversarial texts."""

import importlib.util
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import pytest

from bandpo_cli.grading import verl_graders as ours
from bandpo_cli.types import Problem
from tests.integrations.answer_texts import PIECES, REFERENCES, phrased_answers, random_cases, real_references


def verl_module(name: str) -> ModuleType:
    """Import one grader of verl from its file: `import verl` needs ray and more, and the graders need nothing."""
    try:
        verl = distribution("verl")
    except PackageNotFoundError:
        pytest.skip("needs verl", allow_module_level=True)
    path = verl.locate_file(f"verl/utils/reward_score/{name}.py")
    spec = importlib.util.spec_from_file_location(f"verl_{name}", str(path))
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


VERL = {
    "math-dapo": minerva_score,
    "math-dapo-boxed": lambda text, reference: bool(math_dapo.compute_score(text, reference)["acc"]),
    "gsm8k": gsm8k_score("strict"),
    "gsm8k-flexible": gsm8k_score("flexible"),
}
OURS = {
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


def compare(grader: str, cases: Iterable[tuple[str, str]]) -> tuple[int, int, list[Any]]:
    """Return the numbers of all and of correct answers, and the cases whose verdicts differ."""
    count = correct = 0
    different = []
    for text, reference in cases:
        if grader.startswith("gsm8k") and not has_digit(reference):
            continue  # for verl, "#### ." is correct where the reference is "."
        expected = VERL[grader](text, reference)
        count += 1
        correct += expected
        if is_correct(grader, text, reference) != expected:
            different.append((text, reference, expected))
    print(f"{grader}: {count:,} texts, {correct:,} correct, {len(different)} differ")
    return count, correct, different


@pytest.mark.parametrize("grader", VERL)
def test_verdicts_on_references_in_many_phrasings_and_on_random_pieces(grader):
    """Correct answers are counted too, so that equal verdicts are not all `wrong`."""
    references = [*REFERENCES * 2, *real_references()[::4]]
    pieces = (*PIECES, *math_dapo.REMOVED_EXPRESSIONS)
    for cases in (phrased_answers(references), random_cases(6_000, pieces)):
        count, correct, different = compare(grader, cases)
        assert different == []
        assert count > 2_000
        assert correct >= 30


def test_votes_are_the_answers_that_verl_extracts():
    """verl's `pred` has [INVALID] or None for no answer. It reads punctuation as a number, which does not vote here."""
    for text, _ in random_cases(5_000, PIECES, seed=1):
        vote = ours.vote_math_dapo(text)
        assert ("[INVALID]" if vote is None else vote) == math_dapo.is_correct_minerva(text[-300:], "")[1]
        vote = ours.vote_math_dapo_boxed(text)
        assert ("[INVALID]" if vote is None else vote) == math_dapo.compute_score(text, "")["pred"]
        for method, function in (("strict", ours.vote_gsm8k), ("flexible", ours.vote_gsm8k_flexible)):
            number = gsm8k.extract_solution(text, method)
            assert function(text) == (number if number and has_digit(number) else None)
