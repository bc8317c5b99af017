"""What pydantic finds wrong with a config, in YAML's words: its users write lists, not tuples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_LIST: Final = "Input should be a list"
_MAPPING: Final = "Input should be a mapping, such as {key: value}"
_BOOLEAN: Final = "Input should be true or false"
_TEXT: Final = "Input should be text"
_BY_TYPE: Final = {
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _MAPPING,
    "mapping_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "string_type": _TEXT,
    "none_required": "Input should be null",
}
_WORDS: Final = {"Tuple": "List", "Dictionary": "Mapping", "String": "Text", "string": "text"}
# At the start, and where a number was expected; elsewhere the word is the config's own.
_PYTHON_WORD: Final = re.compile(r"^(Tuple|Dictionary|String)\b|(?<=unable to parse )string\b")
_OWN_WORDS: Final = ("value_error", "assertion_error", "override")


def message_of(detail: ErrorDetails, default: object = None) -> str:
    """Return what is wrong with one value.

    Args:
        default: what the field holds where nobody sets it, as an example of a list.
    """
    kind, value = detail["type"], detail["input"]
    if kind in _OWN_WORDS:
        return detail["msg"].removeprefix("Value error, ")
    message = _BY_TYPE.get(kind)
    if message is None:
        return _PYTHON_WORD.sub(lambda word: _WORDS[word[0]], detail["msg"])
    if message is _LIST:
        return f"{message}, for instance {_flow(default)}" if _is_plain_list(default) else message
    if message is _TEXT and value is not None and _is_plain(value):
        return f"{message}; put it in quotes"
    return message


def problems_of(error: ValidationError, *above: str) -> str:
    """Return all that is wrong, each with its dotted name.

    Args:
        above: names of the sections around what was validated.
    """
    return "; ".join(
        f"{'.'.join(map(str, (*above, *detail['loc'])))}: {message_of(detail)}"
        for detail in error.errors(include_url=False, include_context=False)
    )


def shown(value: object) -> str:
    """Return a value as one writes it; text in quotes."""
    return repr(value) if isinstance(value, str) else _flow(value)


def kind_of(value: object) -> str:
    """Return what a value is, with its article."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping | BaseModel):
        return "a mapping"
    return "a list" if isinstance(value, Sequence) else "a single value"


def _flow(value: object) -> str:
    """Return a value in YAML, on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    try:
        text = yaml.safe_dump(plain, default_flow_style=True, width=2**31, allow_unicode=True)
    except yaml.YAMLError:
        return repr(value)
    return text.removesuffix("\n").removesuffix("\n...")


def _is_plain(value: object) -> bool:
    return not isinstance(value, Mapping | BaseModel) and kind_of(value) != "a list"


def _is_plain_list(value: object) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(map(_is_plain, value))
