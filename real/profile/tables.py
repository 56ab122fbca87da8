"""Layer tables from what ranks measured: medians with their spread, in the backward order of gradient readiness."""

import dataclasses
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.measurements import Memory
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Bytes, Nanoseconds

Floats = npt.NDArray[np.float64]


def table_of(key: str, parts: list[dict[str, Any]]) -> LayerTable:
    """One table from all ranks' steps, with the layers' backward from when gradients are final; ``parts`` are ``Measured``."""
    first = parts[0]
    times = first["layers"]
    forward = np.concatenate([np.asarray(part["layers"]["forward"], dtype=float) for part in parts])
    backward, update, read = (round(_median(parts, name)) for name in ("backward", "update", "read"))
    steps = _ready_steps(parts)
    names = [name for name, _, _ in times["gradients"]]
    ready = {name: min(round(time), backward) for name, time in zip(names, np.median(steps, axis=0), strict=True)}
    touched = {name: round(median(count for part in parts for count in part["touched"].get(name, ()))) for name in first["touched"]}
    of_layer = {name: [index for index, gradient in enumerate(names) if gradient.rpartition(".")[0] == name] for name in times["layers"]}
    ends = {name: max((ready[names[index]] for index in members), default=0) for name, members in of_layer.items()}
    layers: list[Layer] = []
    before, before_steps = 0, np.zeros(len(steps))
    for index, name in sorted(enumerate(times["layers"]), key=lambda item: ends[item[1]]):
        end_steps = steps[:, of_layer[name]].max(axis=1, initial=0.0)
        layers.append(
            Layer(
                name=name,
                gradients=tuple(
                    Gradient(
                        name=gradient,
                        numel=numel,
                        dtype=dtype,
                        sparse=gradient in touched,
                        touched=touched.get(gradient, 0),
                        ready=Nanoseconds(ready[gradient]),
                    )
                    for gradient, numel, dtype in times["gradients"]
                    if gradient.rpartition(".")[0] == name
                ),
                forward=Nanoseconds(round(float(np.median(forward[:, index])))),
                backward=Nanoseconds(ends[name] - before),
                activation_bytes=Bytes(first["activation_bytes"].get(name, 0)),
                forward_mad=_mad(forward[:, index]),
                backward_mad=_mad(end_steps - before_steps),
            )
        )
        before, before_steps = ends[name], end_steps
    layers[-1] = dataclasses.replace(layers[-1], backward=Nanoseconds(layers[-1].backward + backward - before))
    return LayerTable(
        key=key,
        layers=tuple(reversed(layers)),
        update=Nanoseconds(update),
        read=Nanoseconds(read),
        load=Nanoseconds(round(_median(parts, "load")) if first["loaders"] else 0),
        loaders=first["loaders"],
        buffers_nbytes=Bytes(first["buffers_nbytes"]),
    )


def memory_of(parts: list[dict[str, Any]]) -> Memory:
    """The most that any rank needs."""
    return Memory(**{field.name: Bytes(max(part["memory"][field.name] for part in parts)) for field in dataclasses.fields(Memory)})


def _median(parts: list[dict[str, Any]], name: str) -> float:
    return float(median(value for part in parts for value in part[name]))


def _mad(values: Floats) -> Nanoseconds:
    return Nanoseconds(round(float(np.median(np.abs(values - np.median(values))))))


def _ready_steps(parts: list[dict[str, Any]]) -> Floats:
    """When each gradient was final, by step and gradient; at the step's backward's end where it did not come, or came later."""
    return np.array(
        [
            [end if time is None else min(time, end) for time in step]
            for part in parts
            for step, end in zip(part["layers"]["ready"], part["backward"], strict=True)
        ],
        dtype=float,
    )
