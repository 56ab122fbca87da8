"""A rank that reads pictures through decoding processes: ``image_rank.py FOLDER IMAGES [wait]``.

Prints a line of JSON: what it read, and the processes that decoded. With ``wait`` it then waits to be killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import torch

from fleetbench.errors import WorkerFailed
from fleetbench.workloads.data.images import ImageBatches
from fleetbench.workloads.data.reader import Sampler


def main(folder: Path, images: Path, *, wait: bool) -> None:
    """Read in order, jump back, close."""
    state = torch.get_rng_state()
    sampler = Sampler(num_samples=23, batch_size=4, trainers=1, rank=0, seed=7, uneven="pad")
    reader, plain = (ImageBatches(folder, images, sampler, 32, workers, torch.float32) for workers in (2, 0))
    positions = [0, 1, 2, 3, 7, 2, 0, 1]
    same = []
    for position in positions:
        (inputs, labels), (expected, right) = reader.batch(position), plain.batch(position)
        same.append(torch.equal(inputs, expected) and torch.equal(labels, right))
    decoding = [child.pid for child in psutil.Process().children(recursive=True) if "torch_shm" not in child.name()]
    print(json.dumps({"same": same, "untouched": torch.equal(state, torch.get_rng_state()), "decoding": decoding}), flush=True)
    while wait:
        time.sleep(1)
    reader.close()
    reader.close()
    left = [child.cmdline()[-1] for child in psutil.Process().children(recursive=True)]
    print(json.dumps({"left": left, "failure": _failure_of_a_killed_decoder(ImageBatches(folder, images, sampler, 32, 2, torch.float32))}))


def _failure_of_a_killed_decoder(reader: ImageBatches) -> str:
    """What reading on says when one of the two is killed."""
    reader.batch(0)
    next(child for child in psutil.Process().children(recursive=True) if child.name() == "pt_data_worker").kill()
    try:
        for position in range(1, 20):
            reader.batch(position)
    except WorkerFailed as error:
        return str(error)
    finally:
        reader.close()
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), wait="wait" in sys.argv)
