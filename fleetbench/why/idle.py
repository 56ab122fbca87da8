"""Idle time of a device, by cause: its host waits for it before launching more work, or launches too late."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fleetbench.profiler_traces import Call, Trace
from fleetbench.spans import Spans, lengths, union

_LIBRARY = re.compile(
    r"^(torch/|<|nn\.Module: )|/(torch|site-packages|dist-packages|lib/python[\d.]+|torchinductor_\w+)/",
)
"""Pattern that matches Python functions outside the user's code: those of torch, of installed packages and of
the standard library, builtins, and generated code."""
_MODULE = re.compile(r"\(\d+\): <module>$")
"""Pattern of the end of the name of a script's module-level code. Its line is where the profiler started, and
is left out."""
_NEAR = 8
"""Number of the host's last waits before a gap among which the gap's cause is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """Waits of the host for its device, after which the device was idle because nothing more was launched."""

    operator: str
    """Operator that waits, such as ``aten::item``; the device runtime's call if no operator made it."""
    caller: str
    """Innermost function of the user's code, with its first line, such as ``train.py(12): step``; empty if
    unknown."""
    idle_s: float
    """Idle seconds per step after the waits, mean over ranks and steps."""
    per_step: float
    """Number of these waits per rank and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Idle seconds per step by cause, means over ranks and steps."""

    host_waits: tuple[HostWait, ...]
    """Idle time after waits of the host, by operator and caller."""
    launched_s: float
    """Idle seconds before kernels that were launched in time."""
    late_s: float
    """Idle seconds before kernels that the host launched too late to keep the device busy. Those after a wait of
    the host are in ``host_waits`` instead."""
    late_in: str
    """User function in which the host was for most of ``late_s``; empty if unknown."""


def idle_causes(parts: Sequence[tuple[Trace, Spans, Spans]], num: int) -> Idle:
    """Divide idle time by its cause.

    ``parts``: traces with kernels, each with the times in which its device is idle, and with those in which
    it is idle while a DataLoader works. ``num``: number of ranks times steps, for the means.
    """
    waited, times, late_in = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[str]()
    launched_ns = late_ns = 0
    for trace, bare, loading in parts:
        work, host = trace.work, trace.host
        begins, ends = gaps = union(bare, loading)
        idle = lengths(bare, gaps)
        order = np.argsort(work.begin, kind="stable")
        following = order[np.minimum(np.searchsorted(work.begin[order], ends), len(order) - 1)]
        launched = work.launched[following]
        in_time = (work.begin[following] == ends) & (launched >= 0) & (launched < begins)
        launched_ns += int(idle[in_time].sum())
        waits = sorted(host.waits, key=lambda call: (call.begin, -call.end))
        wait_begins = np.array([call.begin for call in waits], dtype=np.int64)
        place = np.searchsorted(wait_begins, begins, side="right")
        thread = Counter(call.thread for call in host.calls if call.is_python).most_common(1)
        made = list[Call]()
        for gap in (late := np.flatnonzero(~in_time & (idle > 0))):
            near = waits[max(place[gap] - _NEAR, 0) : place[gap]]
            middle = int(begins[gap] + ends[gap]) // 2
            other = Call(middle, middle, "", thread[0][0] if thread else "")
            ended = (call for call in reversed(near) if begins[gap] <= call.end <= ends[gap])
            made.append(next(ended, other))
        for gap, call, who in zip(late, made, _callers(host.calls, made), strict=True):
            if call.name:
                waited[who] += int(idle[gap])
                times[who] += 1
            else:
                late_ns += int(idle[gap])
                late_in[who[1]] += int(idle[gap])
    most = late_in.most_common(1)
    return Idle(
        host_waits=tuple(
            HostWait(
                operator=operator,
                caller=caller,
                idle_s=ns * 1e-9 / num,
                per_step=times[operator, caller] / num,
            )
            for (operator, caller), ns in waited.most_common()
        ),
        launched_s=launched_ns * 1e-9 / num,
        late_s=late_ns * 1e-9 / num,
        late_in=most[0][0] if most else "",
    )


def _callers(calls: Sequence[Call], waits: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """Yield the operator and the caller of each wait, as in ``HostWait``."""
    open_calls, found = defaultdict[str, list[Call]](list), dict[Call, tuple[str, str]]()
    wanted = set(waits)
    for call in sorted({*calls, *waits}, key=lambda call: (call.begin, -call.end)):
        stack = open_calls[call.thread]
        while stack and stack[-1].end <= call.begin:
            stack.pop()
        stack.append(call)
        if call in wanted:
            operators = [each.name for each in stack if not each.is_python]
            frames = [_MODULE.sub("", each.name) for each in reversed(stack) if each.is_python]
            own = (frame for frame in frames if not _LIBRARY.search(frame))
            aten = (name for name in operators if name.startswith("aten::"))
            found[call] = next(aten, operators[0]), next(own, "")
    return (found[wait] for wait in waits)
