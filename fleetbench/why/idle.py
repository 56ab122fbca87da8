"""Waits of a host for its device, after which the device was idle because nothing more was launched."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """Waits of the host by the same operator and caller, and the idle time that follows them."""

    operator: str
    """Operator that waits, such as ``aten::item``; the device runtime's call if no operator made it."""
    caller: str
    """Innermost function of the user's code, with its first line, such as ``train.py(12): step``; empty if
    unknown."""
    idle_s: float
    """Idle seconds per step after the waits, mean over ranks and steps."""
    per_step: float
    """Number of these waits per rank and step."""


def host_waits(parts: Sequence[tuple[Trace, Spans, Spans]], num: int) -> tuple[HostWait, ...]:
    """Return the waits that ended while the device was idle, the longest ``idle_s`` first.

    ``parts``: traces with kernels, each with the times in which its device is idle, and with those in which
    it is idle while a DataLoader works. ``num``: number of ranks times steps, for the means.
    """
    idle_ns, times = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for trace, bare, loading in parts:
        begins, ends = gaps = union(bare, loading)
        idle = lengths(bare, gaps)
        after: dict[int, Call] = {}
        for call in sorted((call for call in trace.calls if call.waits), key=lambda call: (call.end, -call.begin)):
            gap = int(np.searchsorted(begins, call.end, side="right")) - 1
            if gap >= 0 and call.end <= ends[gap] and call.begin < begins[gap]:
                after[gap] = call
        callers = _callers([call for call in trace.calls if call.kind != "copy"], set(after.values()))
        for gap, call in after.items():
            if idle[gap]:
                idle_ns[callers[call]] += int(idle[gap])
                times[callers[call]] += 1
    return tuple(
        HostWait(operator=who[0], caller=who[1], idle_s=ns * 1e-9 / num, per_step=times[who] / num) for who, ns in idle_ns.most_common()
    )


def _callers(calls: Sequence[Call], wanted: set[Call]) -> dict[Call, tuple[str, str]]:
    """Return the operator and the caller of each wanted call, as in ``HostWait``."""
    open_calls, found = defaultdict[str, list[Call]](list), dict[Call, tuple[str, str]]()
    for call in sorted(calls, key=lambda call: (call.begin, -call.end)):
        stack = open_calls[call.thread]
        while stack and stack[-1].end <= call.begin:
            stack.pop()
        stack.append(call)
        if call in wanted:
            own = (_MODULE.sub("", each.name) for each in reversed(stack) if each.kind == "python" and not _LIBRARY.search(each.name))
            aten = (each.name for each in stack if each.name.startswith("aten::"))
            found[call] = next(aten, call.name), next(own, "")
    return found
