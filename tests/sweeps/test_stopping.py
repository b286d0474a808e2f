"""Only a run that lies behind another arm, at the same step and late enough, is given up."""

from __future__ import annotations

from bandpo_cli.sweeps.folder import SweepRun
from bandpo_cli.sweeps.scheduler import RunState, Status, runs_to_stop

RUNS = [SweepRun("a-s0", "a", 0), SweepRun("a-s1", "a", 1), SweepRun("b-s0", "b", 0)]


def state(status: Status, evaluations: dict[int, float]) -> RunState:
    return RunState(status, max(evaluations, default=0), 100, evaluations=evaluations)


def stopped(a0: RunState, a1: RunState, b0: RunState, margin: float = 0.1) -> set[str]:
    return set(runs_to_stop(RUNS, {"a-s0": a0, "a-s1": a1, "b-s0": b0}, margin))


NOTHING = state("waiting", {})


def test_a_run_far_behind_another_arm_is_stopped_with_its_reason() -> None:
    behind, ahead = state("running", {0: 0.2, 60: 0.3}), state("whole", {0: 0.2, 60: 0.45, 100: 0.5})
    assert stopped(behind, NOTHING, ahead) == {"a-s0"}
    reasons = runs_to_stop(RUNS, {"a-s0": behind, "a-s1": NOTHING, "b-s0": ahead}, 0.1)
    assert reasons["a-s0"] == "held-out accuracy 0.300 at step 60, b had 0.450"


def test_it_is_compared_at_its_own_step_and_not_early() -> None:
    ahead = state("whole", {40: 0.9, 60: 0.32, 100: 0.9})
    assert stopped(state("running", {40: 0.1}), NOTHING, ahead) == set()
    assert stopped(state("running", {40: 0.1, 60: 0.3}), NOTHING, ahead) == set()
    assert stopped(state("running", {50: 0.1}), NOTHING, ahead) == set()  # nobody else was evaluated there


def test_seeds_of_one_arm_are_not_measured_against_each_other() -> None:
    assert stopped(state("running", {60: 0.1}), state("whole", {60: 0.9}), NOTHING) == set()


def test_another_arm_counts_by_its_mean_and_only_running_runs_are_stopped() -> None:
    a0, a1 = state("whole", {60: 0.5}), state("whole", {60: 0.3})
    assert stopped(a0, a1, state("running", {60: 0.31})) == set()  # 0.4 on average
    assert stopped(a0, a1, state("running", {60: 0.29})) == {"b-s0"}
    assert stopped(a0, a1, state("failed", {60: 0.1})) == set()
