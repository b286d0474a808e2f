"""Clipped tokens of finished runs by probability, position and kind, from the recorded values per token.

    python benchmarks/clipped_tokens.py runs/pretrained            # a sweep: one block per variant, over its seeds
    python benchmarks/clipped_tokens.py runs/a runs/b              # runs

A run records the values of every n-th step (`tracking.tokens_every`). Shares are of the tokens with a ratio.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.storage.tables import TokenValues, read_token_values

EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
KINDS = ("number", "space", "end", "other")


def kind_of(text: str) -> str:
    """Return the kind of a token by its text."""
    if re.fullmatch(r"\s*\d+", text):
        return "number"
    if text.startswith("<|"):
        return "end"
    return "space" if not text.strip() else "other"


def labels(values: TokenValues) -> dict[str, NDArray[np.str_]]:
    """Return for each token, [N], the name of its bin of π_old, its position from 1 (4+ for later ones), its kind."""
    names = [f"{low:g} to {high:g}" for low, high in pairwise(EDGES)]
    bins = np.searchsorted(EDGES[1:-1], np.exp(values.old_logprob.astype(float)))
    starts = np.repeat(np.cumsum(values.lengths) - values.lengths, values.lengths)
    positions = np.arange(len(starts)) - starts + 1
    kinds = np.array([*map(kind_of, values.texts)])[values.text_index]
    return {
        "probability": np.array(names)[bins],
        "position": np.where(positions < 4, positions.astype(str), "4+"),
        "kind": kinds,
    }


def tables_of(run: Path) -> Iterator[TokenValues]:
    """Yield the recorded values of each step."""
    for path in sorted((run / "token_values").glob("step-*.parquet")):
        yield read_token_values(path)


def report(runs: Sequence[Path]) -> str:
    """Return the table of a variant: per group of tokens its share, and how many of them each bound clips."""
    counts: dict[tuple[str, str], NDArray[np.int64]] = defaultdict(lambda: np.zeros(3, np.int64))
    for run in runs:
        for values in tables_of(run):
            has_ratio = ~np.isnan(values.ratio)
            for column, names in labels(values).items():
                for name in np.unique(names):
                    of_name = values.clipped[has_ratio & (names == name)]
                    counts[column, name] += [len(of_name), (of_name == 1).sum(), (of_name == 2).sum()]
    total = sum(count[0] for (column, _), count in counts.items() if column == "kind")
    lines = [
        "| tokens | | share | clipped at the upper bound | at the lower bound |",
        "|---|---|---|---|---|",
    ]
    for (column, name), (tokens, upper, lower) in sorted(counts.items()):
        shares = f"{tokens / total:.1%} | {upper / max(1, tokens):.2%} | {lower / max(1, tokens):.2%}"
        lines.append(f"| {column} | {name} | {shares} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table per variant of a sweep, or one of all runs."""
    parser = argparse.ArgumentParser(description="Clipped tokens of finished runs, in groups.")
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, or the folder of a sweep")
    folders = parser.parse_args(arguments).folders
    variants: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        if (folder / "token_values").exists():
            variants["runs"].append(folder)
        for run in sorted(folder.glob("*/token_values")):
            variants[re.sub(r"-s\d+$", "", run.parent.name)].append(run.parent)
    for name, runs in variants.items():
        print(f"## {name}: {len(runs)} runs\n\n{report(runs)}\n")


if __name__ == "__main__":
    main()
