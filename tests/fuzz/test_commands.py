"""Commands with invalid files: exit code 2, one line that begins with `error: `, and nothing is written."""

from pathlib import Path

import pytest

from bandpo_cli.config.layers import resolve, to_yaml
from tests.cli.eval_command import bandpo
from tests.fuzz.mutate import JSON_TEXTS, YAML_TEXTS, file_variants, not_a_file
from tests.fuzz.outcome import check_line, deadline


def check_refused(place: Path, *arguments: str | Path) -> None:
    """Run a command, and require exit code 2, one line and no written file."""
    before = sorted(place.rglob("*"))
    with deadline(120):
        done = bandpo(*arguments, cwd=place)
    assert done.code == 2, (arguments, done.code, done.out, done.err)
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    check_line(done.err.rstrip("\n"))
    assert sorted(place.rglob("*")) == before


@pytest.mark.slow
def test_invalid_files_for_every_command(tmp_path: Path) -> None:
    good = to_yaml(resolve([{"steps": 1}])).encode()
    for content in list(file_variants(good, YAML_TEXTS))[::14]:
        (tmp_path / "c.yaml").write_bytes(content)
        check_refused(tmp_path, "sweep", "--dry-run", "--config", "c.yaml", "--model", "no/such/model")
        check_refused(tmp_path, "train", "--config", "c.yaml", "--set", "optim.nosuch=1")
    for content in list(file_variants(b'{"question": "1+1", "answer": "2"}\n', JSON_TEXTS))[::14]:
        (tmp_path / "t.jsonl").write_bytes(content)
        check_refused(tmp_path, "train", "--task", "t.jsonl")
        check_refused(tmp_path, "bounds", "--file", "t.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "endless"])
def test_paths_that_are_not_files_for_every_command(tmp_path: Path, kind: str) -> None:
    for name, arguments in {
        "c.yaml": ("train", "--config", "c.yaml"),
        "s.yaml": ("sweep", "s.yaml", "--dry-run"),
        "t.jsonl": ("train", "--task", "t.jsonl", "--model", "a/b"),
        "x.jsonl": ("eval", "--samples", "x.jsonl"),
        "p.txt": ("bounds", "--file", "p.txt"),
    }.items():
        with not_a_file(tmp_path / name, kind):
            check_refused(tmp_path, *arguments)
