"""Evaluation folder: lookup, atomic writes, parts, and damaged records."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.paths import path_exists
from bandpo_cli.storage.run_folder import RECORD_FILE, EvalFolder, PartKey
from bandpo_cli.storage.run_record import read_record
from bandpo_cli.storage.tables import EvalRow

ROW = EvalRow(
    task="a", problem_id="p", prompt="q", reference="1", grader="math", extra="{}", text="Answer: 1 🙂", answer="1",
    reward=0.25, accuracy=1.0, verdict="correct", length=None, finish_reason=None, logprob_sum=-0.1234567890123456,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> EvalFolder:
    folder = EvalFolder.create(tmp_path / "runs", "first")
    folder.write_record({"status": "running", "sets": {}})
    return folder


def test_parts_round_trip_exactly_by_key(folder: EvalFolder) -> None:
    """Parts are read in the order of sets and problems, independent of the order of writing."""
    keys = [PartKey(1, 0), PartKey(0, 128), PartKey(0, 4), PartKey(0, 100_000_000)]
    for key in keys:
        folder.write_part(key, [{**ROW, "problem_id": str(key)}, ROW])
    found = folder.read_parts()
    assert sorted(found) == [PartKey(0, 4), PartKey(0, 128), PartKey(0, 100_000_000), PartKey(1, 0)]
    assert all(found[key] == [{**ROW, "problem_id": str(key)}, ROW] for key in keys)
    assert folder.count_stored() == 8


def test_the_complete_table_replaces_the_parts(folder: EvalFolder) -> None:
    folder.write_part(PartKey(0, 0), [ROW])
    folder.write_samples([ROW, ROW])
    assert not (folder.path / "parts").exists()
    assert folder.read_parts() == {}
    assert folder.count_stored() == 2
    assert pq.read_table(folder.samples_path).to_pylist() == [ROW, ROW]


def test_a_failed_write_keeps_the_old_file(folder: EvalFolder) -> None:
    folder.write_part(PartKey(0, 0), [ROW])
    with pytest.raises(TypeError):
        folder.write_record({"status": object()})
    with pytest.raises((TypeError, ValueError)):
        folder.write_part(PartKey(0, 0), [{**ROW, "text": 5}])  # type: ignore[typeddict-item]
    assert read_record(folder.path / RECORD_FILE)["status"] == "running"
    assert folder.read_parts() == {PartKey(0, 0): [ROW]}


@pytest.mark.parametrize("name", ["first", "{runs}/first/", "{runs}/first/eval.json", ".", "eval.json"])
def test_open_accepts_name_folder_and_record(
    tmp_path: Path, folder: EvalFolder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.path)
    found = EvalFolder.open(tmp_path / "runs", name.format(runs=tmp_path / "runs"))
    assert (found.path, found.name) == (folder.path, "first")


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, folder: EvalFolder) -> None:
    with pytest.raises(UserError, match=r"no evaluation 'frist' .*did you mean 'first'\?.*it has first"):
        EvalFolder.open(tmp_path / "runs", "frist")
    with pytest.raises(UserError, match="it has no evaluations"):
        EvalFolder.open(tmp_path, "first")
    with pytest.raises(UserError, match="first-2"):
        EvalFolder.create(tmp_path / "runs", "first")
    for name in ("", "x" * 5000, "a\0b"):
        with pytest.raises(UserError, match="no evaluation"):
            EvalFolder.open(tmp_path / "runs", name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not readable as JSON"),
        (b"\xff\xfe", "not a text file"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"sets": []}', "not the record of an evaluation"),
        (b'{"status": "finished"}', "not the record of an evaluation"),
    ],
)
def test_a_damaged_record_raises_a_one_line_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "eval.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_record(path)
    assert len(str(caught.value).splitlines()) == 1
    for other, why in ((tmp_path, "is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(UserError, match=why):
            read_record(other)


def test_impossible_file_names_do_not_exist(tmp_path: Path) -> None:
    assert path_exists(tmp_path)
    for name in ("x" * 300, "a\0b", "x/" * 3000):
        assert not path_exists(tmp_path / name)
