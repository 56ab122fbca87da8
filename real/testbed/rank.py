"""Rank: one process of stock gloo in a host of the testbed. Reads requests, one line of JSON each, and answers each with one."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # gloo prints to the standard output
    import torch
    import torch.distributed as dist

    from real.processes.joining import join_through

    torch.set_num_threads(1)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if request["do"] == "open":
            if dist.is_initialized():
                dist.destroy_process_group()
            join_through(request["store"], "gloo", request["rank"], request["size"], _TIMEOUT)
            dist.barrier()
            answer: dict[str, Any] = {}
        else:
            answer = _all_reduces(request["nbytes"], request["rounds"], request["start_ns"], request["period_ns"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _all_reduces(nbytes: int, rounds: int, start_ns: int, period_ns: int) -> dict[str, Any]:
    """Time all-reduces that start back to back, or each at its own moment of the machine's monotonic clock."""
    import torch
    import torch.distributed as dist

    data = torch.full((nbytes // 4,), dist.get_rank() + 1.0)
    dist.all_reduce(data)
    size = dist.get_world_size()
    right = bool((data == size * (size + 1) / 2).all())
    data.zero_()
    begin_ns, end_ns = [], []
    for number in range(rounds):
        if number == 0 or period_ns:
            time.sleep(max(0.0, (start_ns + number * period_ns - time.monotonic_ns()) * 1e-9))
        begin_ns.append(time.monotonic_ns())
        dist.all_reduce(data)
        end_ns.append(time.monotonic_ns())
    return {"right": right, "begin_ns": begin_ns, "end_ns": end_ns}


if __name__ == "__main__":
    main()
