"""Environment: the variables that an experiment may set for its workers, and their allowed values.

``environment.toml`` has the exact list. Users who need more set them in the shell that starts the command.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources

from fleetbench.config import nearest
from fleetbench.errors import ConfigError

RECORDED = ("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_NCCL_", "CUDA_DEVICE_", "PYTHONWARNINGS")
"""Prefixes of the variables that manifests record, whether set by the experiment or by the shell."""


@functools.cache
def _allowed() -> Mapping[str, str]:
    """Return the allowed variables, each with the pattern that its value must match."""
    text = resources.files("fleetbench").joinpath("environment.toml").read_text(encoding="utf-8")
    return {name: group["values"] for group in tomllib.loads(text)["allowed"] for name in group["names"]}


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a variable that is not on the list, or for a value that is not allowed."""
    for name, value in environment.items():
        allowed = _allowed()
        pattern = allowed.get(name)
        if pattern is None or not re.fullmatch(pattern, value, re.ASCII):
            fits = f"{' '.join(sorted(allowed))}{nearest(name, allowed)}" if pattern is None else f"values {pattern}, which name no file"
            hint = f"set it in the shell that starts the command; allowed: {fits}"
            raise ConfigError("may not be set to this by an experiment", f"environment.{name}", repr(value), hint)
