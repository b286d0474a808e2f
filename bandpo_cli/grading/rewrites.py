r"""Rewrites of answers: characters and plain text as people write them become LaTeX that math-verify reads.

A row of a table has a pattern, its replacement, and an example with its result, which a test checks. The rows apply in
their order. `CHARACTERS` applies to every answer and reference of at most `MAX_ANSWER_CHARS` characters, `EXPRESSIONS`
only to what math-verify parses. Text in `\text{}` stays as it is.
"""

import re
from collections.abc import Callable
from fractions import Fraction

MAX_ANSWER_CHARS = 1000
"""Longer final answers are malformed. This bounds the work per answer before any deadline applies."""

Replacement = str | Callable[[re.Match[str]], str]

_FRACTIONS = "½12 ⅓13 ⅔23 ¼14 ¾34 ⅕15 ⅖25 ⅗35 ⅘45 ⅙16 ⅚56 ⅛18 ⅜38 ⅝58 ⅞78"
_VULGAR = {entry[0]: entry[1:] for entry in _FRACTIONS.split()}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_BASES = {name: str(base) for base, name in enumerate(_BASE_NAMES, 2)}


def _repeating(match: re.Match[str]) -> str:
    """Return the fraction of a decimal with repeating digits."""
    whole, fixed, block = match["whole"], match["fixed"], match["block"]
    value = Fraction(whole + fixed) + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(fixed)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_DECIMAL = r"(?<![0-9.,])(?P<whole>[0-9]{1,20})\."
_DOTS = r"(?:\.\.\.|…|\\l?dots(?![A-Za-z])|\\cdots(?![A-Za-z]))"
_SPACE = "[\u00a0\u2009\u202f]"

CHARACTERS: tuple[tuple[str, Replacement, str, str], ...] = (
    ("[\u00ad\u200b-\u200f\u2060-\u2064\ufe0f\ufeff]", "", "\ufeff1\u200b8", "18"),
    ("[\u2600-\u27bf\u2b50-\u2b59\U0001f300-\U0001faff]", " ", "18 ✅", "18  "),
    ("[！-～]", lambda match: match[0].translate(_FULL_WIDTH), "１８", "18"),
    (r"\\(?:text)?color\s*\{[^{}]*\}", "", r"\color{red}{18}", "{18}"),
    (r"^\s*\{([^{}\\,]*)\}\s*$", r"\1", "{18}", "18"),
    (f"[{''.join(_VULGAR)}]", lambda match: r"\frac{{{}}}{{{}}}".format(*_VULGAR[match[0]]), "3½", r"3\frac{1}{2}"),
    ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", "x² + 10⁻⁶", "x^{2} + 10^{-6}"),
    ("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}", "x₁", "x_{1}"),
    (rf"{_DECIMAL}(?P<fixed>[0-9]{{0,20}})\\(?:overline|bar|dot)\s*\{{(?P<block>[0-9]{{1,20}})\}}", _repeating,
     r"0.1\overline{6}", r"\frac{1}{6}"),
    (rf"{_DECIMAL}(?P<fixed>[0-9]{{0,20}})\((?P<block>[0-9]{{1,20}})\)(?![0-9])", _repeating,
     "0.(3)", r"\frac{1}{3}"),
    (rf"{_DECIMAL}(?P<fixed>[0-9]{{0,20}}?)(?P<block>[0-9]{{1,3}}?)(?P=block){{2,20}}\s?{_DOTS}", _repeating,
     "0.333...", r"\frac{1}{3}"),
    (rf"(?<![0-9.,])[0-9]{{1,3}}(?:(?:{_SPACE}[0-9]{{3}})+|(?: [0-9]{{3}}){{2,}})(?![0-9])",
     lambda match: re.sub(r"\s", "", match[0]), "1 000 000", "1000000"),
    (rf"(?<=[0-9A-F])\s*\(?(?:in )?base[ -]([0-9]{{1,2}}|{'|'.join(_BASES)})\)?$",
     lambda match: f"_{{{_BASES.get(match[1], match[1])}}}", "1001 (base 2)", "1001_{2}"),
    (r"(?<!\s)\*\*(?=[\s,)])|(?<![^\s(])\*\*(?!\s)", "", "**2** and **3**", "2 and 3**"),
    (_DOTS, r"\\ldots ", "1, ..., n", r"1, \ldots , n"),
    ("o['’]clock", "hours", "18 o'clock", "18 hours"),
)  # fmt: skip
"""Characters and notations of numbers."""

