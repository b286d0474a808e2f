"""Checkpoints on the disk: completeness, which ones are kept, and removal of what a crash left."""

import json
import re
import shutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from bandpo_cli.config.batch_and_sampling import CheckpointConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import (
    Progress,
    check_contents,
    check_model_contents,
    complete_checkpoints,
    kept_steps,
    prune_checkpoints,
    read_trainer_state,
    remove_checkpoints_after,
    write_trainer_state,
)
from bandpo_cli.storage.run_folder import RunFolder


def make(run: RunFolder, *steps: int, skipped: int = 0) -> None:
    """Write checkpoints with placeholder files."""
    for step in steps:
        folder = run.checkpoint_dir(step)
        (folder / "trainer").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "trainer" / "optimizer.safetensors").write_bytes(b"moments")
        write_trainer_state(folder, Progress(step, 4 * step, skipped, 64 * step, "abc"))


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "a")


STATE = "trainer/state.json"


@pytest.mark.parametrize(
    ("name", "damage", "word"),
    [
        ("trainer/optimizer.safetensors", lambda _: b"mom", "optimizer.safetensors is damaged: 3 of 7 bytes"),
        ("model.safetensors", None, "model.safetensors is missing"),
        (STATE, None, "state.json: No such file"),
        (STATE, lambda _: b'{"format": 1, "st', "state.json: not readable as JSON"),
        (STATE, lambda _: b"[]", "state.json: expected a JSON object"),
        (STATE, lambda content: content.replace(b'"format": 1', b'"format": 99'), "format 99"),
        (STATE, lambda content: content.replace(b'"step": 10', b'"step": 11'), "state.json is damaged"),
    ],
)
def test_an_incomplete_checkpoint_is_reported_as_damaged_and_removed(run, name, damage, word):
    make(run, 5, 10)
    assert read_trainer_state(run.checkpoint_dir(10)) == Progress(10, 40, 0, 640, "abc")
    path = run.checkpoint_dir(10) / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=word):
        read_trainer_state(run.checkpoint_dir(10))
    complete, damaged = complete_checkpoints(run)
    assert (list(complete), list(damaged)) == ([5], [10])
    remove_checkpoints_after(run, 5)
    assert names(run) == ["step-000005"]


