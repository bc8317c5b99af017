"""YAML files and ``-o section.key=value`` overrides become one validated `PipelineConfig`."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tasks.config.messages import kind_of, message_of, shown
from tasks.config.shared import STAGES, Stage
from tasks.errors import ConfigError, MissingInputError
from tasks.pipeline_config import PipelineConfig

# The parser checks no values: a date that is none, and a tag with the wrong value, end in others.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
SHARED_KEYS = ("seed", "runtime", "rendering")
EXTENDS = "extends"
PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGED_CONFIGS = PROJECT_ROOT / "configs"
OWN_CODE = ("reward.function_path", "sampler.path")
_MAX_PROBLEMS = 8
_SHOWN_CHARS = 80
_MERGE_TAG = "tag:yaml.org,2002:merge"
_UNION_MEMBER = re.compile(r"(int|float|str|bool)$|(literal|tuple|function-\w+)\[|[A-Z]\w*Config$")

Tree = dict[str, Any]
Location = tuple[str | int, ...]
Places = dict[Location, str]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuse a key given twice: YAML would silently keep the last one."""


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == _MERGE_TAG:  # `<<: *other`, whose keys the own ones replace
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"line {line}: the key {key!r} is not text", "", "put it in quotes")
        if key in seen:
            raise ConfigError(
                f"line {line}: the key {key!r} is already given in line {seen[key]}",
                "every key once",
                "remove one of the two",
            )
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def find_config(name: str) -> Path:
    """Return the file of a config: a path, or the name of a packaged one such as ``demo``.

    Raises:
        MissingInputError: neither a file nor a packaged config.
    """
    path = Path(name).expanduser()
    packaged = PACKAGED_CONFIGS / f"{path.stem}.yaml"
    if path.is_file():
        return path
    if path.parent == Path(".") and packaged.is_file():
        return packaged
    known = sorted(file.stem for file in PACKAGED_CONFIGS.glob("*.yaml"))
    raise MissingInputError(
        f"No config file {name}", "a YAML file", f"give its path, or one of {', '.join(known)}"
    )


def load_config(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a YAML file, apply overrides, hand the shared sections to the stages, validate.

    Args:
        path: YAML file; an empty one gives the defaults. With ``extends`` it is laid over another
            one, key by key.
        overrides: ``section.key=value`` with a YAML value; later ones win.

    Raises:
        MissingInputError: no such file.
        ConfigError: not YAML, an unknown key, a wrong type, values that contradict each other, or
            files that extend each other in a circle.
    """
    tree, places = _read_extended(path)
    overridden = [_apply_override(tree, override) for override in overrides]
    complete = distribute_shared(tree)
    try:
        return PipelineConfig.model_validate(complete)
    except ValidationError as error:
        raise _config_error(error, _Origin(path, places, overridden)) from None


def distribute_shared(tree: Tree) -> Tree:
    """Return the tree with the shared keys as defaults of each stage that has such a field."""
    complete = {key: value for key, value in tree.items() if key not in SHARED_KEYS}
    for stage in STAGES:
        section = complete.get(stage, {})
        if section is None:
            section = {}
        if not isinstance(section, Mapping):
            continue
        fields = _stage_model(stage).model_fields
        shared = {key: tree[key] for key in SHARED_KEYS if key in tree and key in fields}
        complete[stage] = merge(shared, section)
    return complete


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return ``base`` with ``over`` laid on top, key by key at every depth."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def _stage_model(stage: Stage) -> type[BaseModel]:
    model = PipelineConfig.model_fields[stage].annotation
    assert isinstance(model, type) and issubclass(model, BaseModel)
    return model


def _read_extended(path: Path, above: tuple[Path, ...] = ()) -> tuple[Tree, Places]:
    """Read a file and what it extends.

    Args:
        above: the files that led here, the first one first.
    """
    chain = (*above, path.resolve())
    if path.resolve() in above:
        circle = " -> ".join(str(file) for file in chain)
        raise ConfigError(
            f"{path} extends itself: {circle}", "an end", f"remove one of the `{EXTENDS}`"
        )
    tree, lines = _read_yaml(path)
    tree = _with_found_code(tree, path.parent)
    places = {location: f"{path}, line {line}" for location, line in lines.items()}
    if EXTENDS not in tree:
        return tree, places
    where = places.pop((EXTENDS,))
    below, below_places = _read_extended(_extended_file(tree.pop(EXTENDS), path, where), chain)
    return merge(below, tree), below_places | places


def _extended_file(name: object, path: Path, where: str) -> Path:
    """Return the file that ``extends`` names: beside the file that says so, else a packaged one."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(
            f"{where}: {EXTENDS} is {name!r}",
            "the path or name of one config",
            f"write `{EXTENDS}: demo`",
        )
    beside = path.parent / Path(name).expanduser()
    if beside.is_file():
        return beside
    try:
        return find_config(name)
    except MissingInputError as error:
        raise MissingInputError(f"{where}: {error.found}", error.expected, error.fix) from None


