"""Configuration as values: TOML tables become frozen dataclasses that check themselves.

``Config`` is the base of every table of the experiment file. A subclass is a frozen, keyword-only, slotted
dataclass. Construction always checks the types of its fields and then calls ``_validate``, which checks what
types cannot express. ``decode`` and ``encode`` translate between plain TOML data and these values. Unknown
keys, wrong types and wrong units become ``ConfigError`` with the path of the key, the value, and the nearest
known name.
"""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from fleetbench import quantities as q
from fleetbench.errors import ConfigError

T = TypeVar("T")

_QUANTITIES: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], str]]] = {
    q.Nanoseconds: (q.parse_duration, q.format_duration),
    q.Bytes: (q.parse_size, q.format_size),
    q.BitsPerSecond: (q.parse_bandwidth, q.format_bandwidth),
    q.PerStep: (q.parse_per_step, q.format_per_step),
    q.Steps: (q.parse_steps, q.format_steps),
}
"""Functions that parse and format the text of each quantity."""


class Config:
    """Base of the configuration values; subclasses are frozen, keyword-only, slotted dataclasses."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            if type(value) is hint and (hint is bool or isinstance(value, Config)):  # true for most fields; skips the slow check
                continue
            is_table = isinstance(value, Mapping) and any(_is_config(option) for option in _options(hint)) and not _kinds(hint)
            object.__setattr__(self, name, _read(value, hint, name, of_file=is_table))
        self._validate()

    def _validate(self) -> None:
        """Raise ``ConfigError`` for values that have the right types but make no sense."""

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table with keys renamed that a file may spell differently; by default, unchanged."""
        return dict(data)


def at_least(config: Config, least: float, *names: str, most: float = math.inf, above: bool = False) -> None:
    """Raise ``ConfigError`` for the first named field that is below ``least`` or above ``most``.

    ``above`` excludes ``least`` itself. None is always allowed.
    """
    for name in names:
        value, kind = getattr(config, name), field_types(type(config))[name]  # type: ignore[arg-type]  # classes are hashable
        if value is not None and not (least < value <= most or (value == least and not above)):
            low, high, shown = (_plain(number, kind) for number in (least, most, value))
            bounds = f"{'above' if above else 'at least'} {low}" + (f", at most {high}" if most < math.inf else "")
            raise ConfigError(f"must be {bounds}", name, repr(shown), f"set {name} to a value {bounds}, or drop it if it has a default")


@functools.cache
def defaults_of(cls: type) -> dict[str, Any]:
    """Return the defaults of a dataclass by field, for the fields that have one."""
    found = {field.name: field.default_factory() if callable(field.default_factory) else field.default for field in dataclasses.fields(cls)}
    return {name: default for name, default in found.items() if default is not dataclasses.MISSING}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the field names of a dataclass with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


_origin: Callable[[Any], Any] = functools.cache(typing.get_origin)  # its declared type leaves out what it returns for ``list`` and such


