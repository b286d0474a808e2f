"""Seeds of a run: different for each purpose, step and run."""

from bandpo_cli.types import derive_seed


def test_seeds_differ_by_run_purpose_and_step():
    seeds = {
        derive_seed(seed, purpose, step) for seed in range(5) for purpose in ("a", "b") for step in range(50)
    }
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)