def _with_found_code(tree: Tree, directory: Path) -> Tree:
    """Return the tree with the user's Python files that the file names where they are.

    Both those of ``offline_ppo`` and those of an ablation's overrides count.

    Args:
        directory: of the file.
    """

    def walk(node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return {key: walk(value, f"{name}.{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value, name) for value in node]
        is_path = isinstance(node, str) and any(f".{name}".endswith(f".{own}") for own in OWN_CODE)
        return _found_file(node, directory) if is_path else node

    return {
        key: walk(value, key) if key in ("offline_ppo", "ablation") else value
        for key, value in tree.items()
    }


def _found_file(name: str, directory: Path) -> str:
    """Return a relative path that leads nowhere from here as one from the config file's directory
    or from the project's root, where there is such a file."""
    path = Path(name).expanduser()
    if not path.is_absolute() and not path.is_file():
        for root in (directory, PROJECT_ROOT):
            if (root / path).is_file():
                return str((root / path).resolve())
    return name


def _read_yaml(path: Path) -> tuple[Tree, dict[Location, int]]:
    if not path.is_file():
        raise MissingInputError(f"No config file {path}", "a YAML file", "correct the path")
    try:
        text = path.read_text(encoding="utf-8")
        loaded = yaml.load(text, _UniqueKeyLoader)
        lines = dict(_key_lines(yaml.compose(text, yaml.SafeLoader)))
    except ConfigError as error:
        raise ConfigError(f"{path}, {error.found}", error.expected, error.fix) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", "a YAML file", "save it as UTF-8") from error
    except NOT_YAML as error:
        raise ConfigError(
            f"{path} is not YAML: {_one_line(error)}", "valid YAML", "correct that line"
        ) from error
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path} holds {kind_of(loaded)}", "sections such as `sft:`", "see configs/"
        )
    return loaded, lines


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


def _key_lines(node: yaml.Node | None, at: Location = ()) -> Iterable[tuple[Location, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            here = (*at, str(key_node.value))
            yield here, key_node.start_mark.line + 1
            yield from _key_lines(value_node, here)


def _apply_override(tree: Tree, override: str) -> Location:
    name, separator, text = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not separator or not all(keys):
        raise ConfigError(
            f"Override {override!r} cannot be read", "section.key=value", "write -o sft.epochs=2"
        )
    if keys[0] == EXTENDS:
        raise ConfigError(
            f"-o {EXTENDS}: a file is extended before values are overridden", "", "name that file"
        )
    try:
        value = yaml.load(text, _UniqueKeyLoader)
    except (*NOT_YAML, ConfigError) as error:
        raise ConfigError(
            f"The value of override {override!r} is not YAML", "a number, text or list", "quote it"
        ) from error
    below = tree
    for key in keys[:-1]:
        if not isinstance(below.get(key), dict):
            below[key] = {}
        below = below[key]
    below[keys[-1]] = value
    return keys


class _Origin:
    """Says where a value came from, for messages."""

    def __init__(self, path: Path, places: Places, overridden: list[Location]) -> None:
        self.path = path
        self.places = places
        self.overridden = overridden

    def find(self, location: Location) -> tuple[str, str]:
        """Return the place and the name that the user gave for a location in the complete tree."""
        names = [location]
        if len(location) > 1 and location[0] in STAGES and location[1] in SHARED_KEYS:
            names.append(location[1:])
        for cut in range(max(map(len, names))):
            for name in names:
                place = self._place(name[: len(name) - cut])
                if place is not None and len(name) > cut:
                    return place, ".".join(map(str, name))
        return str(self.path), ".".join(map(str, location))

    def _place(self, head: Location) -> str | None:
        for override in self.overridden:
            # A check over a whole section complains about the section, not about the key in it.
            if override[: len(head)] == head:
                return f"-o {'.'.join(map(str, override))}"
        return self.places.get(head)


def _config_error(error: ValidationError, origin: _Origin) -> ConfigError:
    details = error.errors(include_url=False)
    # A shared key that is wrong shows up once in every stage; one message is enough.
    problems = list(dict.fromkeys(_problem(detail, origin) for detail in details))
    left_out = len(problems) - _MAX_PROBLEMS
    if left_out > 0:
        problems = [*problems[:_MAX_PROBLEMS], f"and {left_out} more"]
    return ConfigError("; ".join(problems), "", "correct the configuration and run again")


def _problem(detail: ErrorDetails, origin: _Origin) -> str:
    # pydantic adds the member of a union that it tried, which is no key of the file.
    location = tuple(part for part in detail["loc"] if not _UNION_MEMBER.match(str(part)))
    where, name = origin.find(location)
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key {name!r}{_suggestion(location)}"
    message = message_of(detail, _default_at(location))
    value = detail["input"]
    got = "" if isinstance(value, dict | BaseModel) else f", got {_short(value)}"
    return f"{where}: {name or 'the config'}: {message}{got}"


def _default_at(location: Location) -> object:
    """Return what a key of a config holds by default; None where that is nothing."""
    at: Any = PipelineConfig()
    for key in location:
        at = getattr(at, key, None) if isinstance(key, str) else None
    return at


def _short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _suggestion(location: Location) -> str:
    known = known_keys(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})"


def known_keys(location: Location) -> list[str]:
    """Return the keys that a section knows; an empty location is the whole file."""
    at: Any = PipelineConfig
    for key in location:
        at = _below(at, str(key))
    names = next((list(model.model_fields) for model in _models(at)), [])
    return [*names, *SHARED_KEYS, EXTENDS] if at is PipelineConfig else names


def _below(annotation: Any, key: str) -> Any:
    """Return the type of what a key of a section, or of a dictionary of sections, holds."""
    for model in _models(annotation):
        if key in model.model_fields:
            return model.model_fields[key].annotation
    for member in _members(annotation):
        if typing.get_origin(member) in (dict, tuple, list):
            inner = [part for part in typing.get_args(member) if part is not Ellipsis]
            return inner[-1]
    return None


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def parse_stage(name: str) -> Stage:
    """Return a stage by name; hyphens count as underscores.

    Raises:
        ConfigError: no such stage; the closest one is named.
    """
    wanted = name.strip().lower().replace("-", "_")
    for stage in STAGES:
        if stage == wanted:
            return stage
    close = difflib.get_close_matches(wanted, STAGES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else "choose one of them"
    raise ConfigError(f"Unknown stage {name!r}", ", ".join(STAGES), hint)
