"""Completions for the comparison of graders: real references in the phrasings of chat models, and random pieces."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from bandpo_cli.grading.answers import final_answer
from bandpo_cli.tasks.rows import as_answer

DATA = Path(__file__).parents[2].parent / "shared" / "data"
"""Public problem sets; a machine without them tests with `REFERENCES` alone."""

REFERENCES = (
    "18", "-3", "0", "1,234", "70000", "2.5", "0.125", "120,000.50", "3.", "27.0", "1/2", "50%", r"\$18", "007",
    r"\frac{1}{2}", r"\frac12", r"\dfrac{3}{4}", r"\sqrt{2}", r"2\sqrt3", "x^2+1", "x = 5", "(3, 4)", r"[0, \infty)",
    r"\text{Monday}", r"\text{(C)}", "C", r"90^\circ", r"5 \text{ cm}", "10{,}000", r"\pi", r"3, 4 \text{ and } 5",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "10^{-5}", "eighteen", "十八", "１８", "5 m^2", r"\boxed{18}", "=", "$",
)  # fmt: skip

PHRASINGS = (
    "Answer: {}", "Answer: {}.", "Answer: ${}$", "Answer: $ {} $.", "Answer: \\boxed{{{}}}",
    "Answer: {} dollars per day.", "Answer: {} dollars", "Answer: \\${}", "Answer: an amount of {} square feet",
    "Answer:\n\n{}", "answer : x = {}", "ANSWER:{}\n\nExplanation: nine eggs at $2 each.",
    "Answer: ${} because 9 * 2 = {}", "Answer: {} (nine eggs at $2 each)", "Answer: \\text{{{}}}",
    "Answer: $\\textbf{{{}}}$ \\text{{ units}}", "Answer: Answer: {}", "Answer: {}\nAnswer: {}",
    "Answer: 7\nAnswer: {}", "Answer: {}\nAnswer: 7", "**Answer:** $\\boxed{{{}}}$ eggs", "**Answer: {}**",
    "### Answer\n{}", "答案：{}", "答案: {}。Answer: {}。", "#### {}", "#### {} dollars at the farmers' market",
    "#### {}.", "#### ${}", "####{}", "9 * 2 = <<9*2={}>>{}\n#### {}", "#### {}\n#### 7", "The answer is {}.",
    "The answer is {}, I think", "So she makes \\boxed{{{}}} dollars.", "\\boxed{{{}}}\n\nThis is \\fbox{{7}}",
    "\\[ \\boxed{{{} }} \\]", "\\boxed{{\\text{{{}}}}}", "```\nprint({})\n```\nAnswer: `{}`",
    "| Answer: | {} |\n|---|---|", "<answer>{}</answer>", "Answer: {}<|im_end|>", "Answer: {}\r\nDone.",
)  # fmt: skip


def real_references() -> list[str]:
    """Return the references of the problem sets in `DATA`, as the task gives them to a grader; every third of GSM8K."""
    found = []
    for name in ("gsm8k_test", "aime24", "amc23", "minerva_math"):
        path = DATA / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[:: 3 if name == "gsm8k_test" else 1]:
            row = json.loads(line)
            answer = as_answer(row["answer"] if "answer" in row else row["solution"])
            if answer and "\n" not in answer:
                found.append(answer)
    return found


def phrased_answers(references: list[str], seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (completion, reference): every reference in every phrasing with a right, another or a changed answer.

    A third of the completions follow other text, and some are cut in the middle.
    """
    choose = random.Random(seed)
    for reference in references:
        for phrasing in PHRASINGS:
            answer = choose.choice([reference, reference, *_changed(reference, choose)])
            text = phrasing.replace("{}", "\0").format().replace("\0", answer)
            if choose.random() < 1 / 3:
                text = "word 7 " * choose.randrange(80) + text
            if choose.random() < 0.1:
                text = text[: choose.randrange(len(text) + 1)]
            if choose.random() < 0.2:
                text += choose.choice([".", "\n", " ", "\n\nI hope so!", " " * 95, " " * 290, "$", "}"])
            yield text, reference


def _changed(reference: str, choose: random.Random) -> list[str]:
    """Return forms and values near the reference."""
    number = reference.replace(",", "")
    shifted = str(int(number) + choose.choice([-1, 1])) if number.lstrip("-").isdecimal() else f"1{reference}"
    grouped = f"{int(number):,}" if number.lstrip("-").isdecimal() else reference.replace("\\frac", "\\dfrac")
    return [shifted, grouped, f"{reference}.0", final_answer(f"Answer: {reference}") or ""]


PIECES = (
    *("Answer:", "answer :", "ANSWER", "Anſwer: ", ":", "：", "#### ", "####", "Answer: ", "[INVALID"),
    *("\\boxed{", "\\text{", "\\textbf{", "\\overline{", "\\mbox{", "\\fbox{", "{", "}", "}}", "\\}", "\\\\"),
    *("$", "\\$", "$$", ".$", "\\frac", "\\dfrac12", "frac", "\\frac{1}{2}", "\\sqrt", "sqrt2", "\\frac1"),
    *("1", "12", "1,234", "1{,}234", "-", "-5", ".", ",", "0.5", "²", "٣", "１", "=", "==", "a", "n", "x"),
    *(" ", "  ", "\n", "\r", "\t", "\u2028", "\x0b", "\x85", "\xa0", "\0"),
    *("an ", "a ", "\\text{and}", ",\\text{and}"),
    *("\\text{m}", "\\text{ m}", "\\text{\n}", "^2", "^3", "\\text{}", "te", "xt{", "sq", "uare"),
)
"""What the rules of the graders react to, also in part."""

STARTS = ("", "Answer: ", "Answer: ", "#### ", "\\boxed{", "Answer: $", "7\n")
ENDS = ("", "", "}", " ", ".", "\n", " " * 90, " " * 280)


def random_cases(count: int, pieces: tuple[str, ...], seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (completion, reference) made of `pieces`; the reference is the answer, a similar or another text."""
    choose = random.Random(seed)

    def text(most: int) -> str:
        return "".join(choose.choices(pieces, k=choose.randrange(most)))

    for _ in range(count):
        answer = choose.choice([str(choose.randrange(-99, 9999)), text(4), text(12)])
        completion = text(10) + choose.choice(STARTS) + answer + choose.choice(ENDS)
        yield completion, choose.choice([answer, answer, f" {answer}\\; dollars", text(6), text(12)])
