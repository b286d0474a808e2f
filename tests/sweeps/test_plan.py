"""Plan of a sweep: every combination once, named by the settings that vary, and one error line per mistake."""

from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import BandSettings, TrustRegionSettings
from bandpo_cli.sweeps.sweep_plan import SweepConfig, check_names, parse_axes, plan_runs


def variants(layers: list[dict[str, Any]] | None = None, **settings: Any) -> list[str]:
    runs = [*plan_runs(SweepConfig(**settings), layers or [])]
    check_names(runs)
    return [run.variant for run in runs if run.seed == runs[0].seed]


def test_every_combination_with_every_seed_one_seed_after_the_other():
    axes = parse_axes({"bounds.delta": "0.01,0.05,0.1", "bounds.divergence": "kl,tv"})
    runs = plan_runs(SweepConfig(axes=axes, seeds=(0, 1, 2)))
    assert len(runs) == len({run.name for run in runs}) == 18
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6 + [2] * 6
    for run, config in runs.items():
        divergence, delta = run.variant.split()
        expected = {"seed": run.seed, "bounds": {"divergence": divergence, "delta": float(delta)}}
        assert config == resolve([expected])
        assert run.name == f"{divergence}-{delta}-s{run.seed}"


def test_an_axis_does_not_multiply_methods_without_its_setting():
    axes = parse_axes({"bounds.method": "band,clip,none", "bounds.delta": "0.01,0.05"})
    assert variants(axes=axes) == ["band 0.01", "band 0.05", "clip", "none"]
    axes = parse_axes({"bounds.method": "band,clip", "bounds.divergence": "kl,tv"})
    assert variants(axes=axes) == ["kl", "tv", "clip"]
    axes = {"sampling.temperature": [1.0, 0.7], "evaluation.temperature": [1.0, 0.5]}
    assert variants(axes=axes)[-1] == "temperature=0.7 temperature=0.5"


def test_arms_of_a_trust_region_other_than_the_band_have_its_name():
    """`kl 0.05` is the Band; DPPO has divergences and radii too, and other methods have neither."""
    axes = parse_axes({"bounds.method": "clip,dppo,gspo,kl-cov", "bounds.delta": "0.01,0.05"})
    assert variants(axes=axes) == ["clip", "dppo 0.01", "dppo 0.05", "gspo", "kl-cov"]
    axes = parse_axes({"bounds.method": "band,dppo,sapo", "bounds.divergence": "kl,tv"})
    assert variants(axes=axes) == ["kl", "tv", "dppo kl", "dppo tv", "sapo"]
    radii = [getattr(config.bounds, "delta", None) for config in plan_runs(SweepConfig(axes=axes)).values()]
    assert radii == [0.05, 0.05, 0.05, 0.15, None]
    axes |= parse_axes({"bounds.delta": "0.1,0.2"})
    assert variants(axes=axes)[3:6] == ["tv 0.2", "dppo kl 0.1", "dppo kl 0.2"]
    assert variants(axes={"bounds.method": list(METHODS)}) == list(METHODS)


def test_named_arms_are_crossed_with_the_axes():
    named = {"PPO": {"bounds.method": "clip"}, "wide": {"bounds.method": "clip", "bounds.eps_high": 0.5}}
    found = plan_runs(SweepConfig(variants=named, axes={"optim.updates": [4, 8]}))
    names = ["PPO updates=4", "PPO updates=8", "wide updates=4", "wide updates=8"]
    assert [run.variant for run in found] == names
    *_, last = found.values()
    assert last.bounds.model_dump() == {"method": "clip", "eps_low": 0.2, "eps_high": 0.5}
    assert last.optim.updates == 8


