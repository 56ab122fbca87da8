"""Name clashes: a user's package with the same name as one of ours, which hides ours."""

import importlib.util
from pathlib import Path

from fleetbench.errors import ConfigError

_OURS = ("real", "sim", "tuner")


def refuse_strangers() -> None:
    """Raise ``ConfigError`` if Python would import another package under the name of one of ours."""
    home = Path(__file__).resolve().parents[1]
    for name in _OURS:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).resolve() != home / name / "__init__.py":
            hint = f"rename it, or keep its folder off Python's path: fleetbench has a package {name}, which is hidden by it"
            raise ConfigError("is another package than fleetbench's", name, found.origin, hint)