def test_a_flipped_bit_is_noticed_with_the_name_of_its_file(run):
    """Every 29th bit of every file is flipped, those of `state.json` included."""
    make(run, 10)
    folder = run.checkpoint_dir(10)
    checksums = json.loads((folder / STATE).read_text())["xxh3"]
    assert checksums == {name: xxh3_64_hexdigest((folder / name).read_bytes()) for name in checksums}
    check_contents(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for bit in range(0, 8 * len(content), 29):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(UserError, match=re.escape(path.relative_to(folder).as_posix())):
                check_contents(folder)
        path.write_bytes(content)


def test_only_a_resume_reads_the_training_state(run):
    make(run, 10)
    folder = run.checkpoint_dir(10)
    (folder / "trainer" / "optimizer.safetensors").write_bytes(b"nothing")
    check_model_contents(folder)
    with pytest.raises(UserError, match=r"optimizer\.safetensors is damaged: its content has changed"):
        check_contents(folder)


def test_leftovers_of_a_crash_are_removed_and_files_of_the_user_are_kept(run):
    make(run, 5, 10, 15)
    folder = run.path / "checkpoints"
    for name in (".step-000020.writing", ".step-000001.removing", ".mine", "best-so-far"):
        shutil.copytree(run.checkpoint_dir(5), folder / name)
    remove_checkpoints_after(run, 10)
    assert names(run) == [".mine", "best-so-far", "step-000005", "step-000010"]


def test_a_checkpoint_that_is_a_link_is_removed_without_its_target(run, tmp_path):
    """Links of checkpoints elsewhere, one of them dangling, and a hidden link."""
    make(run, 5, 10, 15)
    for step in (10, 15):
        run.checkpoint_dir(step).rename(tmp_path / f"step-{step:06d}")
        run.checkpoint_dir(step).symlink_to(tmp_path / f"step-{step:06d}")
    shutil.copytree(tmp_path / "step-000015", tmp_path / "copy")
    (run.path / "checkpoints" / ".step-000010.removing").symlink_to(tmp_path / "copy")
    assert list(complete_checkpoints(run).complete) == [5, 10, 15]
    shutil.rmtree(tmp_path / "step-000015")
    remove_checkpoints_after(run, 5)
    assert names(run) == ["step-000005"]
    assert (tmp_path / "step-000010" / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == b"weights"


scores = st.one_of(st.none(), st.sampled_from([0.25, 0.5, 0.75]))


@given(
    st.dictionaries(st.integers(0, 30), scores, max_size=8),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 3),
)
def test_the_last_and_the_best_checkpoints_are_kept(table, last, best):
    """Compare with the definition: a step is kept if fewer than `last` are later, or fewer than `best` are better."""
    records = [{"step": step, "eval/a/mean_at_4": score} for step, score in table.items()]
    expected = set()
    for step, score in table.items():
        later = sum(other > step for other in table)
        better = sum(
            value is not None and score is not None and (value, -other) > (score, -step)
            for other, value in table.items()
        )
        if last is None or later < last or (score is not None and better < best):
            expected.add(step)
    assert kept_steps(table, records, CheckpointConfig(keep_last=last, keep_best=best)) == expected


def test_the_best_is_by_the_mean_over_sets_or_by_the_configured_metric():
    records = [
        {"step": 1, "eval/a/mean_at_4": 0.9, "eval/b/mean_at_32": 0.1, "eval/a/pass_at_4": 0.1, "train/accuracy": 3},
        {"step": 2, "eval/a/mean_at_4": 0.5, "eval/b/mean_at_32": 0.6, "eval/a/pass_at_4": 0.2},
        {"step": 3, "eval/a/mean_at_4": 0.4, "eval/b/mean_at_32": 0.4, "eval/a/pass_at_4": 0.3},
        {"step": 4, "eval/a/mean_at_4": None, "eval/b/mean_at_32": 0.99},
        {"step": 5},
    ]  # fmt: skip

    def kept(**settings: Any) -> set[int]:
        return kept_steps([1, 2, 3, 4, 5], records, CheckpointConfig(keep_last=1, **settings))

    assert kept() == {2, 5}
    assert kept(keep_best=2) == {1, 2, 5}
    assert kept(best_metric="eval/a/pass_at_4") == {3, 5}
    assert kept(best_metric="train/accuracy") == {1, 5}
    assert kept(best_metric="no/such_metric") == {5}
    assert kept(keep_best=0) == {5}


def test_pruning_reads_the_metrics_on_the_disk_and_keeps_damaged_checkpoints(run):
    make(run, 5, 10, 15, 20)
    for step, value in ((5, 0.1), (10, 0.9), (15, 0.2), (20, 0.3)):
        run.append_metrics({"step": step, "eval/a/mean_at_4": value})
    (run.checkpoint_dir(15) / "model.safetensors").unlink()
    prune_checkpoints(run, CheckpointConfig(keep_last=1))
    assert names(run) == ["step-000010", "step-000015", "step-000020"]  # step 15 is damaged


def test_nothing_is_pruned_while_updates_are_skipped(run):
    prune_checkpoints(run, CheckpointConfig())  # without checkpoints it does nothing
    remove_checkpoints_after(run, -1)
    assert complete_checkpoints(run) == ({}, {})
    make(run, 5, 10)
    make(run, 15, skipped=2)
    prune_checkpoints(run, CheckpointConfig(keep_last=1, keep_best=0))
    assert len(names(run)) == 3
    make(run, 20)
    prune_checkpoints(run, CheckpointConfig(keep_last=1, keep_best=0))
    assert names(run) == ["step-000020"]