def test_base_layers_and_fixed_settings_apply_to_all_runs():
    sweep = SweepConfig(fixed={"steps": 7, "optim": {"lr": 1e-3}}, axes={"bounds.delta": [0.1, 0.2]})
    for config in plan_runs(sweep, [{"steps": 3, "sampling": {"samples": 8}}]).values():
        assert (config.steps, config.optim.lr, config.sampling.samples) == (7, 1e-3, 8)
    # 6 prompts cannot be split into 4 updates, the default.
    axes = {"optim.updates": [2, 3]}
    assert variants([{"sampling": {"prompts": 6}}], axes=axes) == ["updates=2", "updates=3"]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ({"bounds.method": "band", "optim.lr": 1e-3}, ["band lr=1e-4", "clip lr=1e-4", "clip lr=0.001"]),
        ({"optim.lr": 1e-4}, ["band lr=0.001", "clip lr=0.001"]),  # the axis has 1e-4, text in YAML 1.1
        ({"bounds.method": "grpo", "optim.lr": 1e-3}, ["band lr=1e-4", "band lr=0.001", "clip lr=1e-4"]),
        ({"bounds.delta": "0.05", "optim.lr": "1e-3"}, ["band lr=1e-4", "clip lr=1e-4", "clip lr=0.001"]),
        ({"optim.betas": [0.9, 0.999], "bounds.method": "band"}, ["clip lr=1e-4", "clip lr=0.001"]),
        ({"optim.updates": 8}, ["band lr=1e-4", "band lr=0.001", "clip lr=1e-4", "clip lr=0.001"]),
        ({"steps": 7, "bounds.method": "clip"}, ["band lr=1e-4", "band lr=0.001"]),
    ],
)
def test_excluded_values_are_compared_after_validation(exclude, left):
    """They may also be settings of all variants or defaults; a setting that a method does not have excludes nothing."""
    axes = {"bounds.method": ["band", "clip"], "optim.lr": ["1e-4", 1e-3]}
    found = variants(fixed={"steps": 7}, axes=axes, exclude=[exclude])
    assert sorted(found) == sorted(left)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"axes": {"bounds.delt": [1, 2]}}, ["bounds.delt", "did you mean 'delta'"]),
        ({"axes": {"optim.lr": [1e-3, "fast"]}}, ["optim.lr", "fast"]),
        ({"axes": {"bounds.eps_high": [0.2, 0.3]}}, ["'bounds.eps_high'", "no variant"]),
        ({"axes": {"bounds.delta": [0.1, 0.2]}, "exclude": [{}]}, ["no runs are left"]),
        ({"exclude": [{"optim.lrr": 1}]}, ["exclude: optim.lrr: no such setting (did you mean 'lr'?)"]),
        ({"exclude": [{"optim.lr": "fast"}]}, ["exclude: optim.lr = 'fast'", "valid number"]),
        ({"exclude": [{"seed": 1}]}, ["exclude: seed", "`seeds`"]),
        ({"exclude": [{"bounds.method": "clp"}]}, ["exclude: bounds.method = 'clp'", "mean 'clip'"]),
        ({"exclude": [{"bounds.eps_low": 0.2}]}, ["exclude: bounds.eps_low: no such setting of 'band'"]),
        ({"variants": {"a": {}, "b": {}}}, ["'a'", "'b'", "the same runs"]),
        ({"variants": {"a": {"bounds.method": "clip"}}, "baseline": "b"}, ["baseline = 'b'", "variants: a"]),
        (
            {"variants": {"a": {"bounds.method": "dppo", "bounds.divergence": "chi2"}}},
            ["= 'chi2'", "allowed: kl, tv"],
        ),
        ({"variants": {"a b": {}, "a-b": {"steps": 3}}}, ["'a b'", "'a-b'", "same folder name"]),
        ({"variants": {"a": {"optim..lr": 1}}}, ["'optim..lr'", "section.key"]),
        ({"axes": {"bounds.delta": []}}, ["the axis 'bounds.delta' is empty"]),
        ({"axes": {"bounds.delta": [0.1, 0.1]}}, ["twice"]),
        ({"axes": {"seed": [1, 2]}}, ["put them in `seeds`"]),
        ({"seeds": []}, ["give at least one"]),
        ({"seeds": [1, 1]}, ["twice"]),
        ({"variants": {"x" * 300: {}}}, ["give it a shorter name"]),
        ({"seeds": [-1]}, ["greater than or equal to 0"]),
    ],
)
def test_a_mistake_is_one_error_line(settings, words):
    with pytest.raises(ConfigError) as caught:
        variants(**settings)
    for word in words:
        assert word in str(caught.value)


def test_the_matched_radius_is_computed_for_the_band_of_each_variant():
    """The stand-in matcher returns a radius that identifies the Band and records its arguments."""
    calls = []

    def match(band: TrustRegionSettings, method: str) -> float:
        if not isinstance(band, BandSettings):
            assert band.region() == "dppo kl"
            return 0.02
        calls.append((band.divergence, band.max_ratio, method))
        return {"kl": 0.03, "tv": 0.04}[band.divergence]

    sweep = SweepConfig(
        axes={"bounds.divergence": ["kl", "tv"], "bounds.delta": [0.5, "match:clip"]},
        fixed={"bounds": {"max_ratio": 7.0}},
        seeds=(0, 1),
    )
    runs = plan_runs(sweep, [{"bounds": {"method": "clip"}}, {"bounds": {"method": "band"}}], match)
    assert calls == [("kl", 7.0, "clip"), ("tv", 7.0, "clip")]  # once per Band, not per seed
    radii = [(config.bounds.divergence, config.bounds.delta) for config in runs.values()]
    assert radii == [("kl", 0.5), ("kl", 0.03), ("tv", 0.5), ("tv", 0.04)] * 2
    exclude = [{"bounds.delta": "match:clip", "bounds.divergence": "tv"}]
    left = plan_runs(sweep.model_copy(update={"exclude": exclude, "seeds": (0,)}), match=match)
    assert [run.variant for run in left] == ["kl 0.5", "kl match:clip", "tv 0.5"]
    # Another trust region than the Band is matched too; a method without one has no radius.
    axes = parse_axes({"bounds.method": "dppo,sapo", "bounds.divergence": "kl", "bounds.delta": "match:clip"})
    others = plan_runs(SweepConfig(axes=axes), match=match)
    radii = [(run.variant, config.bounds.model_dump().get("delta")) for run, config in others.items()]
    assert radii == [("dppo kl", 0.02), ("sapo", None)]
