r"""Kinds of answers in public problem sets: each reference with equal answers, and with near misses.

The references have the forms of GSM8K, MATH, AMC, Minerva, OlympiadBench and college algebra, and were judged by hand.
`MISSED` and `ACCEPTED` record what the grader `math` decides otherwise than a reader would, so that a
change of it is noticed.
"""

import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

KINDS = r"""
5 == 5.0 | x = 5 | 5 \text{ apples} | 2+3 | \sqrt{25} != 6 | 5.0001 | 5 or 6 | 5 \text{ or } 6 | not 5 | \neq 5 | 5, 6
    | x | \frac{0}{0}
\frac{1}{3} == 0.333333 != 0.33
120 == 5!
10 == 10.0 != 5 5
2\sqrt{2} == \sqrt{8} | 2.828427 != 2.8
x^2+2x+1 == (x+1)^2 != x^2+2x+1.01
x+1 == \frac{x^2-1}{x-1} != x
x == x != |x|+1
1 == \sin^2(x)+\cos^2(x)
\pi == \pi != 3.14
C_{1} e^{-2t}+C_2 == C_2+\frac{C_1}{e^{2t}} != C_{1} e^{2t}+C_2
1+\sqrt{3} i == 1+i\sqrt{3}
\frac{1}{3} E_{1}+\frac{2}{3} E_{2} == \frac{E_1+2E_2}{3} != \frac{E_2+2E_1}{3}
2 L_{\odot} == L_\odot + L_\odot
6.02 \times 10^{23} == 60.2 \times 10^{22}
0.000002 == 2 \cdot 10^{-6} != \sqrt{10^{-12}}
\frac{10^{-24}}{3} == \frac{10^{-24}}{3} != \frac{10^{-24}}{7}
\sqrt{2} \cdot 10^{-20} == \sqrt{2} \cdot 10^{-20} != \sqrt{3} \cdot 10^{-20}
\frac{37}{4} m == \frac{37}{4} m != \frac{37}{4}
\frac{1}{m} t == \frac{1}{m} t != \frac{1}{m}
\text{Tuesday} == Tuesday | tuesday | **Tuesday** | \mathrm{Tuesday}. != Thursday | Tues | Tuesday and Friday
Yes == yes | \text{Yes} | Yes. != No | not yes
\text{no solution} == No solution | \text{No solution.} != solution | 0 | one solution
\text{undefined} == undefined | Undefined != 0 | \infty
\text{ACB} == ACB | \text{ACB} != ABC | \text{ABC} | BCA
B == (B) | B) | B. | b | \text{B} | \textbf{(B)} | Option B | option (B) | Choice B != A | (A) | Option A | D | AB
    | A, B | 8 | option
\text{(C)} == C | (C) | C) | \mathrm{(C)} != (D) | \text{(A)} | C D
\{1, 2, 3\} == \{3,2,1\} | {1,2,3} | 1, 2, 3 | 1, 2 and 3 | 1, 2, \text{ and } 3 != \{1,2\} | \{1,2,4\}
    | \{1,2,3,4\} | 6 | 123
\emptyset == \varnothing | \{\} | \{ \} != 0 | \{0\} | \{\emptyset\}
[0, 1) == \left[0,1\right) | [0,1) | 0 \le x < 1 | x \in [0,1) != (0,1) | [0,1] | (0,1] | [0,2) | 0 \le x \le 1
(-\infty, -1) \cup (1, \infty) == (1,\infty) \cup (-\infty,-1) | (-\infty,-1)\cup(1,+\infty)
    != (-\infty,-1]\cup[1,\infty) | (-1,1) | (-\infty,1)\cup(1,\infty) | (1,\infty)
x > 3 == x>3 | 3 < x | (3, \infty) != x \ge 3 | x<3 | 3 | x > 4 | [3,\infty)
-2 \le x < 5 == -2 \leq x < 5 | [-2,5) | x \in [-2, 5) != -2 < x < 5 | -2 \le x \le 5 | (-2,5)
12 \text{ cm} == 12 | 12 cm | 12\text{ cm} | 12 \,\mathrm{cm} | $12$ cm | 12 centimeters != 12.1 cm | 120 | 1.2 cm
    | 21 cm
25 \text{ cm}^2 == 25 cm^2 | 25 cm² | 25\text{ square centimeters} != 5 | 625 | 25^2
30^\circ == 30 | 30° | 30^{\circ} | 30 degrees != 60^\circ | \frac{\pi}{3}
7 hours == 7 | 7 hours at work | about 7 hours by car != 70 | 6 hours at work | 7 at 8
3, -2 == -2, 3 | x = 3, -2 | x=3 \text{ or } x=-2 | 3 and -2 | \{3,-2\} != 3 | -2 | 3,2 | -3,2 | 1 | -6
\pm 3 == 3, -3 | \pm3 | x=\pm 3 != 3 | -3 | 9
a = 2, b = 3 == a=2, b=3 | (a,b)=(2,3) != a=3, b=2 | 2,4 | a=2
\$18.50 == 18.50 | 18.5 | \$18.5 | $18.50 | $\$18.50$ | 18.50 dollars | USD 18.50 != ₹ 18.5 | €18.50 | 18.50 cents
    | 18.05 | 1850 | 18 | \$185 | USD 18
\$1,250 == 1250 | 1,250 | $1,250 dollars | 1250.00 | 1{,}250 != 125 | 12500 | 1.250
1234 == 1,234 | 1{,}234 | 1234.0 | x = 1,234 | $x$ = $1{,}234$ | 617 * 2 = 1,234 | x=1234 != x = 1,235
    | 617 * 2 = 1,243 | 1, 234 | 1 234 | 12,34 | 123.4 | 1,2,3,4
1,000,000 == 1000000 | 1 million | 10^6 != 100000 | 1,000 | 10^7
10^{-6} == 0.000001 | 1e-6 | 1 \times 10^{-6} != 10^{6} | 10^{-5} | 0.00001
July 4, 2020 == july 4, 2020 | \text{July 4, 2020} != July 5, 2020 | July 4, 2021 | June 4, 2020 | July 20, 2004
2020-07-04 == 2020-07-04 != 2020-04-07 | 2020-07-05 | 2009
12:30 == 12:30 != 12:03 | 1:30 | 30:12 | 12:31
3:2 == 3 : 2 | 3/2 | \frac{3}{2} | 6:4 != 2:3 | 3:5 | 5 | 2/3 | 3,2
2:3:4 == 2 : 3 : 4 | 4/2:3:4 != 4:3:2 | 2:3:5 | 1:2:3 | 1/6 | 2:3 | 2:3:4:1
15\% == 15% | 0.15 | 15 | 15 percent | 15 \text{ percent} | \frac{3}{20} != 1.5% | 0.015 | 150% | 1500
33\frac{1}{3}\% == 33\frac13\% | 33 1/3 % | \frac{1}{3} != 33\% | 33.3% | 34%
2\frac{3}{4} == 11/4 | 2.75 | 2 3/4 | \frac{11}{4} | 2\frac34 != 2 3/5 | \frac{6}{4} | 1.5 | 23/4 | 2\frac{4}{3}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} == \begin{bmatrix}1&2\\3&4\end{bmatrix}
    | \left(\begin{array}{cc}1&2\\3&4\end{array}\right) | \begin{bmatrix}1 & 2 \\ 3 & \sqrt{16}\end{bmatrix}
    != \begin{pmatrix}1&3\\2&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
    | 1,2,3,4
(3, -4) == \left(3,-4\right) | x=3, y=-4 | (x,y)=(3,-4) | (6/2, -4) != (-4,3) | (3,4) | -4,3 | \{-4,3\}
(3, \frac{\pi}{2}) == (3, \pi/2) | (3, 0.5\pi) != (3, \pi) | (\frac{\pi}{2},3)
\frac{\sqrt{3}}{2} == \sqrt{3}/2 | \frac{3}{2\sqrt{3}} | \sqrt{\frac34} != \frac{\sqrt{2}}{2} | 0.87 | \sqrt{3}
n(n+1)/2 == \frac{n^2+n}{2} | \binom{n+1}{2} != \frac{n(n-1)}{2} | n(n+1)
(3,-4) == x=3, y=-4 | y=-4, x=3 | x = 3 and y = -4 | (x,y)=(3,-4) | (y,x)=(-4,3) != x=-4, y=3 | y=3, x=-4 | (x,y)=(-4,3)
(p,q)=(7,11) == q=11, p=7 | (7,11) | 7, 11 | (p, q) = (7, 11) != p=11, q=7 | (11,7) | q=7, p=11 | 11, 7 | (q,p)=(7,11)
x=2, y=-1 == (2,-1) | y=-1, x=2 | $x = 2$ and $y = -1$ | x=2; y=-1 != x=-1, y=2 | (-1,2) | y=2, x=-1 | x=2
(r,\theta) = (2, \frac{\pi}{3}) == r = 2, theta = pi/3 | θ=π/3, r=2 != (\frac{\pi}{3}, 2) | r=\frac{\pi}{3}, \theta=2
7,9 == x_1 = 7, x_2 = 9 | {7, 9} | x ∈ {7,9} | **9** and **7** | x=7 or x=9 != 7 | 79 | 7,9,11 | x=7
3 cups == 3 | 48 tablespoons != 3 tablespoons | 3 quarts
8 cm == 8 | 8cm | 80 mm | 8\text{ cm} != 8 km | 8 m | 8 inches | 8 cm^2 | 8 kg
14\text{ m}^2 == 14 | 14 square meters | 14 m² | 14 sq m != 14 m | 14 m^3 | 14 cubic meters | 14 cm^2
70^\circ == 70 | 70 degrees | 70° != 70 radians | 70 rad | 7
\frac{\pi}{4}\text{ radians} == π/4 | pi/4 rad != \frac{\pi}{4}^\circ | \frac{\pi}{4}\text{ degrees} | 45
\$25 == $25.00 | 25 dollars | USD 25 | 2500 cents != 25 cents | €25 | 25 euros | 25¢
75\text{ cents} == 75 | 75¢ | $0.75 != 75 dollars | \$75
25\pi \text{ cm}^2 == 25π | 25 pi cm^2 | 25π square centimeters != 25π m^2 | 25π cm | 5π
6\sqrt{2}\text{ inches} == 6√2 | 6 sqrt(2) in != 6√2 feet | 6√2 cm
60\text{ mph} == 60 miles per hour | 60 mi/h != 60 km/h | 60 miles | 60 feet per second
\frac{\pi}{6} == pi/6 | π / 6 | 1/6 pi != pi/3 | 6/pi | 30
3\sqrt{7} == 3√7 | 3*sqrt(7) | √63 != √7 | 7√3 | sqrt(21)
x^3+2x == x**3+2*x | x³+2x | x^3 + 2·x != x^3+2 | x²+2x
\ln(5) == ln 5 | ln(5) != log(5) | ln(6)
e^3 == exp(3) | e**3 | e³ != 3e | exp(2)
2\frac{1}{2} == 2½ | 2 1/2 | 2 ½ != 1 | 2 1/3 | ½
\infty == ∞ | infinity | +∞ != -∞ | 0
0.\overline{6} == 2/3 | 0.666... | 0.(6) | 0.\bar{6} != 0.6 | 3/2 | 0.\overline{06}
\frac{1}{6} == 0.1\overline{6} | 0.1666... | 0.16666\ldots != 0.16 | 0.\overline{16} | 0.6...
0 == x - x | \sin(0) | \cos(\frac{\pi}{2}) | 2-\sqrt{4} != 1e-12 | 10^{-20} | e^{-50} | \sin(1) | 0.1...
\log_3 5 == log_3(5) | \log_{3}(5) | \frac{\ln 5}{\ln 3} != \log_5 3 | log(5) | log_3 6 | \ln 5
4 == \log_2 16 | \frac 8 2 | 4; | (4) | 4 ✓ != 4 4 | 4 \pm 1 | 4 \dots | 4+ | \frac 4 4 | 4!
no == No | NO != on | yes
west == West | \text{west} != stew | east
(-\infty, 3] \cup [7, \infty) == (-inf, 3] U [7, inf) | [7,∞) ∪ (-∞,3] != (-∞, 3) ∪ (7, ∞) | [3,7]
2 \pm \sqrt{3} == 2 +/- sqrt(3) | 2+√3 and 2-√3 != 2+√3 | 3 ± √2
3+4i == 3 + 4*i | 4i+3 != 3-4i | 4+3i | 7i
x^2+4 == (x+2i)(x-2i) | 4+x² != (x+2)(x-2) | x^2-4
1101_2 == 1101 in base 2 | 1101 (base 2) | 1101₂ | 1101_{2} | 1101_{\text{two}} != 1101_3 | 1101 base 3 | 13
    | 1011_2 | 1101_{8}
\frac{\sqrt{2}}{2} == 1/√2 | \cos 45^\circ | 0.70710678 != 2/√2 | 0.707
1, 2, \ldots, n == 1,2,\dots,n != 1, 3, \ldots, n | 1,2,n
$(0,2),(0,-2)$ == (0,-2) and (0,2) != (2,0),(-2,0) | (0,2)
$m_{\max }=n^{2}-n-1$ == n^2-n-1 != n^2-n+1
$f(x)=x$,$f(x)=2-x$ == f(x) = 2 - x and f(x) = x != f(x)=x | f(x)=x, f(x)=2+x
$k \geqslant 2$ == k >= 2 | 2 \le k != k > 2 | k<=2
$\lceil n / 2\rceil+1$ == \lceil n/2 \rceil + 1 != \lfloor n/2 \rfloor + 1
$90^{\circ}$,$60^{\circ}$ == 60 degrees and 90 degrees != 90° | 30°, 90°
\log_2\left(\frac{x y}{z}\right) == log_2(xy/z) != log_2(xyz)
$9 i+5$ == 5 + 9*i != 5-9i
1,1,2,3 == 3,2,1,1 | 1, 2, 3, 1 != 2,1,2,3 | 1,1,3,3
\cos(2) \approx -0.416 == cos(2) ≈ -0.416 != \cos(2) \approx -1.416
x^{2}+121=0 == x²+121=0 | 121 + x^2 = 0 != x^{2}+221=0 | x^2-2x+10=0 | x = 11
\ln(e^{5})=5 == 5 != \ln(e^{5})=6 | \ln(e^{6})=6 | \log_2 32 = 6
f(r)=-\frac{m(\gamma^2+1)}{r^3} == f(r) = -m(γ^2+1)/r^3 != f(r)=-\frac{m(\gamma^2+2)}{r^3}
\cos \pi=-1, \sin \pi=0 == \sin \pi=0, \cos \pi=-1 != \cos \pi=0, \sin \pi=0
\frac{4}{3}\pi r^3 == 4/3 pi r^3 | 4πr^3/3 != 4/3 pi r^2 | 3/4 pi r^3
y = 2x + 3 == y=2x+3 | 2x+3 | 2x - y + 3 = 0 != y = 3x+2 | y=2x-3 | x=2y+3 | 2x
"""
"""References, each with equal variants and with near misses."""

