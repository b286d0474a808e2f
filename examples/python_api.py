"""Train, resume and compare from Python, with a callback that prints one line per step.

    python examples/python_api.py

The functions of `bandpo_cli.experiments` do what the commands do, without a terminal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bandpo_cli.callbacks import CallbackBase, StepReport
from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments import compare, evaluate, resume, train


class PrintSteps(CallbackBase):
    """Prints accuracy and entropy after each step."""

    def step(self, report: StepReport) -> None:
        """Receive one step, after its results are on disk."""
        if report.step:
            accuracy, entropy = report.record["train/accuracy"], report.record["train/entropy"]
            print(f"step {report.step:3}  accuracy {accuracy:.3f}  entropy {entropy:.3f} nats")


def main(runs_dir: Path, steps: int) -> float:
    """Train, continue for one more step, and return the change of held-out mean@4 since the start."""
    config = resolve(
        [
            {
                "steps": steps,
                "sampling": {"prompts": 8, "samples": 8},
                "evaluation": {"every": 0},
                "checkpoint": {"every": 1, "keep_last": None},
                "tracking": {"mlflow": False},
            }
        ]
    )
    result = train(config, runs_dir=runs_dir, name="demo", callbacks=[PrintSteps()])
    assert result.status == "FINISHED"
    resume("demo", runs_dir=runs_dir, settings=[{"steps": steps + 1}], callbacks=[PrintSteps()])
    for step in (1, steps + 1):
        settings = [{"tracking": {"mlflow": False}}]
        evaluate(
            f"demo@{step}", n=4, k=(4,), limit=32, settings=settings, runs_dir=runs_dir, name=f"demo-{step}"
        )
    comparison = compare("demo-1", f"demo-{steps + 1}", runs_dir=runs_dir).sets["countdown"]
    change = comparison.metrics["mean"]
    low, high = change.change.low, change.change.high
    print(f"mean@4 {change.a:.3f} -> {change.b:.3f}, 95% interval of the change {low:+.3f} to {high:+.3f}")
    return change.b - change.a


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    main(options.runs_dir, options.steps)
