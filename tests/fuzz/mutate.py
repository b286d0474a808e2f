"""Invalid files generated from valid ones, reproducible by seed."""

import contextlib
import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.tasks.stored_completions import mutations

DEEP = 10_000
"""Depth of nesting that exceeds the stack of a recursive parser."""
YAML_TEXTS = (
    "seed: &x 1\nsteps: *x", "<<: {seed: 1}", "- 1", "5", "null", "x",
    "!!python/object/apply:os.system ['touch pwned']", "seed: !!python/object/new:os.system ['touch pwned']",
    "!!python/name:os.system", "seed: !!python/module:os", "seed: !python/tuple [1]", "seed: !!binary '?'",
    "seed: !!int ''", "seed: !!int x", "seed: !!bool x", "seed: !!float ''", "seed: !!timestamp x", "!!map 5",
    "!!seq 5", "seed: !!set {a}", "seed: !!omap [a: 1]", "seed: !!pairs [a: 1]", "? !!set {a}\n: 1", "? [a]\n: 1",
    "null: 1", "1: 2", "1.5: 2", "true: 1", "2024-01-01: 1", "seed: 2024-99-99", "~",
    "seed: 2001-01-01T00:00:00+99:99", "seed: 1\nseed: 2", "optim: {lr: 1, lr: 2}",
    "seed: .nan",
    "optim: {lr: .inf}", "optim: {lr: -.inf}", "optim: {lr: 1e400}", "optim: {lr: 1e-400}", "seed: 0b" + "1" * 5000,
    "seed: 0o17", "[" * 20, "[" * 20 + "]" * 20,
    "a: " + "x" * 2_000_000, "&a " * 1000, "*a", "%YAML 9.9\n---\na: 1", "--- 1\n--- 2",
    "a: |\n  x\n\ty", "\x00", "seed: \x00", "\x1b[31mred", "\ufeffseed: 1", "seed: \U0001f600",
    'model: {path: "a\\nb"}', 'model: {path: "\\0"}', "\t", "a:\t1", 'model: {path: "\\e[2J"}',
    'bounds: {method: "x\\ny"}', '"a\\nb": 1', 'optim: {"l\\r": 1}',
)  # fmt: skip
"""YAML features beside plain values."""

JSON_TEXTS = (
    "[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 100_000,
    '{"step": ' + "9" * 5000 + "}", "NaN", "Infinity", "null", "true", "5", '"x"', "[]", "{}", "[[]]",
    "[null]", "{\"a\": NaN}", '{"a": 1, "a": 2}', '{"step": 1e400}', '"\\ud800"', '{"\\ud800": "\\ud800"}',
    "{", '{"a"', "\x00", "\x1b[2J", "[1,]", "x" * 2_000_000, "{}\n{}", "\n" * 100_000, '{"step": null}',
    '{"step": -1}', '{"step": "x"}', '{"step": 1, "eval/x/mean_at_1": "x"}', '{"runs": null}', "-", "1e5",
)  # fmt: skip

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, float("nan"), float("inf"), 1e308, -1e308, 10**9, 10**18, 10**30, 10**400, "",
    " ", "x", "\x00", "\x1b[31m", "a\nb", "é" * 300, "a" * 5000, "/etc/passwd", "../../x", "~nobody/x", "1",
    "nan", [], [1], ["x"], [None], [[]], {}, {"a": 1}, {"": {}}, {"name": "x"}, [{"name": "../x"}],
    "module:function", "match:clip",
)  # fmt: skip
"""Values of unexpected types and sizes."""

NAMES = (
    "", " ", ".", "..", "/", "//", "../x", "../../x", "a/../../x", "/etc/passwd", "/tmp/x", "~", "~nobody/x",
    "a/b", "a\\b", "a\x00b", "\x00", "a\nb", "a\rb", "\x1b[2J", "a" * 255, "a" * 256, "a" * 5000, "é",
    "é" * 200, "\u202e", "\ud800", "a.", "a ", " a", "-a", "--help", "-", "mlruns",
    "mlflow.db", "@", "a@", "a@x", "a@" + "9" * 5000, "a@1", "@1", "[bold]", "%s", "{0}", "$HOME", "`id`",
    "a;b", "*", "?", "[", "**", "a*b", "**/x", "runs", ".hidden",
)  # fmt: skip
"""Unusual names from users and other programs."""


def file_variants(content: bytes, texts: tuple[str, ...]) -> Iterator[bytes]:
    """Yield `content` in other encodings and truncated, then each of `texts` instead."""
    yield from (b"", b"\x00" * 100, b"\xff\xfe\x00")
    yield from (content + b"\x00", content + b"\xff", b"\xef\xbb\xbf" + content)
    text = content.decode("utf-8", "replace")
    yield from (text.encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-7"))
    yield from (content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"\r"), content * 2)
    yield from (content[: len(content) * part // 7] for part in range(1, 7))
    yield from (item.encode("utf-8", "surrogatepass") for item in texts)


def damaged_files(content: bytes, texts: tuple[str, ...], seed: int, count: int) -> Iterator[bytes]:
    """Yield `file_variants`, then `count` files with changed bytes."""
    yield from file_variants(content, texts)
    yield from mutations(content, seed, count)


def changed_values(value: Any, seed: int, count: int) -> Iterator[Any]:
    """Yield `count` copies of `value` with some entries replaced, renamed, removed or added."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(value)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            places = list(_places(changed))
            if not places:
                break
            inside, key = rng.choice(places)
            kind = rng.randrange(8)
            odd = copy.deepcopy(rng.choice(ODD))
            if kind == 0:
                del inside[key]
            elif kind == 1 and isinstance(inside, dict):
                new = rng.choice((str(key) + "x", str(key)[:-1], "a\nb", "x" * 300, "", "__class__"))
                inside[new] = inside.pop(key)
            elif kind == 2 and isinstance(inside, dict):
                inside[rng.choice(("name", "path", "extra", "method", "a.b"))] = odd
            else:
                inside[key] = odd
        yield changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def as_yaml(value: Any) -> bytes:
    return yaml.dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # an int that exceeds Python's limit of digits
        return b"{"


KINDS = ("folder", "pipe", "loop", "endless", "device", "dangling", "gone", "memory")


@contextlib.contextmanager
def not_a_file(path: Path, kind: str) -> Iterator[None]:
    """Replace a file temporarily by one of `KINDS`, none of which is a regular file."""
    original = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        targets = {"endless": "/dev/zero", "device": "/dev/null", "memory": "/proc/self/mem", "loop": path}
        path.symlink_to(targets.get(kind, path.with_name("gone")))
    try:
        yield
    finally:
        path.rmdir() if kind == "folder" else path.unlink(missing_ok=True)
        path.write_bytes(original)
