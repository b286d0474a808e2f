r"""Lists of values, and values with names: `x=1, y=2`, `(x,y)=(1,2)`, `x_1=2, x_2=3`."""

import re

_NAME = re.compile(r"\\?[A-Za-z]+ ?(?:_ ?(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9])|[0-9])?(?:\([a-z](?:, ?[a-z])*\))?")
_TOKEN = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\\\|\\[{}]|[()\[\]{}]|[,;=]"
)
_SPACING = re.compile(r"\\(?:left|right|q?quad)(?![A-Za-z])|\\[,;:! ]|~")


def split(text: str, separators: str = ",;") -> list[str]:
    """Split a text at commas, semicolons, "and" and "or" outside parentheses, or at other `separators`."""
    parts, depth, start = [], 0, 0
    for match in _TOKEN.finditer(text):
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
    text = _SPACING.sub(" ", text).strip()
    if text.startswith("(") and text.endswith(")") and len(split(text)) == 1 and len(split(text[1:-1])) > 1:
        return split(text[1:-1])
    return split(text)


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return the names and values of a text in which every item of a list has a name, else an empty list."""
    text = _SPACING.sub(" ", text).strip()
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
