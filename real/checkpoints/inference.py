"""Export of the model for serving: it loads without this package and without the model's own code."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.digests import atomic_write, writing
from fleetbench.errors import ConfigError
from real.checkpoints.meeting import Meeting
from real.engine.engine import Engine

EXPORT = "fleet.save_inference_model"
_SUFFIX = ".pt2"


def save_inference_model(engine: Engine, meeting: Meeting, path: Path, example_inputs: Sequence[Any], dynamic_shapes: Any) -> None:
    """Export the model that all trainers agree on, in evaluation mode, on the CPU.

    Every trainer calls it; rank 0 writes.

    Within a round of Local SGD it is the average of now, or Theta with an outer optimizer or fragments;
    the training itself is not disturbed. Raises ``ConfigError`` for a model that torch cannot export.
    """
    engine.progress(EXPORT)
    engine.take_over()
    meeting.meet(EXPORT)
    has_parted = any(parted for (parted,) in meeting.gather([int(engine.executor.has_parted)]))
    averages = engine.executor.averages() if has_parted else {}
    with meeting.together(EXPORT):
        if meeting.rank == 0:
            export(served_copy(engine.model, averages), tuple(example_inputs), path, dynamic_shapes)


@torch.no_grad()
def served_copy(model: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy on the CPU, in evaluation mode, with replaced parameters and without the strategy's changes."""
    try:
        served = copy.deepcopy(model).cpu().eval()
    except RuntimeError as error:  # such as a weight that torch computes from others in each forward
        hint = "make it permanent first, as torch.nn.utils.remove_weight_norm does"
        raise ConfigError("cannot be copied", EXPORT, str(error).splitlines()[0], hint) from error
    parameters = dict(served.named_parameters())
    for name, value in values.items():
        parameters[name].copy_(value)
    return served


def export(model: nn.Module, example_inputs: tuple[Any, ...], path: Path, dynamic_shapes: Any) -> None:
    """Write ``model`` by torch.export to ``path``, atomically."""
    require_name(path)
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), example_inputs)
    shapes = _batches(inputs) if dynamic_shapes is None else dynamic_shapes
    try:
        program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # any error of torch is about this model
        hint = "torch.export traces forward(): keep its control flow free of tensors' values, or pass dynamic_shapes={} for fixed shapes"
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot be exported: {said}", EXPORT, type(model).__name__, hint) from error
    program.example_inputs = None  # they would be pickled, and are the user's data
    with writing(path, RuntimeError):  # torch's writer raises it for a full disk
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=True) as partial, partial.open("wb") as file:
            torch.export.save(program, file)


def require_name(path: Path) -> None:
    """Raise ``ConfigError`` for a file name that torch does not accept."""
    if path.suffix != _SUFFIX:
        raise ConfigError("is not a name of an exported model", f"{EXPORT}(path)", str(path), f"let it end in {_SUFFIX}, as torch requires")


def _batches(inputs: tuple[Any, ...]) -> Any:
    """Let the first dimension of every input be a batch of any size, unless the model fixes it."""
    single = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == 1]
    if single:
        hint = "give two samples or more, or dynamic_shapes={} for only this shape"
        raise ConfigError("an example of one sample fixes the batch at one", f"{EXPORT}(example_inputs)", str(list(single[0].shape)), hint)
    auto = torch.export.Dim.AUTO
    return pytree.tree_map(lambda leaf: {0: auto} if isinstance(leaf, torch.Tensor) and leaf.dim() else None, inputs)
