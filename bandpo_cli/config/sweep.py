"""Configuration of a sweep: fixed settings, axes, named variants, excluded combinations and seeds."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bandpo_cli.settings_validation import Section, require

Settings = dict[str, Any]
"""Settings by dotted name, as in `--set`: {"bounds.delta": 0.05}."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]


class SweepConfig(Section):
    """The axes of a sweep; every combination of a variant, a value of each axis and a seed is one run."""

    fixed: dict[str, Any] = Field(default_factory=dict)
    """Settings of all runs, in sections as in the config file of a run."""
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by dotted setting. An axis for which a variant's method has no setting (`bounds.delta` of clip) does not
    multiply that variant."""
    variants: dict[str, Settings] = Field(default_factory=dict)
    """Named variants, each with its own dotted settings; combined with all values of the axes."""
    exclude: list[Settings] = Field(default_factory=list)
    """Excluded combinations: variants that have all the values of one of these."""
    seeds: tuple[Seed, ...] = (0,)
    fork: str | None = None
    """The checkpoint that every run continues, as RUN or RUN@STEP; null for runs from the start. The settings of RUN
    are the defaults, also of `seeds`."""
    recorded: str | None = None
    """The run whose recorded tokens are used for `bounds.delta: match:clip`: the δ at which the Band clips as many of
    them as clip does."""
    tuned_on: str | None = None
    """A finished sweep in place of axes and variants: each of its groups (the variants without the values of the axes,
    except method and divergence) is a variant here, with the settings that were best there."""
    tuned_by: Literal["accuracy", "area"] = "accuracy"
    """The metric of the report that decides which settings were best: the mean over the seeds of that sweep. The reward
    takes the place of the accuracy if rewards are not just 0 and 1."""
    baseline: str | None = None
    """The variant with which the report compares the others."""

    @field_validator("axes")
    @classmethod
    def _check_axes(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in axes.items():
            require(key != "seed", "seeds are a separate axis: put them in `seeds`")
            require(values, f"the axis '{key}' is empty; give it values, or remove it")
            _check_unique(f"the axis '{key}'", values)
        return axes

    @model_validator(mode="after")
    def _check_seeds_and_variants(self) -> Self:
        require(self.seeds, "seeds: give at least one")
        _check_unique("seeds:", self.seeds)
        given = [name for name in ("axes", "variants", "exclude", "fork", "recorded") if getattr(self, name)]
        require(
            self.tuned_on is None or not given,
            f"{''.join(given[:1])}: the variants are those of tuned_on = {self.tuned_on}; remove one of the two",
        )
        return self


def _check_unique(what: str, values: Any) -> None:
    """Raise ValueError, which begins with `what`, if a value occurs twice. Values need not be hashable."""
    for index, value in enumerate(values):
        require(value not in values[:index], f"{what} has {value!r} twice")
