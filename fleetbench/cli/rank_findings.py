"""What ``fleetbench doctor`` sees when every rank of a job runs it: who is where, and whether they fit together.

``torchrun --nproc-per-node 8 -m fleetbench doctor``, or ``srun fleetbench doctor``: rank 0 prints.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from fleetbench.cli.findings import Findings
from fleetbench.cli.network_findings import gloo_interface
from fleetbench.errors import EnvironmentLacks
from fleetbench.store import versions

_TIMEOUT = timedelta(seconds=60)
_CLOCKS_APART_NS = 10_000_000
"""From here on the lines of two hosts' logs are out of order to the eye."""
_COMPARED = ("python", "fleetbench", "torch", "numpy")


def look_at_ranks(findings: Findings) -> bool:
    """Meet the other ranks, over gloo, and compare; whether this rank is to print.

    Does nothing in a process that nobody started as one of several. Raises ``EnvironmentLacks`` where
    the ranks do not meet.
    """
    from real.processes.roles import role_of

    role = role_of(os.environ)
    if role.trainers == 1:
        return True
    import torch.distributed as dist

    from real.communication.clock_offsets import measure_offsets
    from real.processes.joining import join

    try:
        join(role, _TIMEOUT, "gloo")
        told = _gather(_own(role.launcher))
        offsets = measure_offsets()
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "does gloo take an interface that leads to the other nodes? Set GLOO_SOCKET_IFNAME; and may they connect to any port?"
        raise EnvironmentLacks(
            f"{role.trainers} ranks did not meet within {_TIMEOUT.seconds} s", f"rank {role.rank}", reason, hint
        ) from error
    if role.rank != 0:
        return False
    clocks = [(offset.offset_ns, offset.error_ns) for offset in offsets]
    findings.sections["ranks"] = rank_facts(told, clocks)
    findings.warnings += rank_warnings(told, clocks)
    return True


def rank_facts(told: Sequence[dict[str, Any]], clocks: Sequence[tuple[int, int]]) -> dict[str, str]:
    """A line a rank: host, gloo's interface there, and its clock against rank 0's, in ms; ``clocks``: offset and error, ns."""
    facts = {}
    for rank, (own, (offset_ns, error_ns)) in enumerate(zip(told, clocks, strict=True)):
        clock = "" if rank == 0 else f", clock {offset_ns / 1e6:+.3f} ms (at most {error_ns / 1e6:.3f} ms wrong)"
        facts[str(rank)] = f"{own['host']}, gloo over {own['gloo'] or 'nothing'}{clock}"
    return facts


def rank_warnings(told: Sequence[dict[str, Any]], clocks: Sequence[tuple[int, int]]) -> list[str]:
    """What does not fit: versions, gloo's interface, clocks."""
    warnings = []
    for name in _COMPARED:
        for rank, own in enumerate(told):
            if own["versions"].get(name) != told[0]["versions"].get(name):
                ours, theirs = told[0]["versions"].get(name, "none"), own["versions"].get(name, "none")
                warnings.append(f"rank {rank} on {own['host']} has {name} {theirs}, rank 0 has {ours}: install the same everywhere")
                break
    hosts = {own["host"] for own in told}
    for rank, own in enumerate(told):
        if own["gloo"] == "lo" and len(hosts) > 1:
            warnings.append(f"rank {rank} on {own['host']} would use the loopback interface: set GLOO_SOCKET_IFNAME")
            break
    for rank, (offset_ns, error_ns) in enumerate(clocks):
        if abs(offset_ns) - error_ns > _CLOCKS_APART_NS:
            host = told[rank]["host"]
            warnings.append(f"the clock of rank {rank} on {host} is {offset_ns / 1e6:+.1f} ms from rank 0's: is a time service running?")
    return warnings


def _own(launcher: str) -> dict[str, Any]:
    return {"host": socket.gethostname(), "launcher": launcher, "gloo": gloo_interface(os.environ)[0], "versions": versions()}


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in the order of ranks; as JSON, because objects would travel as pickles."""
    import torch
    import torch.distributed as dist

    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    ranks = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([text.numel()]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(texts, sizes, strict=True)]
