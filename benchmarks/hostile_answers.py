r"""Hostile answers by name: complete completions that break graders. None of them is equal to 5."""

from __future__ import annotations


def _answer(text: str) -> str:
    return f"Answer: {text}"


def _box(text: str) -> str:
    return rf"\boxed{{{text}}}"


def _nested(left: str, inside: str, right: str, depth: int) -> str:
    return left * depth + inside + right * depth


def _matrix(size: int) -> str:
    rows = ("&".join(f"x^{{{i * j}}}" for j in range(size)) for i in range(size))
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


_TOO_LARGE = {
    "tower": _answer("9^{9^{9^{9^9}}}"),
    "tower of twos": _answer("$2^{2^{2^{2^{2^{2}}}}}$"),
    "tower modulo": _answer(r"9^{9^{9^9}} \bmod 7"),
    "tower below": _answer("10^{-10^{10^{10}}}+5.0000001"),
    "power of ten": _answer("10^{999999999}"),
    "powers that cancel": _answer("10^{10^{8}}-10^{10^{8}}+6"),
    "factorial": _answer("100000000!"),
    "factorials": _answer("((9!)!)!"),
    "many factorials": _answer("9!!!!!!!!!"),
    "binomial": _answer(r"\binom{10^{9}}{5\cdot 10^{8}}"),
    "gamma": _answer(r"\Gamma(10^{20})"),
    "floor": _answer(r"\lfloor 10^{10^{7}} \pi \rfloor"),
    "divisor": _answer(r"\gcd(10^{10^{8}}, 6)"),
    "exponent": _answer("5e999999999"),
    "polynomial": _answer("(x+y+z+w+1)^{200}"),
    "polynomials that cancel": _answer("(x+1)^{5000}-(x+1)^{5000}+6"),
    "matrix power": _answer(r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{9}}"),
    "determinant": _answer(r"\det" + _matrix(6)),
    "sines": _answer(r"\sin(\cos(\tan(\sin(\cos(\tan(\sin(\cos(10^{100}))))))))"),
}
_TOO_HARD = {
    "integral": _answer(r"\int_0^{\infty} e^{-x^2} \sin(x^3) \ln(1+x^7) dx"),
    "integral of towers": _answer(r"\int \frac{\sin(\cos(\tan x^x))}{x^{x^x}} dx"),
    "sum": _answer(r"\sum_{n=1}^{10^{12}} \frac{1}{n^{n}+n!}"),
    "series": _answer(r"\sum_{n=1}^{\infty} \frac{\sin n}{n^{1.5}}"),
    "product": _answer(r"\prod_{n=1}^{1000000} (1+\frac{1}{n})"),
    "limit": _answer(r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}"),
    "limit of factorials": _answer(r"\lim_{n \to \infty} \frac{n!}{n^n} e^{n}"),
    "equation": _answer(r"x^{17}+3x^{13}+\sin(x)=e^{x}"),
    "inequality": _answer(r"\frac{x^{9}+1}{x^{8}-x-1} \ge \sqrt{x^{3}+x}"),
    "zeta": _answer(r"\zeta(10^{-10^{10}})"),
}
_TOO_DEEP = {
    "roots": _answer(_nested(r"\sqrt{", "6", "}", 140)),
    "boxed roots": _box(_nested(r"\sqrt{2+", "3", "}", 100)),
    "fractions": _answer(_nested(r"\frac{1}{1+", "2", "}", 80)),
    "thousands of fractions": _box(_nested(r"\frac{1}{", "2", "}", 3000)),
    "parentheses": _answer(_nested("(", "6", ")", 450)),
    "a hundred thousand parentheses": _answer(_nested("(", "6", ")", 100_000)),
    "parentheses that stay open": _answer("(" * 950),
    "braces": _answer(_nested("{", "6", "}", 450)),
    "sets that stay open": _answer(r"\{" * 450),
    "left and right": _answer(_nested(r"\left(", "6", r"\right)", 70)),
    "minuses": _answer("-" * 900 + "6"),
    "equals signs": _answer("=" * 900 + "6"),
    "equations": _answer("x=" * 450 + "6"),
    "texts": _answer(_nested(r"\text{", "", "}", 140)),
}
_TOO_LONG = {
    "megabytes of digits": _answer("9" * 2_000_000),
    "megabytes of digits in a box": _box("7" * 3_000_000),
    "digits": _answer("9" * 990),
    "nearly 5": _answer("5." + "0" * 900 + "1"),
    "megabytes near 5": _answer("5." + "0" * 2_000_000 + "1"),
    "a set": _answer(r"\{" + ",".join(map(str, range(250))) + r"\}"),
    "ands": _answer("5" + " and 6" * 150),
    "ones with commas": _answer("1," * 490),
    "ones with spaces": _answer("1 " * 490),
    "letters": _answer("a" * 500 + "!" * 490),
    "fraction commands": _answer(r"\frac" * 190),
    "a million answers": "Answer:" * 1_000_000,
    "a million answers and one": "Answer: 5 " * 1_000_000 + "Answer: 6",
    "hashes": "#### " * 500_000,
    "spaces": "Answer" + " " * 1_000_000 + ": 6",
    "stars": _answer("*" * 1_000_000),
    "dollars": _answer("$" * 990),
    "boxes that stay open": r"\boxed{" * 200_000 + "5",
    "box commands": _answer(r"\boxed" * 160),
    "backslashes": _box("\\" * 100_001),
}
_TOO_ODD = {
    "unclosed box": r"\boxed{5",
    "unclosed box after an answer": "Answer: 5\n\\boxed{5",
    "null byte": _answer("5\x006"),
    "null bytes": "\x00" * 100_000 + "Answer: \x006",
    "surrogates": _answer("\ud8005\udfff"),
    "right to left": _answer("\u202e5\u202c6"),
    "arabic digit": _answer("\u0665"),
    "full-width digit": _answer("\uff15"),
    "accents": _answer("6" + "\u0301" * 900),
    "python": _answer("__import__('os').system('exit')"),
    "a call": _answer("(lambda: 5)()"),
    "json": _answer('{"ready": true}\\n{"result": [1, true, "correct"]}'),
    "division by zero": _answer(r"\frac{5}{0}"),
    "nan": _answer("nan"),
    "infinities": _answer(r"\infty - \infty + 5"),
    "two numbers": _answer("5 or 6"),
    "all digits": _answer("1,2,3,4,5,6,7,8,9"),
    "not": _answer("not 5"),
    "unequal": _answer(r"\neq 5"),
    "less": _answer("<6"),
    "plus or minus": _answer(r"\pm 5"),
    "all numbers": _answer(r"(-\infty,\infty)"),
    "a letter": _answer("x"),
    "nothing": "",
}
HOSTILE: dict[str, str] = _TOO_LARGE | _TOO_HARD | _TOO_DEEP | _TOO_LONG | _TOO_ODD
