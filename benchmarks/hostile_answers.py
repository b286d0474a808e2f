r"""Hostile answers: complete completions that break graders. None of them is equal to 5."""

_MATRIX = r"\\".join("&".join(f"x^{{{i * j}}}" for j in range(6)) for i in range(6))
_ENDLESS = [
    "9^{9^{9^{9^9}}}", r"\int \frac{\sin(\cos(\tan x^x))}{x^{x^x}} dx", "$2^{2^{2^{2^{2^{2}}}}}$", "100000000!",
    "10^{-10^{10^{10}}}+5.0000001", "10^{999999999}", "10^{10^{8}}-10^{10^{8}}+6", "((9!)!)!", "9!!!!!!!!!",
    r"\binom{10^{9}}{5\cdot 10^{8}}", r"\Gamma(10^{20})", r"\lfloor 10^{10^{7}} \pi \rfloor", r"\gcd(10^{10^{8}}, 6)",
    rf"\det\begin{{pmatrix}}{_MATRIX}\end{{pmatrix}}", r"\sin(\cos(\tan(\sin(\cos(\tan(\sin(\cos(10^{100}))))))))",
    r"\int_0^{\infty} e^{-x^2} \sin(x^3) \ln(1+x^7) dx", r"\sum_{n=1}^{10^{12}} \frac{1}{n^{n}+n!}",
    r"\sum_{n=1}^{\infty} \frac{\sin n}{n^{1.5}}", r"\prod_{n=1}^{1000000} (1+\frac{1}{n})",
    r"\lim_{n \to \infty} \frac{n!}{n^n} e^{n}", r"\frac{1}{1+" * 80 + "2" + "}" * 80, "(" * 450 + "6" + ")" * 450,
    "(" * 950, "{" * 450 + "6" + "}" * 450, r"\{" * 450, r"\left(" * 70 + "6" + r"\right)" * 70, "x=" * 450 + "6",
    r"\{" + ",".join(map(str, range(250))) + r"\}", r"9^{9^{9^9}} \bmod 7", "-" * 900 + "6", "5" + " and 6" * 150,
    r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}", r"\sqrt{" * 140 + "6" + "}" * 140, "5e999999999",
    r"x^{17}+3x^{13}+\sin(x)=e^{x}", r"\text{" * 140 + "" + "}" * 140, "a" * 500 + "!" * 490,
]  # fmt: skip
_QUICK = [
    "(x+y+z+w+1)^{200}", "(x+1)^{5000}-(x+1)^{5000}+6", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{9}}",
    r"\frac{x^{9}+1}{x^{8}-x-1} \ge \sqrt{x^{3}+x}", r"\zeta(10^{-10^{10}})", "(" * 100_000 + "6" + ")" * 100_000,
    "=" * 900 + "6", "9" * 2_000_000, "9" * 990, "5." + "0" * 900 + "1", "5." + "0" * 2_000_000 + "1", "1," * 490,
    "1 " * 490, r"\frac" * 190, "*" * 1_000_000, "$" * 990, r"\boxed" * 160, "5\x006", "\ud8005\udfff", "\uff16",
    "\u202e5\u202c6", "\u0665", "6" + "\u0301" * 900, "__import__('os').system('exit')", "(lambda: 5)()", "5 or 6",
    '{"results": [[1, true, "correct", true]]}', r"\frac{5}{0}", "nan", r"\infty - \infty + 5", "1,2,3,4,5,6,7,8,9",
    "not 5", r"\neq 5", "<6", r"\pm 5", r"(-\infty,\infty)", "x",
]  # fmt: skip
_BOXED = [
    r"\sqrt{2+" * 100 + "3" + "}" * 100, r"\frac{1}{" * 3000 + "2" + "}" * 3000, "7" * 3_000_000, "\\" * 100_001,
]  # fmt: skip
_UNLABELLED = [
    "", "Answer:" * 1_000_000, "Answer: 5 " * 1_000_000 + "Answer: 6", "#### " * 500_000, r"\boxed{5",
    "Answer" + " " * 1_000_000 + ": 6", r"\boxed{" * 200_000 + "5", "Answer: 5\n\\boxed{5",
    "\x00" * 100_000 + "Answer: \x006",
]  # fmt: skip
ENDLESS = [f"Answer: {answer}" for answer in _ENDLESS]  # most take longer than any deadline
QUICK = (
    [f"Answer: {answer}" for answer in _QUICK] + [rf"\boxed{{{answer}}}" for answer in _BOXED] + _UNLABELLED
)
HOSTILE = [*ENDLESS, *QUICK]
