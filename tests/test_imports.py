"""Packages that a command, a function or a module does not import; each case has an interpreter of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports.sweep_folders import write_sweep
from tests.tasks.stored_completions import FOREIGN

LARGE = "torch transformers vllm mlflow pandas matplotlib"
CASES = {
    "bandpo --help": f"{LARGE} numpy pydantic",
    "bandpo bounds 0.08 -d js": LARGE,
    "bandpo train --steps 1 --no-mlflow --dry-run": "pandas scipy.stats statsmodels",
    "bandpo eval --samples a.jsonl --no-mlflow": "torch pandas asyncio bandpo_cli.experiments.run bandpo_cli.sweeps.",
    "import bandpo_cli.experiments": "bandpo_cli.experiments.",
    "import bandpo_cli.experiments as api\nassert all(getattr(api, name).__name__ == name for name in api.__all__)":
        "torch mlflow matplotlib pyarrow rich typer",
    "from bandpo_cli.storage.run_record import describe_environment as call\ncall()": LARGE,
    """
from pathlib import Path
from bandpo_cli.reports.run_plots import plot_run
from bandpo_cli.reports.run_variants import read_sweep
from bandpo_cli.reports.write_report import write_report
assert write_report(read_sweep(Path('s')), Path('s', 'report')).variants
assert plot_run(Path('s', 'clip-s0'), suffix='.svg')""": "torch matplotlib.pyplot mlflow",
    """
import os
os.environ |= {'_BANDPO_COMPLETE': 'complete_bash', 'COMP_WORDS': 'bandpo train -c gs', 'COMP_CWORD': '3'}
from bandpo_cli.__main__ import main
main()""": f"{LARGE} numpy",
}  # fmt: skip
"""A command or code, and the beginnings of the names of modules that it does not import."""

AT_EXIT = (
    "import atexit, gc, sys\natexit.register(lambda: print(f'\\n{gc.get_freeze_count()}', *sys.modules))\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a sweep and with stored completions."""
    place = tmp_path_factory.mktemp("imports")
    write_sweep(place / "s", {"clip": {0: 0.4}})
    (place / "a.jsonl").write_text(json.dumps(FOREIGN[0]))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[:40])
def test_what_is_not_needed_is_not_imported(place, case):
    """An evaluation of a small file ends without a garbage collection, which would take longer than its work."""
    command, *words = case.split()
    code = f"sys.argv[1:] = {words!r}\nfrom bandpo_cli.__main__ import main\nmain()"
    words_of_python = [sys.executable, "-c", AT_EXIT + (code if command == "bandpo" else case)]
    done = subprocess.run(words_of_python, cwd=place, capture_output=True, text=True, check=True)
    frozen, *imported = done.stdout.splitlines()[-1].split()
    assert [name for name in imported if name.startswith((*CASES[case].split(),))] == []
    assert words[:1] != ["eval"] or int(frozen) > 100_000
