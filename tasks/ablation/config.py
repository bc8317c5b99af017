"""Configuration of an ablation: methods of stage offline_ppo or distill, each with a grid of
settings, and the seeds and prompts on which they are compared."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from tasks.config.messages import message_of
from tasks.config.shared import PositiveInt, Section, Seed

BASE: Final = "base"
TEACHER: Final = "teacher"
SEED: Final = "seed"
MethodName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Overrides = dict[str, JsonValue]
Location = tuple[str | int, ...]
C = TypeVar("C", bound=BaseModel)


class MethodConfig(Section):
    """One method: how its section differs from the chain's, and what its tuning may try."""

    overrides: Overrides = Field(
        {}, description="Values of the stage by dotted name, as with -o: importance.level: token"
    )
    grid: tuple[Overrides, ...] = Field(
        ({},), min_length=1, description="Settings to choose from, each laid over `overrides`."
    )

    @model_validator(mode="after")
    def _check_seed(self) -> Self:
        if any(SEED in overrides for overrides in (self.overrides, *self.grid)):
            raise ValueError(
                f"{SEED!r} is no override: all settings run on ablation.tuning_seeds, the best of "
                "each method on ablation.seeds"
            )
        return self

    def values(self, index: int) -> Overrides:
        """Return all overrides of one setting, counted from 0."""
        return {**self.overrides, **self.grid[index]}


class AblationConfig(Section):
    """A comparison with an equal tuning budget: each setting runs on the tuning seeds and is judged
    on validation prompts, the best one of each method runs on all seeds and is judged on test
    prompts."""

    stage: Literal["offline_ppo", "distill"] = Field(
        "offline_ppo",
        description="What the methods are methods of; students have the teacher beside them.",
    )
    methods: dict[MethodName, MethodConfig] = Field(
        min_length=1, description="By name; the others are compared with the first one."
    )
    only: tuple[str, ...] | None = Field(
        None, description="Names of the methods to compare now; null is all of them."
    )
    tuning_seeds: tuple[Seed, ...] = Field((0,), min_length=1)
    seeds: tuple[Seed, ...] = Field((1, 2, 3), min_length=1)
    tuning_prompts: PositiveInt = Field(400, description="Prompts of the validation split.")
    test_prompts: PositiveInt = Field(400, description="Prompts of the test split.")
    max_new_tokens: PositiveInt = Field(64, description="Longest answer that is judged.")

    @field_validator("seeds", "tuning_seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if twice:
            raise ValueError(f"seed {', '.join(map(str, twice))} is given twice; seeds are unique")
        return seeds

    @model_validator(mode="after")
    def _check_methods(self) -> Self:
        for name, meaning in ((BASE, "the model that all start from"), (TEACHER, "the policy")):
            if name in self.methods:
                raise ValueError(f"a method is named {name!r}, which is {meaning}")
        sizes = {name: len(method.grid) for name, method in self.methods.items()}
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"grids differ in size ({shown}); an equal tuning budget needs as many settings "
                "for every method"
            )
        return self

    @model_validator(mode="after")
    def _check_only(self) -> Self:
        unknown = [name for name in self.only or () if name not in self.methods]
        if unknown or self.only == ():
            raise ValueError(
                f"only names {', '.join(unknown) or 'nothing'}; methods: {', '.join(self.methods)}"
            )
        return self

    @property
    def compared(self) -> dict[str, MethodConfig]:
        """The methods that take part, in the order of `methods`; the first is the reference."""
        return {
            name: method
            for name, method in self.methods.items()
            if self.only is None or name in self.only
        }

    @property
    def n_settings(self) -> int:
        """Settings of each method."""
        return len(next(iter(self.methods.values())).grid)

    def resolve(self, section: C) -> dict[tuple[str, int], C]:
        """Return the config of each method and setting over the chain's own section.

        Raises:
            ValidationError: overrides that the section refuses, or two settings that are the same.
        """
        found: dict[tuple[str, int], C] = {}
        for name, method in self.methods.items():
            for index in range(len(method.grid)):
                cfg = self._setting(section, name, index)
                same = [key for key, other in found.items() if other == cfg]
                if same:
                    text = f"the same run as setting {same[0][1] + 1} of {same[0][0]!r}"
                    raise _refusal([(_place(name, "grid", index), text, method.grid[index])])
                found[name, index] = cfg
        return found

    def _setting(self, section: C, name: str, index: int) -> C:
        method = self.methods[name]
        try:
            return with_overrides(section, method.values(index))
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise _refusal(_blamed(self.stage, section, method, index, details, name)) from None


def with_overrides(section: C, overrides: Mapping[str, JsonValue]) -> C:
    """Return a section with values replaced by dotted name, validated anew.

    Raises:
        ValidationError: a name or value that the section refuses.
    """
    tree = section.model_dump()
    for name, value in overrides.items():
        below: dict[str, Any] = tree
        *path, last = name.split(".")
        for key in path:
            if not isinstance(below.get(key), dict):
                below[key] = {}
            below = below[key]
        below[last] = value
    return type(section).model_validate(tree)


def label_of(overrides: Mapping[str, JsonValue]) -> str:
    """Return overrides as one line of text."""
    parts = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in overrides.items()
    ]
    return ", ".join(parts) or "as configured"


Problem = tuple[Location, str, Any]


def _place(name: str, *rest: str | int) -> Location:
    return ("ablation", "methods", name, *rest)


def _refusal(problems: list[Problem]) -> ValidationError:
    """Return an error whose location leads to the overrides in the file."""
    lines = [
        InitErrorDetails(type=PydanticCustomError("override", _plain(text)), loc=place, input=value)
        for place, text, value in problems
    ]
    return ValidationError.from_exception_data("AblationConfig", lines)


def _plain(text: str) -> Any:
    # Braces would be read as places for values.
    return text.replace("{", "{{").replace("}", "}}")


def _blamed(
    stage: str,
    section: BaseModel,
    method: MethodConfig,
    index: int,
    details: list[ErrorDetails],
    name: str,
) -> list[Problem]:
    """Return each error at the override that caused it, or at the method as a whole."""
    problems: list[Problem] = []
    for detail in details:
        dotted = ".".join(map(str, detail["loc"]))
        text = f"{stage}.{dotted}: {message_of(detail)}"
        if detail["type"] == "extra_forbidden":
            text = f"unknown key {dotted!r} of {stage}{_suggestion(section, detail['loc'])}"
        places = [
            place
            for place in _places(method, index)
            if _covers(str(place[-1]), dotted) or _covers(dotted, str(place[-1]))
        ]
        value = None if isinstance(detail["input"], dict | BaseModel) else detail["input"]
        where = _place(name, *places[-1]) if places else _place(name)
        problems.append((where, text, {} if value is None else value))
    return problems


def _places(method: MethodConfig, index: int) -> Iterator[Location]:
    for key in method.overrides:
        yield "overrides", key
    for key in method.grid[index]:
        yield "grid", index, key


def _covers(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _suggestion(section: BaseModel, location: Location) -> str:
    """Name the closest key that the section around an unknown key has."""
    for key in location[:-1]:
        section = getattr(section, str(key), section)
    close = difflib.get_close_matches(
        str(location[-1]), type(section).model_fields, n=1, cutoff=0.5
    )
    return f" (did you mean {close[0]!r}?)" if close else ""
