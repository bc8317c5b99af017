"""Partial parameters: what a run from the UI or an API call leaves out comes from a config file.

Prefect merges parameters at the top level only: a ``cfg`` of one field replaces the deployment's
whole ``cfg``. So the fields that are not given are filled in here, from the ``preset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from flows.options import RunOptions
from tasks.config import PipelineConfig, Section, TrackingConfig
from tasks.config_words import problems_of
from tasks.errors import ConfigError
from tasks.loading_config import find_config, load_config

C = TypeVar("C", bound=Section)


def _keep(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, Mapping) else validate(value)


# Annotates a flow's `cfg`: a mapping stays as it was given until it is completed, because checks
# between fields would judge it by defaults that the preset replaces.
AS_GIVEN = WrapValidator(_keep)


def completed(model: type[C], cfg: C, preset: str | None) -> C:
    """Return a valid config of a stage, or of the chain.

    Args:
        model: its class.
        cfg: a config, or a mapping of the fields that were given.
        preset: a config file, by path or packaged name, whose section has the other fields; None
            for the defaults. A config keeps the fields that it was made with.

    Raises:
        MissingInputError: no such file.
        ConfigError: the file, or the whole, is not valid.
    """
    if isinstance(cfg, Mapping):
        given: Mapping[str, Any] = cfg
    elif preset is None:
        return cfg
    else:
        given = cfg.model_dump(exclude_unset=True)
    start = model() if preset is None else _section(load_config(find_config(preset)), model)
    try:
        return model.model_validate(lay_over(start, given))
    except ValidationError as error:
        raise ConfigError(problems_of(error, "cfg"), "", "correct the parameter cfg") from None


def completed_options(options: RunOptions, preset: str | None) -> RunOptions:
    """Return how a stage is run, recorded where the preset says unless told otherwise."""
    if preset is None or "tracking" in options.model_fields_set:
        return options
    return options.model_copy(update={"tracking": tracking_of(preset)})


def tracking_of(preset: str) -> TrackingConfig:
    """Return where runs with this preset are recorded."""
    return load_config(find_config(preset)).tracking


def _section(whole: PipelineConfig, model: type[C]) -> C:
    found = (whole, *(getattr(whole, name) for name in PipelineConfig.model_fields))
    return next(section for section in found if type(section) is model)


def lay_over(section: BaseModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's fields with the given ones on top, at every depth.

    Where the section has values instead of a section, as in a table of weights, the given ones
    replace them all.
    """
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    for name, value in given.items():
        below = fields.get(name)
        if isinstance(below, BaseModel) and isinstance(value, Mapping):
            value = lay_over(below, value)
        fields[name] = value
    return fields
