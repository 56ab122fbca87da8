"""LayerOutput: what one submodule gives in a forward of its model."""

from __future__ import annotations

import difflib
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError

WHERE = "--layer"


class LayerOutput:
    """Takes a submodule's output, or the model's own. A context manager: its hook is gone behind it.

    Raises ``ConfigError`` for a name that is no submodule's.
    """

    def __init__(self, model: nn.Module, layer: str | None) -> None:
        self._model = model
        self._layer = layer
        self._found: list[Any] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        if self._layer is not None:
            names = [name for name, _ in self._model.named_modules(remove_duplicate=False) if name]
            if self._layer not in names:
                near = difflib.get_close_matches(self._layer, names, n=5, cutoff=0.3) or names[-5:]
                raise ConfigError(
                    "not a submodule of the model", WHERE, repr(self._layer), f"for example {', '.join(near) or 'none: it has none'}"
                )
            self._hook = self._model.get_submodule(self._layer).register_forward_hook(self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._found.append(output.clone() if isinstance(output, torch.Tensor) else output)  # the next layer may work in place

    @torch.inference_mode()
    def of(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """The output for a batch. Raises ``ConfigError`` for a submodule that does not run exactly once."""
        self._found.clear()
        output = self._model(*inputs)
        if self._layer is None:
            return output
        if len(self._found) != 1:
            hint = "name a layer that runs once; what is called as a function, or inside an exported program, cannot be named"
            raise ConfigError("does not run once in a forward", f"{WHERE} {self._layer}", f"{len(self._found)} times", hint)
        return self._found[0]