MISSED = [
    ("18.50", "18 dollars and 50 cents"), ("July 4, 2020", "4 July 2020"), ("3:2", r"3 \text{ to } 2"),
    (r"-2 \le x < 5", r"5 > x \ge -2"), (r"(-\infty, -1) \cup (1, \infty)", r"x < -1 \text{ or } x > 1"),
    (r"\text{no solution}", "no solutions"), ("B", "(B) 18"),
    (r"x \neq \pm 5", r"x \ne \pm 5"), (r"\log_2(xy)", r"\log_2 x + \log_2 y"),
    (r"\lceil n / 2\rceil+1", r"\lceil \frac{n}{2} \rceil + 1"), (r"$x \neq \pm 5$", "x ≠ ±5"),
]  # fmt: skip
"""Equal in the eyes of a reader, and wrong for the grader."""
ACCEPTED = [
    ("1001_2", "1001"), (r"\{1, 2, 3\}", "(1,2,3)"), ("(3,-4)", "3,-4"), ("12:30", "2:5"),
]  # fmt: skip
"""The grader accepts them: a missing base, other brackets, a time as a ratio."""


FORMS = ("So it is.\nAnswer: {}", r"So the result is $\boxed{{{}}}$.")
TABLE = KINDS.strip().replace("\n    ", " ").splitlines()


