from __future__ import annotations

import pytest

from fleetbench import errors
from fleetbench.errors import FleetbenchError

EXIT_CODES = {"GateFailed": 1, "ConfigError": 2, "EnvironmentLacks": 3, "WorkerFailed": 4, "Interrupted": 130}


def test_the_tree_is_the_documented_one() -> None:
    """Every class of the module's drawing exists, with its exit code, and no other."""
    found = {cls.__name__: cls.exit_code for cls in FleetbenchError.__subclasses__() if cls.__module__ == errors.__name__}
    assert found == EXIT_CODES
    for name, code in EXIT_CODES.items():
        line = next(line for line in (errors.__doc__ or "").splitlines() if name in line)
        assert str(code) in line.split()


@pytest.mark.parametrize("name", EXIT_CODES)
def test_an_error_is_rebuilt_from_its_args(name: str) -> None:
    """SimPy re-raises ``type(e)(*e.args)``; nothing of the message may be lost."""
    error = getattr(errors, name)("broke", "cluster.inter", "'3 furlongs'", "mend it")
    again = type(error)(*error.args)
    assert str(again) == str(error) == "cluster.inter: broke (got '3 furlongs')\nHINT: mend it"
    assert (again.what, again.where, again.value, again.hint) == (error.what, error.where, error.value, error.hint)
