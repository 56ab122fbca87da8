"""Wire: messages between trainers and servers: a head as JSON, then each tensor as one frame. Nothing is unpickled or evaluated.

All numbers are little-endian. ``join``, and ``told`` of a launcher, carry JSON as their tensor; those of ``stopped`` say what
ended the job, and whom that names.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zmq

_PROTOCOL = b"FBPS 6 "
"""Begins every head: the protocol and its version."""

Tensor = np.ndarray | bytes


@dataclass(frozen=True, slots=True)
class Head:
    """What a message is; fields that a kind does not use are 0."""

    kind: str
    rank: int = 0
    """Of the trainer that it comes from or goes to."""
    session: int = 0
    """Of the trainer's connection; a process that starts again has another."""
    sequence: int = 0
    """Of the request, from 1 on, without a gap; an answer has its request's. ``welcome``: the last that was taken. 0: of none."""
    mark: int = 0
    """``welcome``: the last request that is in the shard. ``hello``: the last before the first that has not been answered here."""
    version: int = 0
    """Updates that the server had made. ``welcome`` and requests: which life of the server this is, or is for."""
    rate: float = 0.0
    """Learning rate of a gradient."""
    count: int = 0
    """Gradients that it is about; ``welcome``: 1 where the parameters are there; ``hello`` and the answer to ``join``: meetings at
    barriers so far; ``barrier``: which meeting it is for."""


def new_session() -> int:
    """A number that no other connection has."""
    return int.from_bytes(os.urandom(8), "little") | 1


class WireError(ValueError):
    """A message of another program, or of another version of this one."""


def encode(head: Head, tensors: Sequence[Tensor] = ()) -> list[bytes | memoryview]:
    """The frames of a message. Tensors are not copied: they must stay as they are until the message has gone."""
    return [_PROTOCOL + json.dumps(dataclasses.asdict(head)).encode(), *map(_body, tensors)]


def decode(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    """The message in ``frames``, its tensors as they lie in them. Raises ``WireError`` where it does not begin as those of this version."""
    text = frames[0].bytes
    if not text.startswith(_PROTOCOL):
        raise WireError("no head of this version")
    return Head(**json.loads(text.removeprefix(_PROTOCOL))), [frame.buffer for frame in frames[1:]]


def numbers(body: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's numbers, in place; -1 in ``shape`` as in numpy."""
    return np.frombuffer(body, dtype=dtype).reshape(shape)


def _body(tensor: Tensor) -> memoryview:
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")
