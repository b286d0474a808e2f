"""The page of `bandpo view`: its data against the tables, hostile text in a real browser, bad input."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.reports import view_page as view
from bandpo_cli.reports.view_page import default_path, open_sources, to_json, write_page
from bandpo_cli.storage.run_folder import EvalFolder, RunFolder
from bandpo_cli.storage.tables import TokenValues
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout
from tests.reports.pages import Page

HOSTILE = [
    "</script><img src=x onerror=document.title='owned'>",
    "<!--",
    "<script>document.title='owned'</script>",
    "]]>&lt;&amp;\\u003c",
    "'\"`${document.title='owned'}",
    "\u2028\u2029",
    "\x00\x1b[2J\x7f",
    "\ufffd\ufeff\u202e",
]
TEXTS = ["a", " b", *HOSTILE]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEP = 20
LENGTHS = [3, 10, 4, 2]
"""Tokens of the completions of two groups of two."""
OLD = -np.arange(19, dtype=np.float32) / 10
RATIO = np.array([1.3, 1.1, 0.5, 0.7, *[1] * 8, np.nan, 1.3, 1.25, 0.85, 0.75, 1.3, 1], np.float32)
ADVANTAGE = np.array([1, -1, 0.5, -0.5], np.float32)
CLIPPED = np.array([0, 1, 0, 2, *[0] * 9, 1, 0, 0, 0, 0, 0], np.uint8)
EXPECTED = {"method": [1], "fixed": [14, 0]}
"""Tokens that one of the method and the interval [0.8, 1.2] clips, by hand; the rarest first. Token 3 and 13: both."""


def problem(name: str) -> Problem:
    return Problem(name, f"prompt {HOSTILE[0]}", HOSTILE[1], "task", "math")


def write_run(runs: Path, name: str, problems: tuple[str, str], **changes: Any) -> RunFolder:
    """Write a run of one recorded step with two groups of two completions and hostile texts everywhere."""
    run = RunFolder.create(runs, name)
    run.write_config("bounds: {method: band, divergence: kl, delta: 0.05}\n")
    run.append_metrics({"step": STEP, "train/entropy": 1.0, "train/accuracy": 0.5})
    ids = np.arange(19, dtype=np.int32) % len(TEXTS)
    groups, start = [], 0
    for number, key in enumerate(problems):
        rollouts = []
        for length in LENGTHS[2 * number : 2 * number + 2]:
            reason = "length" if length == max(LENGTHS) else "stop"
            completion = Completion(ids[start : start + length], [-1.0] * length, reason, 0)
            text = "".join(TEXTS[index] for index in ids[start : start + length])
            grade = Grade(float(length % 3 == 1), length % 2 == 0, HOSTILE[2])
            rollouts.append(Rollout(problem(key), f"prompt {HOSTILE[0]}", (1,), completion, text, grade))
            start += length
        groups.append(Group(problem(key), tuple(rollouts)))
    half, unknown = np.linspace(0.1, 2, 19, dtype=np.float16), np.full(19, np.nan, np.float16)
    columns = (ids, OLD, RATIO, half, half / 2, half * 2, unknown, CLIPPED)
    values = TokenValues(np.array(LENGTHS), ADVANTAGE, TEXTS, *columns)
    run.write_samples(STEP, groups)
    run.write_token_values(STEP, values._replace(**changes))
    return run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs", "a", ("p", f"q{HOSTILE[0]}"))


def decode(column: list[str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(column[1]), f"<{column[0]}")


def test_the_page_has_the_values_of_the_tables_and_no_markup_of_a_text(run):
    sources = open_sources(["a"], run.path.parent)
    (written,) = write_page(sources, default_path(sources))
    assert written == run.path / "view" / "step-000020.html"
    html = written.read_text()
    found = Page(html)
    assert not {"img", "iframe", "object"} & {*found.names}
    assert found.comments == []
    assert [*found.scripts] == ["data", "part-0", None]
    assert not {*found.scripts["data"], *found.scripts["part-0"]} & {*"<>&"}
    assert all(" " <= char <= "~" for char in found.scripts["part-0"])
    index, part = (json.loads(found.scripts[name]) for name in ("data", "part-0"))
    (source,), (columns,) = index["sources"], (side["columns"] for side in part["sides"])
    assert source["texts"] == TEXTS
    for name, expected in (("old_logprob", OLD), ("ratio", RATIO), ("clipped", CLIPPED)):
        np.testing.assert_array_equal(decode(columns[name]), expected)
    assert "importance" not in columns, "none is known"
    assert part["prompts"] == [f"prompt {HOSTILE[0]}"] * 2
    sides = [group["sides"][0] for group in index["groups"]]
    assert [[item["length"] for item in side] for side in sides] == [[3, 10], [4, 2]]
    assert [[item["truncated"] for item in side] for side in sides] == [[False, True], [False, False]]
    assert [item["advantage"] for side in sides for item in side] == ADVANTAGE.tolist()
    assert [group["equal"] for group in index["groups"]] == [[False], [False]]
    starts = np.cumsum([0, *LENGTHS])
    for name, tokens in EXPECTED.items():
        rows = source["differences"][name]["rows"]
        assert [starts[owner] + token for owner, token, *_ in rows] == tokens
        assert source["differences"][name]["count"] == len(tokens)
    assert source["clipped"] == [1, 1, 1, 0]
    assert source["lowest"] == pytest.approx([-0.1, -0.3, -1.3, 0])


def test_a_large_page_loads_parts_from_a_folder(run, monkeypatch):
    monkeypatch.setattr(view, "MAX_PAGE_BYTES", 0)
    monkeypatch.setattr(view, "_PART_TOKENS", 10)
    sources = open_sources(["a"], run.path.parent)
    page, *parts = write_page(sources, run.path / "x.html")
    index = json.loads(Page(page.read_text()).scripts["data"])
    assert index["files"] == [str(path.relative_to(run.path)) for path in parts]
    assert len(parts) == 2
    read = [path.read_text() for path in parts]
    assert read[1].startswith("loadPart(1,{")
    ratios = [decode(json.loads(text[11:-3])["sides"][0]["columns"]["ratio"]) for text in read]
    np.testing.assert_array_equal(np.concatenate(ratios), RATIO)
    monkeypatch.setattr(view, "MAX_PAGE_BYTES", 10**7)
    assert write_page(sources, run.path / "x.html") == [page]
    assert not parts[0].parent.exists()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("limit", [10**7, 0])
def test_hostile_completions_are_text_in_a_browser(run, limit, monkeypatch, tmp_path):
    monkeypatch.setattr(view, "MAX_PAGE_BYTES", limit)
    page, *_ = write_page(open_sources(["a"], run.path.parent), tmp_path / "page.html")
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    flags += f" disable-component-update disable-sync virtual-time-budget=3000 user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), *(f"--{flag}" for flag in flags.split()), "--dump-dom"]
    url = f"{page.as_uri()}#order=sampled&token=0.0.1.2"
    done = subprocess.run([*command, url], capture_output=True, check=True, timeout=60)
    found = Page(done.stdout.decode())
    assert found.title == "a, step 20"
    assert "img" not in found.names
    assert found.names.count("script") == 3, "the data and one part, and the code of the page"
    texts, tokens = iter([*TEXTS, *TEXTS]), iter(found.tokens)
    for length in LENGTHS:
        expected = "".join(next(texts) for _ in range(length))
        for char in "\x00\x1b":
            expected = expected.replace(char, chr(0x2400 + ord(char)))
        assert next(tokens) == expected
    assert b'<code>"&lt;script&gt;' in done.stdout, "the selected token"


def test_two_runs_show_their_common_problems_in_the_order_of_the_first(run):
    runs = run.path.parent
    write_run(runs, "b", (f"q{HOSTILE[0]}", "other"))
    sources = open_sources(["a", "b"], runs)
    index, (part,) = view.page_data(sources)
    (group,) = index["groups"]
    assert [[item["length"] for item in side] for side in group["sides"]] == [[4, 2], [3, 10]]
    for side, span in zip(part["sides"], (slice(13, 19), slice(0, 13)), strict=True):
        np.testing.assert_array_equal(decode(side["columns"]["ratio"]), RATIO[span])
    assert default_path(sources) == run.path / "view" / "step-000020-with-b.html"
    write_run(runs, "c", ("x", "y"))
    with pytest.raises(UserError, match="a, step 20 and c, step 20 share no problem; runs of the same task"):
        open_sources(["a", "c"], runs)


def test_an_evaluation_has_texts_only(run):
    folder = EvalFolder.create(run.path.parent, "e")
    folder.write_record({"sets": {}})
    with pytest.raises(UserError, match="the evaluation has not finished"):
        open_sources(["e"], run.path.parent)
    row = {"task": "t", "problem_id": "p", "reference": "2", "grader": "math", "extra": "{}"}
    row |= {"question": "1+1", "prompt": "1+1", "text": HOSTILE[0], "answer": None, "verdict": "wrong"}
    row |= {"reward": 0.0, "accuracy": 0.0, "length": None, "finish_reason": "stop", "logprob_sum": None}
    folder.write_samples([row])
    index, (part,) = view.page_data(open_sources(["e"], run.path.parent))
    assert part["sides"] == [{"texts": [HOSTILE[0]]}]
    assert "texts" not in index["sources"][0]
    with pytest.raises(UserError, match="--step 3: e is an evaluation"):
        open_sources(["e"], run.path.parent, 3)


def test_bad_input_is_named_in_one_line(run):
    runs = run.path.parent
    with pytest.raises(UserError, match=r"--step 7: its tokens are not recorded in .*a; recorded: 20$"):
        open_sources(["a"], runs, 7)
    for step in range(1, 14):
        (run.path / "token_values" / f"step-{step:06d}.parquet").touch()
    with pytest.raises(UserError, match=r"recorded: 1, 2, …, 7, 8, 9, 10, 11, 12, 13, 20$"):
        open_sources(["a"], runs, 30)
    changed = write_run(runs, "d", ("p", "q"), lengths=np.array([10, 3, 4, 2]))
    with pytest.raises(UserError, match="are not of the same completions"):
        open_sources(["d"], runs)
    shutil.rmtree(changed.path / "token_values")
    with pytest.raises(UserError, match=r"d has no recorded tokens: tracking.tokens_every was 0, .* samples"):
        open_sources(["a", "d"], runs)
    with pytest.raises(UserError, match="cannot be written"):
        write_page(open_sources(["a"], runs), run.path)


def test_json_ends_no_script_and_keeps_every_text():
    for text in HOSTILE:
        encoded = to_json([text])
        assert json.loads(encoded) == [text]
        assert not {*encoded} & {*"<>&\x00\u2028"}
