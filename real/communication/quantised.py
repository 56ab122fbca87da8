"""Quantised mean: an all-reduce in INT8, for outer differences.

Numbers travel in blocks of ``INT8_BLOCK``: whole numbers from -127 to 127, and the FP32 scale of the block, its largest
magnitude over 127. Every rank quantises its numbers and sends each rank a chunk of whole blocks (all-to-all). A rank
adds its chunks up in FP32 in the ranks' order, divides by their number, and quantises the mean; all ranks gather the
means (all-gather). All ranks end with the same bits, including the one that made a chunk. This is the scheme of
torchft's ``allreduce_quantized`` (``torchft/collectives.py``), which uses FP8.

A number is off by at most half the mean of the ranks' scales of its block, plus half the scale of the mean. A block in
which any rank has a NaN or an infinity is NaN on all ranks.

Never executed with NCCL so far.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from fleetbench.plan.exchange import INT8_BLOCK, INT8_SCALE_BYTES, int8_blocks
from real.communication.communicators import Communicators

_LARGEST = 127
Timed = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager that times a collective of this name."""


def quantise(numbers: torch.Tensor) -> torch.Tensor:
    """Return blocks of FP32 numbers ``(blocks, INT8_BLOCK)`` as bytes: each block's whole numbers, then its scale."""
    peak = numbers.abs().amax(dim=1, keepdim=True)
    normal = (peak / _LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    scale = torch.where(peak.isfinite(), normal, torch.nan)
    whole = (numbers / scale).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_().to(torch.int8)
    return torch.cat([whole.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def dequantise(blocks: torch.Tensor) -> torch.Tensor:
    """Return the FP32 numbers of bytes from ``quantise``."""
    scale = blocks[:, INT8_BLOCK:].contiguous().view(torch.float32)
    return blocks[:, :INT8_BLOCK].view(torch.int8) * scale


@torch.no_grad()
def average_quantised(
    tensor: torch.Tensor, communicators: Communicators, communicator: int, timed: Timed, residual: torch.Tensor | None = None
) -> None:
    """Replace a flat ``tensor`` with its mean over all ranks, bit-identical on each; runs on a communicator's lane.

    ``residual``: FP32 tensor as long as ``tensor``, for error feedback (arXiv 1901.09847). It holds this rank's earlier
    quantisation errors, which are added to the numbers, and then gets the new errors.
    """
    ranks, size = communicators.trainers, tensor.numel()
    blocks = int8_blocks(size, ranks)
    padded = torch.zeros(ranks * blocks * INT8_BLOCK, dtype=torch.float32, device=tensor.device)
    numbers = padded[:size]
    numbers.copy_(tensor)
    if residual is not None:
        numbers.add_(residual)
    sent = quantise(padded.view(-1, INT8_BLOCK))
    if residual is not None:
        torch.sub(numbers, dequantise(sent).view(-1)[:size], out=residual)
    del padded, numbers
    received = torch.empty_like(sent)
    with timed("all_to_all"):
        communicators.all_to_all(received, sent, communicator)
    chunks = received.view(ranks, blocks, INT8_BLOCK + INT8_SCALE_BYTES)
    mean = dequantise(chunks[0])
    for chunk in chunks[1:]:
        mean.add_(dequantise(chunk))
    own = quantise(mean.div_(ranks))
    with timed("all_gather"):
        communicators.all_gather(received, own, "world", communicator)
    tensor.copy_(dequantise(received).view(-1)[:size])
