"""Wire: messages between trainers and servers. A fixed head, then tensors as raw frames; nothing is unpickled or evaluated.

A message is a head frame and any number of body frames. The head says how many bytes each tensor has; a
tensor longer than ``CHUNK_BYTES`` comes in several frames, so that a server can bound the size of a frame
before it knows anything of the model. All numbers are little-endian. ``join``, and ``watch`` to and from
a board, carry JSON as their tensor; those of ``stopped`` say what ended the job, and whom that names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import zmq

CHUNK_BYTES = 4 << 20
"""Of a tensor in one frame; libzmq's heartbeats hear nothing until a frame is whole, so that it must not be long on a slow link."""
MAX_FRAME_BYTES = CHUNK_BYTES + (1 << 16)
"""A longer frame makes libzmq drop the connection that it comes from."""
MAX_TENSORS = 1 << 12

NUMBER = np.dtype("<u8")
"""Of a request, where a message has a list of them."""

_MAGIC = b"FBPS"
_VERSION = 4
_HEAD = struct.Struct("<4sBBIQQQqdIH")
KINDS = (
    *("hello", "beat", "join", "piece", "initial", "gradient", "delta", "pull", "look_up", "fetch", "barrier", "save", "leave", "watch"),
    *("welcome", "unknown", "alive", "ready", "blank", "applied", "parameters", "rows", "fetched", "saved", "refused", "stopped"),
    "counts",
)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_MOST = 2**63
"""Above the number of any request; a head has room for more than its answer."""

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
    """Updates that the server had made. ``welcome`` and requests: which life of the server this is, or is for. ``alive``: the last
    request that was taken; those of them that wait are its tensor."""
    rate: float = 0.0
    """Learning rate of a gradient."""
    count: int = 0
    """Gradients that it is about; ``welcome``: 1 where the parameters are there; ``hello`` and the answer to ``join``: meetings at
    barriers so far; ``barrier``: which meeting it is for."""


_NUMBERS = attrgetter("rank", "session", "sequence", "mark", "version", "rate", "count")
"""Of a head, in the order of ``_HEAD``."""


class WireError(ValueError):
    """A message that makes no sense. ``head``: its own, where that much of it can be read."""

    def __init__(self, text: str, head: Head | None = None) -> None:
        super().__init__(text)
        self.head = head


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around the reading of what somebody else wrote, and nothing else: whatever is raised there is the fault of that, a ``WireError``."""
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
    bodies = [_body(tensor) for tensor in tensors]
    fixed = _HEAD.pack(_MAGIC, _VERSION, _CODES[head.kind], *_NUMBERS(head), len(bodies))
    frames: list[bytes | memoryview] = [fixed + struct.pack(f"<{len(bodies)}Q", *(body.nbytes for body in bodies))]
    for body in bodies:
        frames += [body[begin : begin + CHUNK_BYTES] for begin in range(0, body.nbytes, CHUNK_BYTES)]
    return frames


def decode(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    """The message in ``frames``, its tensors as they lie in them. Raises ``WireError`` for anything else, with its head if it has one."""
    with reading("no message of this protocol"):
        return _decoded(frames)


def _decoded(frames: Sequence[zmq.Frame]) -> tuple[Head, list[memoryview]]:
    if not frames or len(frames[0]) < _HEAD.size:
        raise WireError("no head")
    text = frames[0].bytes
    magic, version, code, *fields, num = _HEAD.unpack_from(text)
    if magic != _MAGIC or version != _VERSION or code >= len(KINDS):
        raise WireError("no message of this protocol")
    if num > MAX_TENSORS or len(text) != _HEAD.size + 8 * num:
        raise WireError("a head of the wrong length")
    head = Head(KINDS[code], *fields)
    if max(head.sequence, head.mark) >= _MOST:
        raise WireError("a request's number that is none")
    lengths = struct.unpack_from(f"<{num}Q", text, _HEAD.size)
    bodies = [frame.buffer for frame in frames[1:]]
    if sum(lengths) != sum(body.nbytes for body in bodies):
        raise WireError("tensors of other lengths than the head says", head)
    tensors = []
    position = 0
    for length in lengths:
        num_chunks = -(-length // CHUNK_BYTES)
        chunks = bodies[position : position + num_chunks]
        position += num_chunks
        if sum(chunk.nbytes for chunk in chunks) != length:
            raise WireError("tensors cut in another way than the head says", head)
        tensors.append(chunks[0] if num_chunks == 1 else memoryview(bytearray().join(chunks)))
    return head, tensors


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
