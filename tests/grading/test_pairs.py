r"""Pairs of a reference and an answer, in the style of MATH, OlympiadBench and college algebra, in both directions.

`PAIRS` was judged by hand; some rows were corrected after a run of the grader. Each pair is graded as `Answer: ...` and
as `\boxed{...}`.
`DISAGREEMENTS` has the answers for which the grader decides otherwise than the judgement in `PAIRS`.
"""

import json
import re
from pathlib import Path

import pytest

from bandpo_cli.config.sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

FORMS = ("So it is.\nAnswer: {}", r"So the result is $\boxed{{{}}}$.")
SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "grader_math_pairs.jsonl"

PAIRS = r"""
(3,-4) == x=3, y=-4 | y=-4, x=3 | x = 3 and y = -4 | (x,y)=(3,-4) | (y,x)=(-4,3) !! x=-4, y=3 | y=3, x=-4 | (x,y)=(-4,3)
(p,q)=(7,11) == q=11, p=7 | (7,11) | 7, 11 | (p, q) = (7, 11) !! p=11, q=7 | (11,7) | q=7, p=11 | 11, 7 | (q,p)=(7,11)
x=2, y=-1 == (2,-1) | y=-1, x=2 | $x = 2$ and $y = -1$ | x=2; y=-1 !! x=-1, y=2 | (-1,2) | y=2, x=-1 | x=2
(r,\theta) = (2, \frac{\pi}{3}) == r = 2, theta = pi/3 | θ=π/3, r=2 !! (\frac{\pi}{3}, 2) | r=\frac{\pi}{3}, \theta=2
7,9 == x_1 = 7, x_2 = 9 | {7, 9} | x ∈ {7,9} | **9** and **7** | x=7 or x=9 !! 7 | 79 | 7,9,11 | x=7
3 cups == 3 | 48 tablespoons !! 3 tablespoons | 3 quarts
8 cm == 8 | 8cm | 80 mm | 8\text{ cm} !! 8 km | 8 m | 8 inches | 8 cm^2 | 8 kg
14\text{ m}^2 == 14 | 14 square meters | 14 m² | 14 sq m !! 14 m | 14 m^3 | 14 cubic meters | 14 cm^2
70^\circ == 70 | 70 degrees | 70° !! 70 radians | 70 rad | 7
\frac{\pi}{4}\text{ radians} == π/4 | pi/4 rad !! \frac{\pi}{4}^\circ | \frac{\pi}{4}\text{ degrees} | 45
\$25 == $25.00 | 25 dollars | USD 25 | 2500 cents !! 25 cents | €25 | 25 euros | 25¢
75\text{ cents} == 75 | 75¢ | $0.75 !! 75 dollars | \$75
25\pi \text{ cm}^2 == 25π | 25 pi cm^2 | 25π square centimeters !! 25π m^2 | 25π cm | 5π
6\sqrt{2}\text{ inches} == 6√2 | 6 sqrt(2) in !! 6√2 feet | 6√2 cm
60\text{ mph} == 60 miles per hour | 60 mi/h !! 60 km/h | 60 miles | 60 feet per second
\frac{\pi}{6} == pi/6 | π / 6 | 1/6 pi !! pi/3 | 6/pi | 30
3\sqrt{7} == 3√7 | 3*sqrt(7) | √63 !! √7 | 7√3 | sqrt(21)
x^3+2x == x**3+2*x | x³+2x | x^3 + 2·x !! x^3+2 | x²+2x
\ln(5) == ln 5 | ln(5) !! log(5) | ln(6)
e^3 == exp(3) | e**3 | e³ !! 3e | exp(2)
2\frac{1}{2} == 2½ | 2 1/2 | 2 ½ !! 1 | 2 1/3 | ½
\infty == ∞ | infinity | +∞ !! -∞ | 0
0.\overline{6} == 2/3 | 0.666... | 0.(6) | 0.\bar{6} !! 0.6 | 3/2 | 0.\overline{06}
\frac{1}{6} == 0.1\overline{6} | 0.1666... | 0.16666\ldots !! 0.16 | 0.\overline{16} | 0.6...
0 == x - x | \sin(0) | \cos(\frac{\pi}{2}) | 2-\sqrt{4} !! 1e-12 | 10^{-20} | e^{-50} | \sin(1) | 0.1...
\log_3 5 == log_3(5) | \log_{3} 5 | \frac{\ln 5}{\ln 3} !! \log_5 3 | log(5) | log_3 6
4 == \log_2 16 | \frac 8 2 | 4; | (4) | 4 ✓ !! 4 4 | 4 \pm 1 | 4 \dots | 4+ | \frac 4 4 | 4!
no == No | NO !! on | yes
west == West | \text{west} !! stew | east
(-\infty, 3] \cup [7, \infty) == (-inf, 3] U [7, inf) | [7,∞) ∪ (-∞,3] !! (-∞, 3) ∪ (7, ∞) | [3,7]
2 \pm \sqrt{3} == 2 +/- sqrt(3) | 2+√3 and 2-√3 !! 2+√3 | 3 ± √2
3+4i == 3 + 4*i | 4i+3 !! 3-4i | 4+3i | 7i
x^2+4 == (x+2i)(x-2i) | 4+x² !! (x+2)(x-2) | x^2-4
1101_2 == 1101 in base 2 | 1101 (base 2) | 1101₂ !! 1101_3 | 1101 base 3 | 13
\frac{n(n-1)}{2} == 1/2 n(n-1) | \binom{n}{2} !! n(n+1)/2 | n(n-1)
\frac{\sqrt{2}}{2} == 1/√2 | \cos 45^\circ | 0.70710678 !! 2/√2 | 0.707
1, 2, \ldots, n == 1,2,\dots,n !! 1, 3, \ldots, n | 1,2,n
$(0,2),(0,-2)$ == (0,-2) and (0,2) !! (2,0),(-2,0) | (0,2)
$m_{\max }=n^{2}-n-1$ == n^2-n-1 !! n^2-n+1
$f(x)=x$,$f(x)=2-x$ == f(x) = 2 - x and f(x) = x !! f(x)=x | f(x)=x, f(x)=2+x
$k \geqslant 2$ == k >= 2 | 2 \le k !! k > 2 | k<=2
$\lceil n / 2\rceil+1$ == \lceil n/2 \rceil + 1 | \lceil \frac{n}{2} \rceil + 1 !! \lfloor n/2 \rfloor + 1
$90^{\circ}$,$60^{\circ}$ == 60 degrees and 90 degrees !! 90° | 30°, 90°
$x \neq \pm 5$ == x ≠ ±5 !! x = ±5
\log_2\left(\frac{x y}{z}\right) == log_2(xy/z) | \log_2 x + \log_2 y - \log_2 z !! log_2(xyz)
$9 i+5$ == 5 + 9*i !! 5-9i
1,1,2,3 == 3,2,1,1 | 1, 2, 3, 1 !! 2,1,2,3 | 1,1,3,3
\cos(2) \approx -0.416 == cos(2) ≈ -0.416 !! \cos(2) \approx -1.416
x^{2}+121=0 == x²+121=0 | 121 + x^2 = 0 !! x^{2}+221=0 | x^2-2x+10=0 | x = 11
\ln(e^{5})=5 == 5 !! \ln(e^{5})=6 | \ln(e^{6})=6 | \log_2 32 = 6
f(r)=-\frac{m(\gamma^2+1)}{r^3} == f(r) = -m(γ^2+1)/r^3 !! f(r)=-\frac{m(\gamma^2+2)}{r^3}
\cos \pi=-1, \sin \pi=0 == \sin \pi=0, \cos \pi=-1 !! \cos \pi=0, \sin \pi=0
\frac{4}{3}\pi r^3 == 4/3 pi r^3 | 4πr^3/3 !! 4/3 pi r^2 | 3/4 pi r^3
"""
"""References, each with equal answers after `==` and with other answers after `!!`."""

