"""Layers of settings: what wins, what is dropped, and the one line that a mistake gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bandpo_cli.config.layers import read_assignments, read_layer, resolve, to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError


def test_no_layer_gives_the_defaults() -> None:
    assert resolve([]) == RunConfig()


def test_later_layers_win_key_by_key() -> None:
    config = resolve(
        [{"optim": {"lr": 1e-3, "updates": 8}}, {"optim": {"lr": 2e-3}}, read_assignments(["optim.lr=3e-3"])]
    )
    assert (config.optim.lr, config.optim.updates) == (3e-3, 8)


def test_a_changed_kind_drops_the_earlier_kinds_fields() -> None:
    band = {"bounds": {"method": "band", "delta": 0.2, "max_ratio": 5.0}}
    assert (
        resolve([band, {"bounds": {"method": "clip"}}]).bounds
        == resolve([{"bounds": {"method": "clip"}}]).bounds
    )
    dcpo = resolve([band, {"bounds": {"method": "dcpo", "eps_low": 0.1}}]).bounds
    assert dcpo.model_dump() == {"method": "dcpo", "eps_low": 0.1, "eps_high": 0.2, "max_ratio": 10.0}


def test_the_same_kind_again_drops_nothing() -> None:
    config = resolve([{"bounds": {"delta": 0.2}}, {"bounds": {"method": "band", "divergence": "tv"}}])
    assert config.bounds.model_dump(exclude={"relax"}) == {
        "method": "band",
        "divergence": "tv",
        "delta": 0.2,
        "max_ratio": 10.0,
    }


def test_a_password_is_kept_out_of_config_and_message() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI") as caught:
        resolve([{"tracking": {"uri": "postgresql://ann:secret@db/mlflow"}}])
    assert "secret" not in str(caught.value)
    assert resolve([{"tracking": {"uri": "postgresql://db/mlflow"}}]).tracking.uri == "postgresql://db/mlflow"


def test_the_order_within_one_set_layer_does_not_matter() -> None:
    forth = read_assignments(["bounds.method=clip", "bounds.eps_high=0.3"])
    back = read_assignments(["bounds.eps_high=0.3", "bounds.method=clip"])
    assert resolve([forth]) == resolve([back])


def test_resolved_yaml_gives_the_same_config(tmp_path: Path) -> None:
    config = resolve(
        [{"bounds": {"method": "band", "divergence": "js", "relax": {"eps_low": 0.1}}, "steps": 7}]
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert resolve([read_layer(path)]) == config


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"optim": {"lrr": 1}}, ["optim.lrr", "no such setting", "did you mean 'lr'", "micro_batch_tokens"]),
        ({"bonds": {}}, ["bonds", "did you mean 'bounds'"]),
        ({"bounds": {"method": "clipp"}}, ["bounds.method = 'clipp'", "did you mean 'clip'", "clip-higher"]),
        ({"bounds": {"divergence": "k1"}}, ["bounds.divergence = 'k1'", "did you mean 'kl'", "hellinger"]),
        ({"bounds": {"delta": 0}}, ["bounds.delta = 0", "greater than 0"]),
        ({"bounds": {"delta": "a"}}, ["bounds.delta = 'a'", "number"]),
        ({"bounds": {"delta": float("nan")}}, ["bounds.delta = nan", "finite"]),
        ({"bounds": {"detla": 0.1}}, ["bounds.detla", "did you mean 'delta'"]),
        ({"bounds": {"method": "clip", "delta": 0.1}}, ["bounds.delta", "no such setting", "eps_low"]),
        ({"bounds": {"relax": {"eps_lo": 0.1}}}, ["bounds.relax.eps_lo", "did you mean 'eps_low'"]),
        (
            {"objective": {"aggregation": "token_mean"}},
            ["objective.aggregation", "did you mean 'token-mean'"],
        ),
        ({"sampling": {"engine": "vllmm"}}, ["sampling.engine = 'vllmm'", "transformers"]),
        ({"optim": {"updates": 7}}, ["sampling.prompts = 64", "optim.updates = 7", "63"]),
        ({"evaluation": {"k": [1, 32]}}, ["k = 32", "evaluation.samples is 16"]),
        ({"optim": 3}, ["optim = 3", "section"]),
        ({"bounds": "clip"}, ["bounds"]),
        ({"task": {"name": "countdwn"}}, ["task.name = 'countdwn'", "countdown"]),
        ({"steps": "many"}, ["steps = 'many'", "integer"]),
    ],
)
def test_a_mistake_gets_one_line_with_the_way_out(layer: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([layer])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"optim: {lr: 1e-3", "not readable as YAML"),
        (b"- 1\n- 2\n", "a list"),
        (b"hello", "a bare text"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"steps: 3\nsteps: 4\n", "'steps' is given twice"),
        (b"? [a, b]\n: 1\n", "plain name"),
        (b"a: !!python/object/apply:os.system [ls]\n", "not readable as YAML"),
        (b"[" * 5000, "not readable as YAML"),
    ],
)
def test_a_damaged_file_gets_one_line(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_layer(path)
    assert part in str(caught.value)
    assert "broken.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_layer(tmp_path / "nowhere.yaml")
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert read_layer(empty) == {}


@pytest.mark.parametrize("assignment", ["optim.lr", "=3", "optim..lr=3", ".lr=1"])
def test_a_malformed_assignment_says_how_to_write_it(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        read_assignments([assignment])


def test_config_files_that_ship_are_valid() -> None:
    folder = Path(__file__).parents[2] / "configs"
    files = sorted(folder.rglob("*.yaml"))
    assert files
    for path in files:
        resolve([read_layer(path)])
        assert yaml.safe_load(path.read_text(encoding="utf-8")), f"{path} says nothing"


def test_the_example_is_the_embedded_default() -> None:
    assert resolve([read_layer(Path(__file__).parents[2] / "configs" / "countdown.yaml")]) == RunConfig()


def test_config_imports_no_torch() -> None:
    code = "import sys, bandpo_cli.config.layers; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "transformers", "numpy", "pandas", "mlflow", "matplotlib"} & set(loaded)