def verdicts(pool: GraderPool, pairs: Iterable[tuple[str, str]], form: str = FORMS[0]) -> list[str]:
    """Return the verdict of the grader `math` for each pair of a reference and an answer."""
    golds, answers = zip(*pairs, strict=True)
    problems = [Problem("p", "", gold, "test", "math") for gold in golds]
    return [grade.verdict for grade in pool.grade(problems, [*map(form.format, answers)])]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("form", "lines"), [(FORMS[0], TABLE[:12]), *product(FORMS, [TABLE])], ids=str)
def test_equal_variants_are_correct_and_near_misses_are_wrong(pool, form, lines):
    expected = {}
    for line in lines:
        gold, equal, *different = re.split(" == | != ", line)
        expected |= {(gold, answer): "correct" for answer in (gold, *equal.split(" | "))}
        expected |= {(gold, answer): "wrong" for text in different for answer in text.split(" | ")}
    assert dict(zip(expected, verdicts(pool, expected, form), strict=True)) == expected


@pytest.mark.parametrize("grader", ["math", "number"])
def test_no_answer_in_the_required_form_is_malformed(pool, grader):
    texts = ["", "5", "the answer is 5", "\\boxed{5", "Answer:", f"Answer: {'5+' * 600}5"]
    grades = pool.grade([Problem("p", "", "5", "test", grader)] * len(texts), texts)
    assert {(grade.verdict, grade.reward, grade.correct) for grade in grades} == {("malformed", 0.0, False)}


