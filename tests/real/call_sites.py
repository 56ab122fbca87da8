"""Which line of the program called, as opposed to torch or the fake streams themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_OWN = {str(Path(__file__).with_name(name)) for name in ("call_sites.py", "deferred.py", "fake_memory.py", "fake_streams.py")}
_TORCH = str(Path(torch.__file__).parent)


def call_site(depth: int = 1) -> str:
    """The nearest callers outside torch and this kit."""
    frame = sys._getframe(1)
    sites: list[str] = []
    while frame is not None and len(sites) < depth:
        name = frame.f_code.co_filename
        if name not in _OWN and not name.startswith((_TORCH, "<")) and not name.endswith(("contextlib.py", "weakref.py")):
            sites.append(f"{Path(name).name}:{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return " < ".join(sites)


def is_optimizers_own() -> bool:
    """Whether torch's optimizers read a step count, which they keep in the host's memory."""
    frame = sys._getframe(1)
    plumbing = tuple(f"{_TORCH}/{name}" for name in ("_compile.py", "_dynamo/", "_tensor.py", "utils/", "_ops.py"))
    while frame.f_back is not None and (frame.f_code.co_filename in _OWN or frame.f_code.co_filename.startswith(plumbing)):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(f"{_TORCH}/optim/")
