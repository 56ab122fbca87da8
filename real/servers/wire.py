"""Wire: messages between trainers and servers: a head as JSON, then each tensor as one frame. Nothing is unpickled or evaluated.

Messages of one connection arrive in order, each once, until the connection breaks; then the job ends. All numbers are
little-endian. ``join`` carries JSON as its tensor; ``stopped``, and ``failed`` of a launcher, carry why the job ends and
because of which process.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zmq

_PROTOCOL = b"FBPS 8 "
"""Begins every head: the protocol and its version."""

Tensor = np.ndarray | bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Header of a message; fields that a kind does not use are 0. An answer has its request's kind, or one of its own."""

    kind: str
    rank: int = 0
    """Rank of the trainer that sends or receives the message."""
    version: int = 0
    """Updates that the server had made."""
    rate: float = 0.0
    """Learning rate of a gradient."""
    count: int = 0
    """Number of gradients in a push, or in what its answer acknowledges."""


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


def text_of(body: memoryview) -> str:
    """A tensor that is text."""
    return bytes(body).decode("utf-8", "replace")


def _body(tensor: Tensor) -> memoryview:
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")