@functools.cache
def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union except None, or else the type itself."""
    options = typing.get_args(hint) if _origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(option for option in options if option is not type(None))


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Config)


@functools.cache
def _kinds(hint: Any) -> dict[str, type[Config]]:
    """Return the members of a union of configs by their class attribute ``kind``; empty for other types."""
    options = _options(hint)
    if len(options) < 2 or not all(_is_config(option) and hasattr(option, "kind") for option in options):
        return {}
    return {option.kind: option for option in options}


def _read(value: Any, hint: Any, where: str, *, of_file: bool) -> Any:
    """Return a value converted to the type ``hint``: an int may stand for a float, a list for a tuple.

    With ``of_file``, the value is plain TOML data, with quantities as text and configs as tables; otherwise
    it was made in Python. Raises ``ConfigError`` with the key's path below ``where``.
    """
    if isinstance(value, int) and abs(value) > q.LARGEST:
        raise ConfigError("cannot be counted in 64 bits", where, f"a number of {value.bit_length()} bits", "for example 2")
    if of_file and hint in _QUANTITIES:
        return _below(where, lambda: _QUANTITIES[hint][0](value))
    if _origin(hint) in (typing.Union, types.UnionType):
        return _read_union(value, hint, where, of_file=of_file)
    if _origin(hint) is not None:
        return _read_generic(value, hint, where, of_file=of_file)
    base = getattr(hint, "__supertype__", hint)
    if _is_config(base) and of_file and isinstance(value, Mapping):
        return _read_table(value, base, where)
    if base is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError("expected a finite number", where, repr(value), "for example 0.5, or 1e7 for ten million")
        return float(value)
    exact = of_file or base in (bool, int, str)  # Python treats True as an int; users do not
    if type(value) is base or (not exact and isinstance(value, base)):
        if base is str and "\0" in value:
            raise ConfigError("holds a NUL character", where, repr(value), "leave it out")
        return value
    raise _expected(hint, where, value)


def _read_generic(value: Any, hint: Any, where: str, *, of_file: bool) -> Any:
    """Convert a value to a ``Literal``, a tuple or a dictionary."""
    origin, arguments = _origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        listed = ", ".join(map(str, arguments))
        raise ConfigError("not one of the choices", where, repr(value), f"choose from: {listed}{nearest(value, arguments)}")
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_read(item, arguments[0], f"{where}[{index}]", of_file=of_file) for index, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        items = ((_read(key, arguments[0], where, of_file=of_file), item) for key, item in value.items())
        return {key: _read(item, arguments[1], _path(where, key), of_file=of_file) for key, item in items}
    raise _expected(hint, where, value)


def _expected(hint: Any, where: str, value: Any) -> ConfigError:
    """Return the error for a value that is not of the type ``hint``."""
    example = 'write 1e7 for ten million; text and quantities stand in quotes: "20 us"; lists are [...], tables { key = value }'
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list", dict: "a table"}
    said = [kinds.get(_origin(option) or option) or ("a table" if _is_config(option) else str(option)) for option in _options(hint)]
    return ConfigError(f"expected {' or '.join(said)}", where, repr(value), example)


def _read_union(value: Any, hint: Any, where: str, *, of_file: bool) -> Any:
    options = _options(hint)
    if isinstance(value, Config) and type(value) in options:  # it was checked when it was made
        return value
    if value is None and len(options) < len(typing.get_args(hint)):
        return None
    kinds = _kinds(hint)
    if of_file and kinds:
        if not isinstance(value, Mapping):
            raise _expected(options[0], where, value)
        kind = value.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            choices = f"choose from: {', '.join(kinds)}{nearest(kind, kinds)}"
            raise ConfigError("not one of the kinds", _path(where, "kind"), repr(kind), choices)
        return _read_table({key: item for key, item in value.items() if key != "kind"}, kinds[kind], where)
    if len(options) == 1:
        return _read(value, options[0], where, of_file=of_file)
    for option in options:
        try:
            return _read(value, option, where, of_file=of_file)
        except ConfigError:
            continue
    raise _expected(hint, where, value)


def _read_table(value: Mapping[str, Any], cls: type[Config], where: str) -> Config:
    """Return a config made from a table. Unknown keys are reported first, then wrong values, then missing keys."""
    data = _below(where, lambda: cls.translate(value))
    known = field_types(cls)  # type: ignore[arg-type]  # classes are hashable
    unknown = set(data) - set(known)
    if unknown:
        raise unknown_key(min(unknown), _path(where, min(unknown)), known)
    read = {name: _read(data[name], hint, _path(where, name), of_file=True) for name, hint in known.items() if name in data}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
        if field.name not in data and field.default is field.default_factory:  # both are MISSING: the field has no default
            raise ConfigError("this key is missing", _path(where, field.name), hint=f"add {field.name}")
    return _below(where, lambda: cls(**read))


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _below(where: str, make: Callable[[], T]) -> T:
    """Return ``make()``, and turn its errors into a ``ConfigError`` whose location begins with ``where``."""
    try:
        return make()
    except ConfigError as error:
        place = ".".join(part for part in (where, error.where) if part).replace(".[", "[")
        raise type(error)(error.what, place, error.value, error.hint) from None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(str(error), where, hint="check what the file says there") from None


def nearest(name: Any, known: typing.Iterable[Any]) -> str:
    """Return ``. Did you mean 'x'?`` for the known name closest to ``name``; an empty string if none is close."""
    lower = {str(option).lower(): str(option) for option in known}
    close = difflib.get_close_matches(repr(name).strip("'").lower(), lower, n=1, cutoff=0.6)
    return f". Did you mean {lower[close[0]]!r}?" if close else ""


def decode(data: Any, cls: type[T], where: str) -> T:
    """Build ``cls`` from plain TOML data; errors name the key's path below ``where``."""
    return cast("T", _read(data, cls, where, of_file=True))


def encode(value: Any) -> Any:
    """Convert a configuration value to plain TOML data: quantities as text, ``None`` left out."""
    return _plain(value, type(value))


def _plain(value: Any, hint: Any) -> Any:
    options = _options(hint)
    if value is not None and options[0] in _QUANTITIES:
        return _QUANTITIES[options[0]][1](value)
    if isinstance(value, Config):
        fields = field_types(type(value)).items()  # type: ignore[arg-type]  # classes are hashable
        table = {name: _plain(found, kind) for name, kind in fields if (found := getattr(value, name)) is not None}
        return {"kind": value.kind, **table} if _kinds(hint) else table  # type: ignore[attr-defined]  # each class in ``_kinds`` has it
    if isinstance(value, Mapping):
        return {key: _plain(item, type(item)) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        kind = typing.get_args(hint)[0] if _origin(hint) is tuple else None
        return [_plain(item, kind or type(item)) for item in value]
    return value


def unknown_key(key: str, where: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, with the nearest known one."""
    names = list(known)
    hint = nearest(key, names).removeprefix(". ") or f"known keys: {', '.join(names)}"
    return ConfigError("unknown key", where, hint=hint)


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested tables as dotted names with their values, in order."""
    rows: list[tuple[str, Any]] = []
    for key, value in data.items():
        rows += flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return rows
