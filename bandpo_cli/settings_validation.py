"""Validation of settings: base classes of sections, unknown keys ("did you mean"), sections chosen by a tag."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError

from bandpo_cli.custom_code import is_function_path
from bandpo_cli.errors import ConfigError, nearest, redact_credentials, unknown_choice

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NotEmpty = Annotated[str, Field(min_length=1)]
AsList = BeforeValidator(lambda value: [value] if isinstance(value, (str, dict)) else value)
"""A single item need not be in a list."""

_MAX_NAMES = 7  # methods, tasks or further unknown keys that an error lists


class Section(BaseModel):
    """Frozen settings: unknown keys are an error, and the attributes' docstrings are their descriptions."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    def __init__(self, /, *unnamed: Any, **values: Any) -> None:
        """Raise ConfigError, with the messages of the command line, if a value is not valid."""
        if unnamed:
            name = type(self).__name__
            raise ConfigError(
                f"{name}: give values by name, {name}(key=value), or a dictionary to layers.resolve"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe_error(error)[0]) from None

    # Validation of a section within another one does not call __init__.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name} = {value!r}: settings are frozen; bandpo_cli.config.layers.with_values changes a copy"
        )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        return values if isinstance(values, Section) else check_keys(cls, values)


class TaggedSection(Section):
    """Base class of settings whose class is chosen by the value of one key, from a table that may grow at run time.

    A direct subclass is the type of the field in `RunConfig`; its subclasses are the entries of the table.
    """

    tag: ClassVar[str]  # the name of the key
    default: ClassVar[str]  # its value in a section without it
    custom: ClassVar[str] = ""  # the key in `classes` for all values of the form `module:name`; "" for none

    @classmethod
    def classes(cls) -> Mapping[str, type[Self]]:
        """Return the class for each value of the tag."""
        raise NotImplementedError

    @classmethod
    def kind_of(cls, section: Mapping[str, Any]) -> Any:
        """Return the tag of a section as the user wrote it, whatever it is."""
        return section.get(cls.tag, cls.default)

    @model_validator(mode="wrap")
    @classmethod
    def _choose_class(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if TaggedSection not in cls.__bases__ or not isinstance(values, dict):
            return handler(values)
        kind, classes = cls.kind_of(values), cls.classes()
        key = cls.custom if isinstance(kind, str) and is_function_path(kind) else kind
        if not isinstance(key, str) or key not in classes:
            if isinstance(key, str) and cls.kind_of({cls.tag: key.lower()}) in classes:
                raise key_error(cls.tag, f" = {kind!r}: names are in lower case; type {key.lower()}")
            if cls.custom and is_function_path(path := re.sub(r".*?(\w+)\.py:", r"\1:", str(key))):
                raise key_error(cls.tag, f" = {kind!r}: write the module without .py and its folder: {path}")
            raise key_error(cls.tag, f" = {kind!r}: {unknown_choice(kind, classes)}")
        default = "" if cls.tag in values else ", the default"
        check_keys(classes[key], values, f" of '{kind}'{default}", classes, cls.tag)
        return classes[key].model_validate({**values, cls.tag: kind})


def require(holds: object, problem: str) -> None:
    """Raise ValueError, which pydantic reports with the key of the section or field, unless `holds` is true."""
    if not holds:
        raise ValueError(problem)


def _check_count_or_auto(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(value == "auto" or is_count, "a whole number above 0 is expected, or auto")
    return value


CountOrAuto = Annotated[Literal["auto"] | Annotated[int, Field(gt=0)], BeforeValidator(_check_count_or_auto)]
"""A whole number above 0 or `auto`, with one error for both."""


def key_error(key: object, problem: str) -> PydanticCustomError:
    """Return an error about a key of the section that is validated; `problem` continues the path of the key."""
    return PydanticCustomError("key", "{key}{problem}", {"key": str(key), "problem": problem})


def check_keys(
    cls: type[BaseModel], values: Any, of: str = "", peers: Mapping[str, type[Section]] = {}, tag: str = ""
) -> Any:
    """Return `values` if they are a mapping of settings of `cls`; by `tag`, one of `peers` may take its place."""
    known = cls.model_fields
    if not isinstance(values, dict):
        raise PydanticCustomError(
            "section", "a section is expected here, with keys below it: {known}", {"known": ", ".join(known)}
        )
    unknown = [key for key in values if key not in known]
    for key in unknown:
        having = [peer for peer, settings in peers.items() if key in settings.model_fields]
        name, value = str(key), values[key]
        while isinstance(value, dict) and value and not any(meaning_of(name)):
            inner, value = next(iter(value.items()))
            name += f".{inner}"
        is_setting = issubclass(cls, Section) and not having
        meant, option = meaning_of(name) if is_setting else (None, None)
        near = f" (did you mean '{meant}'?)" if meant else nearest(str(key), known)
        near = f" (use {option})" if option else near
        near = "; indent it below its section" if meant == key else near
        elsewhere = f"; a setting of {_first_names(having)}: add {tag}: {having[0]}" if having else ""
        if key == "grader" and "rewards" in known:  # that of a generated task is fixed; others can be added
            grader = trainer_keys("rewards").get(str(values[key]), values[key])
            elsewhere += (
                f", or add a reward to its own: --set 'task.rewards=[{{}}, {{grader: \"{grader}\"}}]'"
            )
        raise key_error(
            name if meant or option else key,
            f": no such setting{of}{near}; known: {', '.join(known) or 'none'}{elsewhere}"
            + (f"; also unknown: {_first_names(unknown[1:])}" if len(unknown) > 1 else ""),
        )
    return values


def _first_names(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(map(str, names[:_MAX_NAMES]))}{more}"


def describe_error(error: ValidationError, within: Sequence[str] = ()) -> tuple[str, list[int | str]]:
    """Return the first error as `key = value: what is wrong and what is allowed`, and the parts of its key.

    The text ends with the keys of further errors. `within` are the keys of the section that was validated, if it was
    not a complete configuration.
    """
    first, *others = error.errors(include_url=False)
    context = first.get("ctx", {})
    loc = [part for part in first["loc"] if not str(part).startswith("@")]  # without the tags of unions
    parts = [*within, *loc, *filter(None, str(context.get("key", "")).split("."))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    message = message.removesuffix(", unable to parse string as an integer")
    message = message.replace("Input should be a valid integer", "Expected an integer")
    if first["type"] == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        message = unknown_choice(first["input"], allowed)
    if first["type"] in ("list_type", "tuple_type"):
        message = f"a list is expected here, such as {path}=[{first['input']}]"
    if first["type"] == "dict_type":
        message = f"keys with values are expected here, such as {path}.KEY=VALUE"
    if "problem" in context:
        message = f"{path}{context['problem']}"
    elif first["type"] == "missing":
        message = f"{path}: no value is given; add --set {path}=VALUE, or the key in a file"
    elif path:
        # A secret in the address of MLflow is not printed.
        value = redact_credentials(repr(first["input"]))
        value = value if len(value) <= 80 else f"{value[:77]}..."
        message = f"{path} = {value}: {message[0].lower()}{message[1:]}"
    if others:
        keys = (str(other.get("ctx", {}).get("key") or ".".join(map(str, other["loc"]))) for other in others)
        message += f"; then also {', '.join(dict.fromkeys(keys))}"
    return message, parts


@functools.cache
def trainer_keys(part: str) -> dict[str, Any]:
    """Return a part of the table of the settings of TRL and verl: `trl`, `verl`, their losses, and other names.

    A key without `to` has the setting whose rule for exports to verl names it.
    """
    import yaml

    folder = Path(__file__).parent / "exports"
    rows: dict[str, Any] = yaml.safe_load((folder / "from_trainers.yaml").read_text("utf-8"))[part]
    rows |= {name: {} for name in str(rows.pop("no_effect", "")).split()}
    if part == "verl":
        *_, rules = yaml.safe_load_all((folder / "verl_settings.yaml").read_text("utf-8"))
        direct = {rule["to"]: setting for setting, rule in rules.items() if "to" in rule}
        rows = {
            key: {"to": direct[key], **row} if key in direct and "note" not in row else row
            for key, row in rows.items()
        }
    return rows


@functools.cache
def _names_elsewhere() -> dict[str, dict[str, Any]]:
    """Return the rows of TRL's and verl's keys, also by the end of a key of verl, and of further names."""
    rows: dict[str, dict[str, Any]] = {}
    for key, row in trainer_keys("verl").items():
        *_, section, last = ("", *key.split("."))
        rows |= dict.fromkeys([key, f"{section}.{last}", *([last] if "_" in last else [])], row)
    rows |= trainer_keys("trl")
    rows |= {name: {"option": text} for name, text in trainer_keys("other_options").items()}
    for setting, names in trainer_keys("other_names").items():
        rows |= {name: {"to": setting} for name in names.split()}
    return rows


def meaning_of(name: str) -> tuple[str | None, str | None]:
    """Return the setting that a flag or key of another trainer stands for, or what to type for one that is no setting.

    `--learning-rate`, `learning_rate` and `actor.learning_rate` are the same name.
    """
    word, rows = name.lstrip("-+~").replace("-", "_").lower(), _names_elsewhere()
    row = rows.get(word.rpartition(".")[2], {}) | rows.get(word, {})
    return row.get("to"), row.get("option")
