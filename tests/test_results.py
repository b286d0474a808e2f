"""Tables of results: the DataFrames have what the files of a run contain, read here with the standard library."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bandpo_cli import results
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import UserError
from bandpo_cli.experiments import evaluate, train

pytestmark = pytest.mark.slow

SMALL = {
    "task": {"max_number": 5},
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 2},
    "evaluation": {"every": 1, "problems": 4, "samples": 4, "k": [1, 4]},
    "tracking": {"mlflow": False, "tokens_every": 1},
}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runs folder with the run `a` of 2 steps, whose tokens are stored, and the evaluation `e`."""
    place = tmp_path_factory.mktemp("results")
    train(resolve([SMALL, {"steps": 2}]), place / "runs", "a")
    evaluate(str(place / "runs" / "a"), runs_dir=place / "runs", name="e", n=2, limit=3)
    return place / "runs"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_runs_and_metrics(runs_dir):
    runs, metrics = results.runs(runs_dir), results.metrics("a", runs_dir)
    assert runs[["name", "status", "step", "steps"]].values.tolist() == [["a", "FINISHED", 2, 2]]
    written = lines(runs_dir / "a")
    assert metrics.index.tolist() == [0, 1, 2]
    for line in written:
        row = metrics.loc[line["step"]].dropna().to_dict()
        assert row == {key: value for key, value in line.items() if key != "step" and value is not None}
    assert runs.loc[0, "entropy"] == written[-1]["train/entropy"]


def test_the_example_of_the_docs_reads_every_table(runs_dir, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[1] / "docs" / "python_api.md").read_text()
    code = next(block for block in page.split("```python\n") if "results.tokens" in block).partition("```")[0]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(runs_dir / "a")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    out = capsys.readouterr().out
    metrics = results.metrics("a", runs_dir)
    assert f"{metrics['train/accuracy'][2]:.4g}" in out
    samples = results.samples("a", 2, runs_dir)
    for verdict, count in samples["verdict"].value_counts().items():
        assert [verdict, str(count)] in [line.split()[:2] for line in out.splitlines()]


def test_samples_and_tokens(runs_dir):
    samples = results.samples(runs_dir / "a")
    assert sorted(samples["step"].unique()) == [1, 2]
    second = samples[samples["step"] == 2].reset_index(drop=True)
    stored = pq.read_table(runs_dir / "a" / "samples" / "step-000002.parquet").to_pylist()
    assert second["text"].tolist() == [row["text"] for row in stored]
    assert results.samples("a", 2, runs_dir)["reward"].tolist() == [row["reward"] for row in stored]
    tokens = results.tokens("a", 2, runs_dir)
    assert tokens.groupby("completion").size().tolist() == second["length"].tolist()
    # Token texts join to the completion, followed by the text of the end token.
    joined = tokens.groupby("completion")["token"].agg("".join)
    assert all(text.startswith(row["text"]) for text, row in zip(joined, stored, strict=True))
    # Completions of a table of tokens have the sum of log-probs of the table of completions.
    sums = tokens.groupby("completion")["old_logprob"].sum()
    assert sums.tolist() == pytest.approx([row["logprob_sum"] for row in stored], abs=1e-3)
    assert len(results.samples("e", runs_dir=runs_dir)) == 6


def test_evaluations_are_those_of_the_metrics(runs_dir):
    table = results.evaluations("a", runs_dir)
    wide = table[table["set"] == "countdown"].pivot(index="step", columns="metric", values="value")
    for line in lines(runs_dir / "a"):
        for key, value in line.items():
            if key.startswith("eval/countdown/") and value is not None:
                assert wide.loc[line["step"], key.removeprefix("eval/countdown/")] == value
    assert (table["low"].fillna(-1) <= table["value"]).all()


@pytest.mark.parametrize("table", [results.metrics, results.samples, results.evaluations])
def test_a_run_that_is_not_there_is_one_line(table, runs_dir):
    with pytest.raises(UserError, match="no run 'nothing'"):
        table("nothing", runs_dir=runs_dir)
    with pytest.raises(UserError, match=r"step 9: its tokens are not recorded in .*; recorded: 1, 2"):
        results.tokens("a", 9, runs_dir)