_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|coth|sin|cos|tan|cot|sec|csc|ln|log|exp|lim|min|max|gcd|lcm|det|sup"
)
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|Gamma|Delta|Theta"
    "|Lambda|Sigma|Phi|Psi|Omega"
)
_SYMBOLS = {
    "π": r"\pi", "∞": r"\infty", "θ": r"\theta", "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta",
    "λ": r"\lambda", "μ": r"\mu", "σ": r"\sigma", "φ": r"\phi", "ω": r"\omega", "∪": r"\cup", "∩": r"\cap",
    "∈": r"\in", "∅": r"\emptyset", "±": r"\pm", "≤": r"\le", "≥": r"\ge", "⩽": r"\le", "⩾": r"\ge", "≠": r"\neq",
    "·": r"\cdot", "⋅": r"\cdot", "×": r"\times", "÷": r"\div", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "→": r"\to",
    "∠": r"\angle", "°": r"^\circ", "≈": r"\approx", "−": "-", "–": "-", "⁄": "/", "∕": "/",
}  # fmt: skip
_WORD = r"(?<![A-Za-z\\{0}])(?:{1})(?![A-Za-z])"
_DIGITS = r"[0-9]+(?:\.[0-9]+)?"
_ARGUMENT = r"\{[^{}]*\}|[0-9A-Za-z]|\\[a-z]+"

EXPRESSIONS: tuple[tuple[str, Replacement, str, str], ...] = (
    (r"\\([gl]e)q?(?:slant|q)(?![A-Za-z])", r"\\\1", r"x \leqslant 2", r"x \le 2"),
    (r"(?<![A-Za-z\\])E\s*_", r"\\mathrm{E}_", "E_1", r"\mathrm{E}_1"),
    (r"_\s*+(?:\{\s*+)?\\odot\s*\}?", "_{sun}", r"M_\odot", "M_{sun}"),
    (r"(?<![A-Za-z])(?:np|numpy|math|sp|sympy)\.(?=[a-z])", "", "np.arcsin(1)", "arcsin(1)"),
    (f"[{''.join(_SYMBOLS)}]", lambda match: f"{_SYMBOLS[match[0]]} ".replace("- ", "-").replace("/ ", "/"),
     "-∞ ≤ x", r"-\infty  \le  x"),
    (r"(?<=[0-9}]) *degrees?(?![A-Za-z])(?! *[CF])", r"^\\circ ", "60 degrees", r"60^\circ "),
    (r"<=|=<", r"\\le ", "x <= 2", r"x \le  2"),
    (r">=", r"\\ge ", "x >= 2", r"x \ge  2"),
    (r"(?<![0-9)])!=", r"\\neq ", "x != 1", r"x \neq  1"),
    (r"\+/-|(?:(?<=\s)|^)\+-(?=\s)", r"\\pm ", "1 +- 2", r"1 \pm  2"),
    (r"(?<=[\])]) *U *(?=[\[(])", r" \\cup ", "(0,1) U (2,3)", r"(0,1) \cup (2,3)"),
    (r"\*\*", "^", "x**2", "x^2"),
    (r"\*", r"\\cdot ", "2*x", r"2\cdot x"),
    (_WORD.format("", "asin|acos|atan"), lambda match: f"arc{match[0][1:]}", "atan(2)", "arctan(2)"),
    (_WORD.format("", "infinity|inf|oo"), r"\\infty ", "-infinity", r"-\infty "),
    (r"(?:√|(?<![A-Za-z\\])sqrt(?![A-Za-z])) ?", r"\\sqrt ", "2√3", r"2\sqrt 3"),
    (r"(?:∛|(?<![A-Za-z\\])cbrt(?![A-Za-z])) ?", r"\\sqrt[3] ", "cbrt(2)", r"\sqrt[3] (2)"),
    (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 ", "2sin(x)", r"2\sin (x)"),
    (rf"(?<![A-Za-z\\])({_GREEK})(?![A-Za-z])", r"\\\1 ", "2 pi", r"2 \pi "),
    (r"\\gamma(?![A-Za-z])", "g_{amma}", r"\gamma^2", "g_{amma}^2"),
    (r"_ *\{ *\\(max|min) *\}", r"_{\1}", r"m_{\max }", "m_{max}"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)) *(?:\\left)?\(? *([0-9.]+) *\^ *\{?\\circ *\}?(?: *(?:\\right)?\))?",
     r"\1(\\frac{\2\\pi}{180})", r"\cos 45^\circ", r"\cos(\frac{45\pi}{180})"),
    (r"(\\log|\\ln|\\lg) +(?=[_^(])", r"\1", r"\log _2 3", r"\log_2 3"),
    (r"(\\log)_ ?([0-9]+) *", r"\1_{\2} ", r"\log_2 3", r"\log_{2} 3"),
    (rf"(\\[dtc]?frac|\\[dt]?binom) *({_ARGUMENT}) *({_ARGUMENT})",
     lambda match: match[1] + "".join(f"{{{part.strip('{}')}}}" for part in match.groups()[1:]),
     r"\frac 1 2", r"\frac{1}{2}"),
    (rf"(\\sqrt(?:\[[^][]*\])?) *({_DIGITS}|[A-Za-z]|\\pi)", r"\1{\2}", r"\sqrt 3", r"\sqrt{3}"),
    (rf"\^ ?([-+]?{_DIGITS})", r"^{\1}", "2^-10", "2^{-10}"),
    (rf"(?<![0-9A-Za-z./^_{{}}])({_DIGITS}) ?/ ?({_DIGITS})(?: +|\\cdot ?)"
     r"(?=[A-Za-z\\(])(?!\\(?:cdot|times|div|text|le|ge|c[au]p))", r"\\frac{\1}{\2} ", "3/4 x", r"\frac{3}{4} x"),
)  # fmt: skip
"""Plain text of expressions; `readable` also reads the parentheses of `sqrt(...)` and `x^(...)` as a group."""

