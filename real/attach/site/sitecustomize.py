"""Runs at the start of every Python process of a command that fleetbench starts; see ``real.attach``.

It waits for four of torch's modules, and imports nothing before. A ``sitecustomize`` that would have run
without this one runs after it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from os import environ, path

TYPE_CHECKING = False  # as in typing, whose import would take longer than all the rest
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_AWAITED = {
    "torch.nn.parallel.distributed",
    "torch.optim.optimizer",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
}
_HERE = path.dirname(path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib takes longer, too


class _Finder:
    """Finds each of the awaited modules once, as Python would, and gives it a ``_Loader``."""

    def __init__(self) -> None:
        self._left = set(_AWAITED)

    def find_spec(self, name: str, where: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name not in self._left:
            return None
        self._left.discard(name)
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, where, target)) is not None), None)
        if not self._left:
            sys.meta_path.remove(self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # it does what a loader does
        return spec


class _Loader:
    """Loads a module as its own loader does, and then lets ``real.attach`` change the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader``."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            from real.attach.following import follow
        except ImportError as error:
            _note("unattached", f"{sys.executable} cannot import fleetbench, which starts it: {error}")
        else:
            follow(module)


def _note(name: str, text: str) -> None:
    """Write a file for the process that has started the command."""
    try:
        with open(path.join(environ["FLEETBENCH_ATTACH"], name), "w", encoding="utf-8") as file:  # noqa: PTH118, PTH123  # as above
            file.write(text)
    except OSError:  # that process has ended, or is on another host
        pass


def _run_the_next() -> None:
    """Run the ``sitecustomize`` that Python would have run without this one."""
    others = [folder for folder in sys.path if path.abspath(folder) != _HERE]  # noqa: PTH100  # as above
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if "FLEETBENCH_ATTACH" in environ:
    _note("seen", "")
    sys.meta_path.insert(0, _Finder())
_run_the_next()