NUMBERS = [
    ("18", "18 eggs", "correct"), ("18", "3 \\times 6 = 18", "correct"), ("18", "19", "wrong"),
    ("0.333333", "1/3", "wrong"), ("18", "eighteen", "malformed"), ("18", "9+9", "malformed"),
    ("x+1", "18", "grader-error"),
]  # fmt: skip


def test_number_grader():
    problems = [Problem("p", "", gold, "test", "number") for gold, _, _ in NUMBERS]
    with GraderPool(GradingConfig()) as pool:
        grades = pool.grade(problems, [f"Answer: {answer}" for _, answer, _ in NUMBERS])
        assert "problem p: its answer 'x+1' is not a plain number" in pool.uses["number"].error
    assert [grade.verdict for grade in grades] == [verdict for _, _, verdict in NUMBERS]


def test_limits_are_as_documented(pool):
    assert {*verdicts(pool, MISSED)} == {"wrong"}
    assert {*verdicts(pool, ACCEPTED)} == {"correct"}


REMARKS = [
    "$18 because 9 * 2 = 18", "18, since she sells 9 eggs at $2 each", "18 dollars. Because 9 * 2 = 18",
    "**18** because of 9 or 10 reasons", "9 * 2 = 18 because there are nine eggs", "18 (nine eggs at $2 each)",
    "$18$ dollars (9 eggs for $2 each).",
]  # fmt: skip
REMARKS_OF_17 = ["17 because 9 * 2 = 18", "17, since 9 * 2 = 18", "17 (nine eggs at $2 each = $18)"]
NOT_REMARKS = r"""
18 (mod 20) | 18 (or maybe 20) | 18 (sin theta minus one) | 18 (not the right answer) | 18 (base twenty) 5 | 18 (2)
18 (x+1) | 18 (\text{half of this}) | nine eggs because 18 | because 18 | 18becausex | 18 at 20 | 5 of 18
"""


