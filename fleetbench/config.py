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
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self, TypeVar

import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

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

    def __init_subclass__(cls) -> None:
        """Give frozen subclasses an error that says how to change a value."""
        if "__setattr__" in cls.__dict__:  # only the slotted copy has it already; the decorator sets its own on the first
            cls.__setattr__ = _refuse_assignment  # type: ignore[assignment]  # it never returns

    def __new__(cls, *args: Any, **fields: Any) -> Self:  # noqa: ARG004  # dataclasses fill them in
        """Raise ``ConfigError`` for a field that there is not, as reading a file does."""
        known = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
        for name, value in fields.items():
            if name not in known:
                raise unknown_key(name, name, known, repr(value))
        return super().__new__(cls)

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


def _refuse_assignment(self: Config, name: str, value: object) -> NoReturn:
    known = field_types(type(self))  # type: ignore[arg-type]  # classes are hashable
    if name in known:
        raise dataclasses.FrozenInstanceError(f"{name} cannot be assigned\nHINT: make another value: .replace({name}={value!r})")
    raise dataclasses.FrozenInstanceError(f"{type(self).__name__} has no field {name!r}{nearest(name, known)}")


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _origin(hint: Any) -> Any:
    """``typing.get_origin``, whose declared type leaves out what it returns for ``list`` and such."""
    return typing.get_origin(hint)


def _config_class(hint: Any) -> type | None:
    options = typing.get_args(hint) if _origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, Config)]
    return found[0] if len(found) == 1 else None


