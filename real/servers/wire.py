"""Wire: messages between trainers and servers: a head as JSON, then each tensor as one frame.

Nothing is unpickled or evaluated. Messages of one connection arrive in order, each once, until the connection breaks;
then the job ends. All numbers are little-endian. The tensor of ``join`` is JSON. Those of ``failed`` (from a trainer)
and ``stopped`` (from a server) are texts: why the job ends, and the name of the process that failed.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zmq

_PROTOCOL = b"FBPS 8 "
"""First bytes of every head: the protocol and its version."""

Tensor = np.ndarray | bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Head of a message; fields that its kind does not use are 0.

    An answer has the kind of its request, or a kind that only answers have.
    """

    kind: str
    rank: int = 0
    """Rank of the trainer that sends or receives the message."""
    version: int = 0
    """Number of updates that the server had made."""
    rate: float = 0.0
    """Learning rate of a gradient."""
    count: int = 0
    """Number of gradients in a push; the answer repeats it."""


class WireError(ValueError):
    """A message of another program, or of another version of this one."""


def encode(head: Head, tensors: Sequence[Tensor] = ()) -> list[bytes | memoryview]:
    """Return the frames of a message.

    Tensors are not copied, so they must not change until the message has been sent.
    """
    return [_PROTOCOL + json.dumps(dataclasses.asdict(head)).encode(), *map(_body, tensors)]


def decode(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    """Return the head and the tensors of a message; the tensors are views of ``frames``.

    Raises ``WireError`` for a message with another version of the protocol, or none.
    """
    text = frames[0].bytes
    if not text.startswith(_PROTOCOL):
        raise WireError("no head of this version")
    return Head(**json.loads(text.removeprefix(_PROTOCOL))), [frame.buffer for frame in frames[1:]]


def numbers(body: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor's numbers as a view of ``body``; -1 in ``shape`` as in numpy."""
    return np.frombuffer(body, dtype=dtype).reshape(shape)


def text_of(body: memoryview) -> str:
    """Return the text that a tensor contains."""
    return bytes(body).decode("utf-8", "replace")


def _body(tensor: Tensor) -> memoryview:
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")
