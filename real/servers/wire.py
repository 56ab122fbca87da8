"""Wire: messages between trainers and servers: a head as JSON, then each tensor as one frame. Nothing is unpickled or evaluated.

All numbers are little-endian. ``join``, and ``told`` of a launcher, carry JSON as their tensor; those of ``stopped`` say what
ended the job, and whom that names.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


class WireError(ValueError):
    """A message that makes no sense."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around the reading of what another process wrote, and nothing else: whatever is raised there is its fault, a ``WireError``."""
    try:
        yield
    except (WireError, MemoryError):
        raise
    except Exception as error:
        raise WireError(f"{what}: {error}") from error


def read_json(text: bytes | memoryview | str) -> Any:
    """Plain data. Raises ``ValueError`` and others for what is none, and for text that cannot be written anywhere (lone surrogates)."""
    data = json.loads(text if isinstance(text, str) else bytes(text))
    json.dumps(data, ensure_ascii=False).encode()
    return data


def encode(head: Head, tensors: Sequence[Tensor] = ()) -> list[bytes | memoryview]:
    """The frames of a message. Tensors are not copied: they must stay as they are until the message has gone."""
    return [_PROTOCOL + json.dumps(dataclasses.asdict(head)).encode(), *map(_body, tensors)]


def decode(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    """The message in ``frames``, its tensors as they lie in them. Raises ``WireError`` for anything else."""
    with reading("no message of this protocol"):
        text = frames[0].bytes
        if not text.startswith(_PROTOCOL):
            raise WireError("no head of this version")
        head = Head(**read_json(text.removeprefix(_PROTOCOL)))
        counts = (head.rank, head.session, head.sequence, head.mark, head.version, head.count)
        if not (type(head.kind) is str and type(head.rate) is float and all(type(num) is int and 0 <= num < 2**64 for num in counts)):
            raise WireError("a head of other types, or with a number that is none")
    return head, [frame.buffer for frame in frames[1:]]


def numbers(body: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's numbers, in place. Raises ``WireError`` where it has another size; -1 in ``shape`` as in numpy."""
    try:
        return np.frombuffer(body, dtype=dtype).reshape(shape)
    except ValueError as error:
        raise WireError(f"a tensor of {body.nbytes} bytes is no {dtype} of shape {shape}") from error


def _body(tensor: Tensor) -> memoryview:
    """A tensor's bytes where they lie."""
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.size else memoryview(b"")
