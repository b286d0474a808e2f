r"""Attacks on regular expressions: texts on which a pattern backtracks, and the number of steps that it takes on them.

A text is a prefix, a repeated piece and a suffix, derived from the parse tree of the pattern: the pieces are what its
quantifiers repeat, single characters, pairs of characters and the beginnings of its matches. The steps are counted by
a matcher that walks the parse tree in the order of Python's engine, so that no clock is needed: with k, 2k and 3k
pieces the counts of a linear pattern lie on a line.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import re._compiler  # type: ignore[import-not-found]
import re._parser  # type: ignore[import-not-found]
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from re._constants import (  # type: ignore[import-not-found]
    ANY,
    ASSERT,
    ASSERT_NOT,
    AT,
    ATOMIC_GROUP,
    BRANCH,
    IN,
    LITERAL,
    MAX_REPEAT,
    MIN_REPEAT,
    NOT_LITERAL,
    POSSESSIVE_REPEAT,
    RANGE,
    SUBPATTERN,
)
from typing import Any

PIECES = 10
"""Number of pieces in the shortest of the three texts of an attack."""
MAX_STEPS = 60_000
"""Steps on a text of at most a few hundred characters that no pattern of linear time takes."""
MAX_ATTACKS = 150
"""Attacks per pattern and method, unless a test asks for more."""
UNUSUAL = "\u2603"
"""A character that no pattern names."""
_REPEATS = (MAX_REPEAT, MIN_REPEAT, POSSESSIVE_REPEAT)
_CHARACTERS = (LITERAL, NOT_LITERAL, IN, ANY)
_COMMON = "a0 _\n\t.A\u00e9\x00" + UNUSUAL

Continuation = Callable[[int], int | None]
Node = tuple[Any, Any]


class TooManySteps(Exception):
    """The matcher took more than `MAX_STEPS` steps."""


@dataclass(frozen=True)
class Attack:
    """The text `prefix + piece * n + suffix` for a number n."""

    prefix: str
    piece: str
    suffix: str

    def text(self, pieces: int) -> str:
        """Return the text with this number of pieces."""
        return self.prefix + self.piece * pieces + self.suffix


class CountingMatcher:
    """A backtracking matcher for one pattern that counts its steps. Groups are not captured."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._tree = re._parser.parse(pattern, flags)
        self._flags = self._tree.state.flags
        self._compiled: dict[tuple[int, int], re.Pattern[str]] = {}
        self._characters: dict[tuple[int, int, str], bool] = {}
        self._text = ""
        self.steps = 0

    def spans(self, method: str, text: str) -> list[tuple[int, int]]:
        """Return the spans that `method` finds in `text`: `match`, `fullmatch`, `search` or `finditer`.

        Raises:
            TooManySteps: The count is above `MAX_STEPS`.
            NotImplementedError: The pattern has a back-reference.
        """
        self._text, self.steps = text, 0
        with _deep_recursion():
            return list(itertools.islice(self._spans(method), None if method == "finditer" else 1))

    def _spans(self, method: str) -> Iterator[tuple[int, int]]:
        begin, after_empty = 0, False
        while begin <= len(self._text):
            starts = [0] if method in ("match", "fullmatch") else range(begin, len(self._text) + 1)
            found = None
            for start in starts:
                refused = start if after_empty and start == begin else -1
                found = self._match(list(self._tree), start, self._flags, self._last(method, refused))
                if found is not None:
                    break
            if found is None:
                return
            yield start, found
            begin, after_empty = found, found == start

    def _last(self, method: str, refused_end: int) -> Continuation:
        def accept(end: int) -> int | None:
            complete = method != "fullmatch" or end == len(self._text)
            return end if complete and end != refused_end else None

        return accept

    def _match(self, nodes: Sequence[Node], at: int, flags: int, then: Continuation) -> int | None:
        """Return the end of the first match of `nodes` at `at` that `then` accepts."""
        index = 0
        while index < len(nodes) and nodes[index][0] in _CHARACTERS:
            self._count()
            if not self._is_character(nodes[index], flags, at):
                return None
            index, at = index + 1, at + 1
        self._count()
        if index == len(nodes):
            return then(at)
        node, rest = nodes[index], nodes[index + 1 :]
        operation, argument = node

        def go_on(end: int) -> int | None:
            return self._match(rest, end, flags, then)

        def alone(inner: Sequence[Node], start: int) -> int | None:
            return self._match(inner, start, flags, lambda end: end)

        if operation is AT:
            return go_on(at) if self.leaf(node, flags).match(self._text, at) else None
        if operation is BRANCH:
            return _first(self._match([*branch, *rest], at, flags, then) for branch in argument[1])
        if operation is SUBPATTERN:
            _, added, removed, inner = argument
            return self._match(list(inner), at, (flags | added) & ~removed, go_on)
        if operation in (MAX_REPEAT, MIN_REPEAT):
            return self._repeat(operation, argument, at, flags, go_on)
        if operation is POSSESSIVE_REPEAT:
            end = self._repeat(MAX_REPEAT, argument, at, flags, lambda end: end)
            return None if end is None else go_on(end)
        if operation is ATOMIC_GROUP:
            end = alone(list(argument), at)
            return None if end is None else go_on(end)
        if operation in (ASSERT, ASSERT_NOT):
            direction, inner = argument
            start = at if direction > 0 else at - inner.getwidth()[0]
            holds = start >= 0 and alone(list(inner), start) is not None
            return go_on(at) if holds is (operation is ASSERT) else None
        raise NotImplementedError(f"{operation} is not supported")

    def _repeat(
        self, operation: Any, argument: tuple[int, int, Any], at: int, flags: int, then: Continuation
    ) -> int | None:
        least, most, tree = argument
        body = list(tree)
        if operation is MAX_REPEAT and len(body) == 1 and body[0][0] in _CHARACTERS:
            end = at
            while end - at < most and self._is_character(body[0], flags, end):
                end += 1
                self._count()
            return _first(then(each) for each in range(end, at + least - 1, -1))

        def again(count: int, start: int, before: int) -> int | None:
            def repeat() -> int | None:
                if count >= most or (count >= least and start == before):
                    return None
                return self._match(body, start, flags, lambda end: again(count + 1, end, start))

            def leave() -> int | None:
                return then(start) if count >= least else None

            order = (repeat, leave) if operation is MAX_REPEAT else (leave, repeat)
            return _first(each() for each in order)

        return again(0, at, -1)

    def _count(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooManySteps

    def _is_character(self, node: Node, flags: int, at: int) -> bool:
        if at >= len(self._text):
            return False
        key = (id(node), flags, self._text[at])
        if key not in self._characters:
            self._characters[key] = bool(self.leaf(node, flags).match(key[2]))
        return self._characters[key]

    def leaf(self, node: Node, flags: int) -> re.Pattern[str]:
        """Return a node without parts as a pattern of Python's engine, which decides about single characters."""
        key = (id(node), flags)
        if key not in self._compiled:
            tree = re._parser.SubPattern(self._tree.state, [node])
            self._compiled[key] = re._compiler.compile(tree, flags)
        return self._compiled[key]

    @cached_property
    def leaves(self) -> list[tuple[Node, re.Pattern[str]]]:
        """All nodes that match single characters."""
        return list(self._leaves(list(self._tree), self._flags))

    def _leaves(self, nodes: Iterable[Node], flags: int) -> Iterator[tuple[Node, re.Pattern[str]]]:
        for node in nodes:
            if node[0] in _CHARACTERS:
                yield node, self.leaf(node, flags)
            for inner, inner_flags in _parts(node, flags):
                yield from self._leaves(inner, inner_flags)

    @cached_property
    def alphabet(self) -> str:
        """One character of each class of characters that no node of the pattern distinguishes."""
        characters = [*_COMMON]
        for (operation, argument), _ in self.leaves:
            items = argument if operation is IN else [(operation, argument)]
            for kind, value in items:
                if kind in (LITERAL, NOT_LITERAL):
                    characters += [chr(value), chr(value).swapcase()[0]]
                elif kind is RANGE:
                    characters += map(chr, value)
        classes: dict[tuple[bool, ...], str] = {}
        for character in characters:
            classes.setdefault(tuple(bool(leaf.match(character)) for _, leaf in self.leaves), character)
        return "".join(classes.values())

    def words(self) -> list[str]:
        """Return texts that the pattern matches apart from assertions; they differ in characters and branches."""
        return self._words(list(self._tree), self._flags)

    def _words(self, nodes: Sequence[Node], flags: int) -> list[str]:
        return list(dict.fromkeys(self._word(nodes, flags, variant) for variant in range(8)))

    def _word(self, nodes: Sequence[Node], flags: int, variant: int) -> str:
        word = ""
        for node in nodes:
            operation, argument = node
            if operation in _CHARACTERS:
                fitting = [char for char in self.alphabet if self.leaf(node, flags).match(char)]
                word += fitting[variant % len(fitting)] if fitting else ""
            elif operation is BRANCH:
                branches = argument[1]
                word += self._word(list(branches[variant % len(branches)]), flags, variant // len(branches))
            elif operation in _REPEATS:
                least, most, inner = argument
                times = min(most, max(least, (variant + 1) % 2))
                word += self._word(list(inner), flags, variant) * times
            elif operation not in (ASSERT, ASSERT_NOT):
                for inner, inner_flags in _parts(node, flags):
                    word += self._word(inner, inner_flags, variant)
        return word

    def quantifiers(self) -> Iterator[tuple[str, list[str]]]:
        """Yield a text that leads to each quantifier without a small limit, and texts that its body matches."""
        for path, node, flags in self._walk(list(self._tree), self._flags, ""):
            if node[0] in _REPEATS and node[1][1] > PIECES:
                yield path, self._words(list(node[1][2]), flags)

    def _walk(self, nodes: Sequence[Node], flags: int, path: str) -> Iterator[tuple[str, Node, int]]:
        for index, node in enumerate(nodes):
            before = path + self._word(nodes[:index], flags, 0)
            yield before, node, flags
            for inner, inner_flags in _parts(node, flags):
                yield from self._walk(inner, inner_flags, before)


def attacks(pattern: str, flags: int = 0, most: int = MAX_ATTACKS) -> list[Attack]:
    """Return at most `most` attacks on a pattern, the same ones in each call.

    Without a quantifier above a small limit there is none, because the steps per position are bounded. Half of the
    attacks are repetitions of what a quantifier repeats, after a text that leads to it; the others are a fixed sample
    of all combinations of prefixes, pieces and suffixes.
    """
    matcher = CountingMatcher(pattern, flags)
    quantifiers = list(matcher.quantifiers())
    if not quantifiers:
        return []
    sample = random.Random(0)
    targeted = [
        attack
        for path, bodies in quantifiers
        for attack in _combined(
            [path, path + bodies[0]], [*bodies, *matcher.alphabet], ["", UNUSUAL], most, sample
        )
    ]
    sample.shuffle(targeted)
    paths = [text for path, bodies in quantifiers for text in (path, path + bodies[0])]
    bodies = [body for _, each in quantifiers for body in each]
    beginnings = [word[:end] for word in matcher.words() for end in range(1, len(word) + 1)]
    pairs = map("".join, itertools.permutations(matcher.alphabet, 2))
    borders = ["", *matcher.alphabet]
    others = _combined(
        [*borders, *paths], [*bodies, *matcher.alphabet, *beginnings, *pairs], borders, most, sample
    )
    return list(dict.fromkeys([*targeted[: most // 2], *others]))[:most]


def _combined(
    prefixes: Sequence[str], pieces: Iterable[str], suffixes: Sequence[str], most: int, sample: random.Random
) -> list[Attack]:
    """Return the combinations of prefixes, pieces and suffixes in random order, at most `most` of them."""
    prefixes, pieces = list(dict.fromkeys(prefixes)), list(dict.fromkeys(filter(None, pieces)))
    size = len(prefixes) * len(pieces) * len(suffixes)
    attacks = []
    for number in sample.sample(range(size), min(most, size)):
        rest, suffix = divmod(number, len(suffixes))
        prefix, piece = divmod(rest, len(pieces))
        attacks.append(Attack(prefixes[prefix], pieces[piece], suffixes[suffix]))
    return attacks


def weakness(pattern: str, flags: int, methods: Iterable[str], most: int = MAX_ATTACKS) -> str | None:
    """Return an attack on which the pattern takes more than linear time, in words; None if there is none."""
    matcher = CountingMatcher(pattern, flags)
    found = attacks(pattern, flags, most)
    for method in methods:
        for attack in found:
            # The count of `{0,59}` grows faster until the limit of the quantifier; the longer texts are above it.
            excess = _excess_steps(matcher, method, attack, PIECES)
            if excess == math.inf or (
                excess > 2 * PIECES and _excess_steps(matcher, method, attack, 30 * PIECES) > 2 * PIECES
            ):
                return f"{method} on {attack.prefix!r} + {attack.piece!r} * n + {attack.suffix!r}"
    return None


def _excess_steps(matcher: CountingMatcher, method: str, attack: Attack, pieces: int) -> float:
    """Return by how much the steps for k, 2k and 3k pieces differ from a line; infinity above `MAX_STEPS`."""
    counts = []
    for times in (1, 2, 3):
        try:
            matcher.spans(method, attack.text(times * pieces))
        except TooManySteps:
            return math.inf
        counts.append(matcher.steps)
    return counts[2] - 2 * counts[1] + counts[0]


def _first(results: Iterable[int | None]) -> int | None:
    return next((each for each in results if each is not None), None)


def _parts(node: Node, flags: int) -> list[tuple[list[Node], int]]:
    """Return the sequences inside a node with their flags."""
    operation, argument = node
    if operation is BRANCH:
        return [(list(branch), flags) for branch in argument[1]]
    if operation is SUBPATTERN:
        return [(list(argument[3]), (flags | argument[1]) & ~argument[2])]
    if operation in _REPEATS:
        return [(list(argument[2]), flags)]
    if operation is ATOMIC_GROUP:
        return [(list(argument), flags)]
    if operation in (ASSERT, ASSERT_NOT):
        return [(list(argument[1]), flags)]
    return []


@contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