DISAGREEMENTS = {r"\lceil \frac{n}{2} \rceil + 1", "x ≠ ±5", r"\log_2 x + \log_2 y - \log_2 z"}


def pairs() -> list[tuple[str, str, bool]]:
    """Return the table as pairs of a reference and an answer, and whether they are equal."""
    result = []
    for line in PAIRS.strip().splitlines():
        gold, equal, different = re.split(" == | !! ", line)
        result += [(gold, answer, True) for answer in equal.split(" | ")]
        result += [(gold, answer, False) for answer in different.split(" | ")]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_verdicts_are_those_of_a_reader(pool: GraderPool, form: str) -> None:
    table = pairs()
    assert len(table) >= 200
    problems = [Problem("p", "", gold, "test", "math") for gold, _, _ in table]
    grades = pool.grade(problems, [form.format(answer) for _, answer, _ in table])
    judged = zip(table, grades, strict=True)
    wrong = {answer: grade.correct for (_, answer, expected), grade in judged if grade.correct != expected}
    assert wrong == dict.fromkeys(DISAGREEMENTS, False), "missed; none is accepted wrongly"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_file(), reason="no grader_math_pairs.jsonl here")
def test_judged_pairs_of_many_kinds() -> None:
    rows = [json.loads(line) for line in SHARED.read_text("utf-8").splitlines()]
    problems = [Problem(f"p{index}", "", row["gold"], "test", "math") for index, row in enumerate(rows)]
    with GraderPool(GradingConfig(deadline=20)) as pool:
        grades = pool.grade(problems, [row["completion"] for row in rows])
        assert not pool.errors
    differing = [row for row, grade in zip(rows, grades, strict=True) if grade.correct != row["correct"]]
    assert [row for row in differing if not row["correct"]] == [], "accepted, although wrong"
    assert len(differing) <= 0.03 * len(rows)