def _checked(value: Any, hint: Any, where: str) -> Any:
    """Check ``value`` against the type ``hint``; an int is taken for a float, a list for a tuple."""
    base = getattr(hint, "__supertype__", hint)
    origin = _origin(base)
    arguments = typing.get_args(base)
    if origin in (typing.Union, types.UnionType):
        return _checked_union(value, hint, where)
    if origin is typing.Literal:
        return _checked_choice(value, arguments, where)
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_checked(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {_checked(k, arguments[0], where): _checked(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if base is float and type(value) in (int, float):
        return _finite(value, where)
    if isinstance(base, type) and origin is None:
        exact = base in (bool, int, str)  # True is an int to Python, and not to a user
        if type(value) is base or (not exact and isinstance(value, base)):
            return _countable(value, where)
    raise ConfigError(f"expected {_spell(hint)}", where, repr(value), _example(hint))


def _checked_union(value: Any, hint: Any, where: str) -> Any:
    for option in typing.get_args(hint):
        try:
            return _checked(value, option, where)
        except ConfigError:
            continue
    raise ConfigError(f"expected {_spell(hint)}", where, repr(value), _example(hint))


def _checked_choice(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    listed = ", ".join(map(str, choices))
    raise ConfigError("not one of the choices", where, repr(value), f"choose from: {listed}{nearest(value, choices)}")


def _countable(value: Any, where: str) -> Any:
    """The value, unless no counter, no array or no path could hold it."""
    if isinstance(value, int) and abs(value) > q.LARGEST:
        shown = f"a number of {value.bit_length()} bits"  # Python refuses to write out more than 4300 digits
        raise ConfigError("cannot be counted in 64 bits", where, shown, _example(int))
    if isinstance(value, str) and "\0" in value:
        raise ConfigError("holds a NUL character", where, repr(value), _example(str))
    return value


def _finite(value: float, where: str) -> float:
    if not math.isfinite(_countable(value, where)):
        raise ConfigError("expected a finite number", where, repr(value), _example(float))
    return float(value)


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "nothing"
    options = typing.get_args(hint)
    if _origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_spell(option) for option in options if option is not type(None))
    if _origin(hint) is tuple:
        return f"a list of {_spell(options[0])}"
    if _origin(hint) is dict or (isinstance(hint, type) and issubclass(hint, Config)):
        return "a table"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _example(hint: Any) -> str:
    """How a value of a type is written."""
    for quantity, parse, _ in _QUANTITIES:
        if hint is quantity:
            return f"fleetbench.quantities.{parse.__name__} reads text with a unit"
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if _origin(hint) in (typing.Union, types.UnionType):
        return "; or ".join(map(_example, options))
    if _origin(hint) is tuple:
        return "write a list: [...]"
    if _origin(hint) is dict or (isinstance(hint, type) and issubclass(hint, Config)):
        return "write a table: { key = value }"
    examples = {bool: "write true or false", int: "for example 2", float: "for example 0.5", str: 'write it in quotes: "text"'}
    return examples.get(hint, f"give a value of type {_spell(hint)}")


def nearest(name: Any, known: typing.Iterable[Any]) -> str:
    """``. Did you mean 'x'?`` with the known name closest to ``name``, or nothing."""
    lower = {str(option).lower(): str(option) for option in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    return f". Did you mean {lower[close[0]]!r}?" if close else ""


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, omit_if_default=False)

    def strict(value: Any, hint: Any) -> Any:
        return _checked(value, hint, "")

    for primitive in (bool, int, float, str):
        converter.register_structure_hook(primitive, strict)
    converter.register_structure_hook_func(lambda hint: _origin(hint) is typing.Literal, strict)
    for quantity in _QUANTITIES:
        _register_quantity(converter, *quantity)

    def config_hook(cls: type[Config]) -> Any:
        structure = cattrs.gen.make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, Mapping):
                raise ConfigError("expected a table", value=repr(value), hint=_example(cls))
            return structure(cls.translate(value), cls)

        return hook

    converter.register_structure_hook_factory(lambda hint: isinstance(hint, type) and issubclass(hint, Config), config_hook)
    converter.register_structure_hook_func(lambda hint: _origin(hint) is tuple, lambda value, hint: _listed(converter, value, hint))
    converter.register_structure_hook_func(lambda hint: _origin(hint) is dict, lambda value, hint: _mapped(converter, value, hint))
    converter.register_structure_hook_func(_is_tagged, lambda value, hint: _tagged(converter, value, hint))
    converter.register_structure_hook_func(_is_plain_union, strict)
    converter.register_unstructure_hook_func(_is_tagged, lambda value: {"kind": value.kind, **converter.unstructure(value)})
    converter.register_structure_hook_factory(_is_optional_config, lambda hint: _optional(converter, hint))
    return converter


def _register_quantity(converter: cattrs.Converter, kind: Any, parse: Any, spell: Any) -> None:
    def is_kind(hint: Any) -> bool:
        return bool(hint is kind)

    def structure(value: Any, _: Any) -> Any:
        return parse(value)

    converter.register_structure_hook_func(is_kind, structure)
    converter.register_unstructure_hook_func(is_kind, spell)


def _listed(converter: cattrs.Converter, value: Any, hint: Any) -> tuple[Any, ...]:
    item = typing.get_args(hint)[0]
    if isinstance(value, Mapping) and (_is_tagged(item) or _config_class(item) is not None):
        raise ConfigError(
            "is a list of tables, and one table is given",
            value=repr(value),
            hint="a table of a list has two brackets: [[...]]; or write a list: [{ key = value }]",
        )
    if not isinstance(value, (list, tuple)):  # text is a sequence too, of its letters
        raise ConfigError(f"expected {_spell(hint)}", value=repr(value), hint=_example(hint))
    return tuple(_below(converter, part, item, f"[{index}]") for index, part in enumerate(value))


def _mapped(converter: cattrs.Converter, value: Any, hint: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("expected a table", value=repr(value), hint=_example(hint))
    return {
        _checked(key, typing.get_args(hint)[0], ""): _below(converter, item, typing.get_args(hint)[1], key) for key, item in value.items()
    }


def _below(converter: cattrs.Converter, value: Any, hint: Any, where: str) -> Any:
    try:
        return converter.structure(value, hint)
    except (ConfigError, ClassValidationError) as error:
        raise _first(error, where) from None


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if _origin(hint) in (typing.Union, types.UnionType) else ()


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
        raise ConfigError("expected a table", value=repr(value), hint=_example(_members(hint)[0]))
    kinds = {member.kind: member for member in _members(hint)}
    rest = dict(value)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise ConfigError("not one of the kinds", "kind", repr(kind), f"choose from: {', '.join(kinds)}{nearest(kind, kinds)}")
    return converter.structure(rest, kinds[kind])


@functools.cache
def _shared_converter() -> cattrs.Converter:
    return _converter()


def decode(data: Any, cls: type[T], where: str) -> T:
    """Build ``cls`` from plain TOML data; errors name the key's path below ``where``."""
    try:
        return _shared_converter().structure(data, cls)
    except (ConfigError, ClassValidationError) as error:
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


def unknown_key(key: str, where: str, known: Iterable[str], value: str | None = None) -> ConfigError:
    """The error of a key that there is not, with the nearest that there is."""
    names = list(known)
    hint = nearest(key, names).removeprefix(". ") or f"known keys: {', '.join(names)}"
    return ConfigError("unknown key", where, value, hint)


def _first(error: BaseException, where: str) -> ConfigError:
    """One leaf of cattrs' exception group, as one error with its path: an unknown key before a missing one."""
    if isinstance(error, ConfigError):
        return _located(error, where)
    if isinstance(error, ForbiddenExtraKeysError):
        key = min(error.extra_fields)
        known = field_types(error.cl)
        return unknown_key(key, f"{where}.{key}" if where else key, known)
    if isinstance(error, ClassValidationError):
        noted, plain = error.group_exceptions()
        if plain or not noted:
            return _first(plain[0], where)
        inner, note = noted[0]
        return _first(inner, f"{where}.{note.name}" if where else note.name)
    if isinstance(error, KeyError):
        return ConfigError("this key is missing", where, hint=f"add {error.args[0]}")
    return ConfigError(str(error), where, hint="check what the file says there")