_COMPILED = {
    id(table): [(re.compile(row[0]), row[1]) for row in table] for table in (CHARACTERS, EXPRESSIONS)
}
_TEXT = re.compile(r"(\\(?:text|mbox|mathrm|operatorname|begin|end)[a-z]*\s*\{[^{}]*\})")
_ROMAN = re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}")
_GROUP = re.compile(r"(?:\^|\\sqrt(?:\[[^][]*\])?) *\(")


def tidy(answer: str) -> str:
    """Return an answer without invisible characters, and with numbers in ASCII or LaTeX; a long text is unchanged."""
    return answer if len(answer) > MAX_ANSWER_CHARS else _apply(CHARACTERS, answer)


def readable(answer: str) -> str:
    """Return the LaTeX of an expression in plain text or LaTeX."""
    parts = _TEXT.split(_ROMAN.sub(r" \1 ", answer))
    parts[::2] = [_with_groups(_apply(EXPRESSIONS, part)) for part in parts[::2]]
    return "".join(parts)


def _apply(table: tuple[tuple[str, Replacement, str, str], ...], text: str) -> str:
    for pattern, replacement in _COMPILED[id(table)]:
        text = pattern.sub(replacement, text)
    return text


def _with_groups(text: str) -> str:
    r"""Replace the parentheses of an exponent or a root by braces: `x^(1/2)`, `\sqrt (x+1)`."""
    characters = list(text)
    opened: list[int] = []
    groups = {match.end() - 1 for match in _GROUP.finditer(text)}
    for index, character in enumerate(text):
        if character == "(":
            opened.append(index)
        elif character == ")" and opened and (start := opened.pop()) in groups:
            characters[start], characters[index] = "{", "}"
    return "".join(characters)


_NAME = re.compile(r"\\?[A-Za-z]+ ?(?:_ ?(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9])|[0-9])?(?:\([a-z](?:, ?[a-z])*\))?")
_SEPARATOR = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\\\|\\[{}]|[()\[\]{}]|[,;=]"
)
_LIST_SPACING = re.compile(r"\\(?:left|right|q?quad)(?![A-Za-z])|\\[,;:! ]|~")


def split(text: str, separators: str = ",;") -> list[str]:
    """Split a text at commas, semicolons, "and" and "or" outside parentheses, or at other `separators`."""
    parts, depth, start = [], 0, 0
    for match in _SEPARATOR.finditer(text):
        token = match[0].lstrip("\\")
        if token[:1] in ("(", "[", "{"):
            depth += 1
        elif token[:1] in (")", "]", "}"):
            depth -= 1
        elif depth == 0 and (token in separators if len(token) == 1 else "," in separators and token):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [part for part in (*parts, text[start:].strip()) if part]


def list_items(text: str) -> list[str]:
    """Return the items of a list or a tuple in parentheses; a list of the text itself for anything else."""
    text = _LIST_SPACING.sub(" ", text).strip()
    if text.startswith("(") and text.endswith(")") and len(split(text)) == 1 and len(split(text[1:-1])) > 1:
        return split(text[1:-1])
    return split(text)


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return the names and values of a text in which every item of a list has a name, else an empty list."""
    text = _LIST_SPACING.sub(" ", text).strip()
    sides = split(text, "=")
    names, values = (list_items(side) for side in sides) if len(sides) == 2 else ([], [])
    if len(names) > 1 and len(names) == len(values) and all(map(_NAME.fullmatch, names)):
        return list(zip(names, values, strict=True))
    pairs = [split(part, "=") for part in split(text)]
    if len(pairs) < 2 or not all(len(pair) == 2 and _NAME.fullmatch(pair[0]) for pair in pairs):
        return []
    return [(name.replace(" ", ""), value) for name, value in pairs]


def named_values(text: str) -> dict[str, str]:
    """Return the values of a text by their names, which differ; empty if the text has no names or a single one."""
    return dict(_assignments(text))


def values_first(text: str) -> str:
    """Return the values of one name as a list, and an equation with a name on its right side with the name first.

    `x_1=2, x_2=3` is `2, 3`, and `5 = x` is `x = 5`.
    """
    pairs = _assignments(text)
    names = {re.sub(r"_.*|[0-9]", "", name) for name, _ in pairs}
    if len(names) == 1:
        return ", ".join(value for _, value in pairs)
    sides = split(text, "=")
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        return f"{sides[1]} = {sides[0]}"
    return text
