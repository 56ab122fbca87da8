"""Configuration as values: TOML tables become frozen dataclasses that check themselves.

``Config`` is the base of every table of the experiment file. A subclass is a frozen, keyword-only,
slotted dataclass; its fields are type-checked on construction, by whatever route, and its
``_validate`` then checks what the types cannot say. ``decode`` and ``encode`` translate between
plain TOML data and these values; unknown keys, wrong types and wrong units become ``ConfigError``
with the path of the key, the value, and the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from fleetbench import quantities as q
from fleetbench.errors import ConfigError

T = TypeVar("T")

_QUANTITIES: tuple[tuple[Any, Any, Any], ...] = (
    (q.Nanoseconds, q.parse_duration, q.format_duration),
    (q.Bytes, q.parse_size, q.format_size),
    (q.BitsPerSecond, q.parse_bandwidth, q.format_bandwidth),
    (q.PerStep, q.parse_per_step, q.format_per_step),
    (q.Steps, q.parse_steps, q.format_steps),
)


class Config:
    """Base of the configuration values; subclasses are frozen, keyword-only, slotted dataclasses."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            if isinstance(value, Mapping) and (target := _config_class(hint)) is not None:
                object.__setattr__(self, name, decode(value, target, name))
            else:
                object.__setattr__(self, name, _checked(value, hint, name))
        self._validate()

    def _validate(self) -> None:
        """Raise ``ConfigError`` for values whose types are right and whose meaning is not."""

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Rename what the file may spell differently; the default takes the table as it is."""
        return dict(data)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _config_class(hint: Any) -> type | None:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, Config)]
    return found[0] if len(found) == 1 else None


def _checked(value: Any, hint: Any, where: str) -> Any:
    """Check ``value`` against the type ``hint``; an int is taken for a float, a list for a tuple."""
    base = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(base)
    arguments = typing.get_args(base)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _checked(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"expected {_spell(hint)}", where, repr(value))
    if origin is typing.Literal:
        if value in arguments and type(value) in {type(option) for option in arguments}:
            return value
        choices = ", ".join(map(str, arguments))
        raise ConfigError("not one of the choices", where, repr(value), f"choose from: {choices}{_nearest(value, arguments)}")
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_checked(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {_checked(k, arguments[0], where): _checked(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if base is float and type(value) is int:
        return float(value)
    if base is type(None):
        if value is None:
            return value
    elif base is Any or (isinstance(base, type) and origin is None and type(value) is base):
        return value
    elif isinstance(base, type) and origin is None and base not in (bool, int, float, str) and isinstance(value, base):
        return value
    raise ConfigError(f"expected {_spell(hint)}", where, repr(value))


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "nothing"
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_spell(option) for option in options if option is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_spell(options[0])}"
    if typing.get_origin(hint) is dict or (isinstance(hint, type) and issubclass(hint, Config)):
        return "a table"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _nearest(name: Any, known: typing.Iterable[Any]) -> str:
    lower = {str(option).lower(): str(option) for option in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    return f". Did you mean {lower[close[0]]!r}?" if close else ""


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, omit_if_default=False)

    def strict(value: Any, hint: Any) -> Any:
        return _checked(value, hint, "")

    for primitive in (bool, int, float, str):
        converter.register_structure_hook(primitive, strict)
    converter.register_structure_hook_func(lambda hint: typing.get_origin(hint) is typing.Literal, strict)
    for kind, parse, spell in _QUANTITIES:
        converter.register_structure_hook_func(lambda hint, kind=kind: hint is kind, lambda value, _, parse=parse: parse(value))
        converter.register_unstructure_hook_func(lambda hint, kind=kind: hint is kind, spell)

    def config_hook(cls: type[Config]) -> Any:
        structure = cattrs.gen.make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, Mapping):
                raise ConfigError("expected a table", value=repr(value))
            return structure(cls.translate(value), cls)

        return hook

    converter.register_structure_hook_factory(lambda hint: isinstance(hint, type) and issubclass(hint, Config), config_hook)
    converter.register_structure_hook_func(_is_tagged, lambda value, hint: _tagged(converter, value, hint))
    converter.register_structure_hook_func(_is_plain_union, strict)
    converter.register_unstructure_hook_func(_is_tagged, lambda value: {"kind": value.kind, **converter.unstructure(value)})
    converter.register_structure_hook_factory(_is_optional_config, lambda hint: _optional(converter, hint))
    return converter


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()


def _is_tagged(hint: Any) -> bool:
    """A union of configs told apart by their class attribute ``kind``."""
    members = _members(hint)
    return len(members) > 1 and all(isinstance(m, type) and issubclass(m, Config) and hasattr(m, "kind") for m in members)


def _is_plain_union(hint: Any) -> bool:
    members = _members(hint)
    return bool(members) and all(m in (bool, int, float, str) for m in members)


def _is_optional_config(hint: Any) -> bool:
    members = _members(hint)
    return len(members) == 2 and type(None) in members


def _optional(converter: cattrs.Converter, hint: Any) -> Any:
    inner = next(member for member in _members(hint) if member is not type(None))
    return lambda value, _: None if value is None else converter.structure(value, inner)


def _tagged(converter: cattrs.Converter, value: Any, hint: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError("expected a table", value=repr(value))
    kinds = {member.kind: member for member in _members(hint)}
    rest = dict(value)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise ConfigError("not one of the kinds", "kind", repr(kind), f"choose from: {', '.join(kinds)}{_nearest(kind, kinds)}")
    return converter.structure(rest, kinds[kind])


@functools.cache
def _shared_converter() -> cattrs.Converter:
    return _converter()


def decode(data: Any, cls: type[T], where: str) -> T:
    """Build ``cls`` from plain TOML data; errors name the key's path below ``where``."""
    try:
        return _shared_converter().structure(data, cls)
    except ConfigError as error:
        raise _located(error, where) from None
    except (ClassValidationError, IterableValidationError) as error:
        raise _first(error, where) from None


def encode(value: Any) -> Any:
    """Turn a configuration value into plain TOML data: quantities as text, ``None`` left out."""
    return _without_none(_shared_converter().unstructure(value))


def _without_none(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _without_none(item) for key, item in data.items() if item is not None}
    if isinstance(data, (list, tuple)):
        return [_without_none(item) for item in data]
    return data


def _located(error: ConfigError, where: str) -> ConfigError:
    place = ".".join(part for part in (where, error.where) if part).replace(".[", "[")
    return type(error)(error.what, place, error.value, error.hint)


def _first(error: BaseException, where: str) -> ConfigError:
    """The first leaf of cattrs' exception group, as one error with its path."""
    if isinstance(error, ConfigError):
        return _located(error, where)
    if isinstance(error, ForbiddenExtraKeysError):
        key = sorted(error.extra_fields)[0]
        known = field_types(error.cl)
        hint = _nearest(key, known).removeprefix(". ") or f"known keys: {', '.join(known)}"
        return ConfigError("unknown key", f"{where}.{key}" if where else key, None, hint)
    if isinstance(error, ClassValidationError):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            return _first(inner, f"{where}.{note.name}" if where else note.name)
        return _first(plain[0], where)
    if isinstance(error, IterableValidationError):
        listed, plain = error.group_exceptions()
        for inner, position in listed:
            return _first(inner, f"{where}[{position.index}]")
        return _first(plain[0], where)
    if isinstance(error, KeyError):
        return ConfigError("a key is missing", where, hint=f"add {error.args[0]!r}")
    return ConfigError(str(error), where)