@pytest.mark.parametrize("grader", ["math", "number"])
def test_only_a_remark_after_a_number_is_not_part_of_the_answer(pool, grader):
    others = [*REMARKS_OF_17, *re.split(r" \| |\n", NOT_REMARKS.strip())]
    texts = [f"Answer: {text}" for text in (*REMARKS, *others)]
    grades = pool.grade([Problem("p", "", "18", "test", grader)] * len(texts), texts)
    assert [grade.correct for grade in grades] == [True] * len(REMARKS) + [False] * len(others)
    for gold in ("18 because 9 * 2 = 18", "18 (nine eggs at $2 each)", "$18$ dollars"):
        same = [Problem("p", "", gold, "test", grader)] * 2
        assert all(grade.correct for grade in pool.grade(same, [f"Answer: {gold}", "Answer: 18"])), gold


SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "grader_math_pairs.jsonl"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_file(), reason="no grader_math_pairs.jsonl here")
def test_judged_pairs_of_many_kinds():
    rows = [json.loads(line) for line in SHARED.read_text("utf-8").splitlines()]
    problems = [Problem(f"p{index}", "", row["gold"], "test", "math") for index, row in enumerate(rows)]
    with GraderPool(GradingConfig(deadline=20)) as pool:
        grades = pool.grade(problems, [row["completion"] for row in rows])
        assert not any(use.error for use in pool.uses.values())
    differing = [row for row, grade in zip(rows, grades, strict=True) if grade.correct != row["correct"]]
    assert [row for row in differing if not row["correct"]] == [], "accepted, although wrong"
    assert len(differing) <= 0.03 * len(rows)
