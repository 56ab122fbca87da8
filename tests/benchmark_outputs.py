"""Output of nccl-tests 2.0 to 2.19, printed from closed forms.

The formats are facts of that program: names and order of columns, their widths, what is in front of a table
and behind it. Rates are those of nccl-tests' doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALPHA_S, BYTES_S = 2e-6, 250e9
SIZES = (8, 1024, 65536, 2**20, 2**24, 2**28)


@dataclass(frozen=True)
class Collective:
    """One program of nccl-tests."""

    name: str
    has_redop: bool = False
    has_root: bool = False
    checks_in_place: bool = True

    def seconds(self, n: int, nbytes: int) -> float:
        """A ring's: twice as long for an all-reduce."""
        rounds = (n - 1) * (2 if self.name == "all_reduce" else 1)
        return rounds * (ALPHA_S + nbytes / (n * BYTES_S)) + 1e-6

    def factor(self, n: int) -> float:
        """Of busbw over algbw."""
        if self.name == "all_reduce":
            return 2 * (n - 1) / n
        return 1.0 if self.name in ("broadcast", "reduce", "sendrecv") else (n - 1) / n


ALL_REDUCE = Collective("all_reduce", has_redop=True)
OTHERS = (
    Collective("all_gather"),
    Collective("reduce_scatter", has_redop=True),
    Collective("alltoall", checks_in_place=False),
    Collective("broadcast", has_root=True),
    Collective("reduce", has_redop=True, has_root=True),
    Collective("gather", has_root=True),
    Collective("scatter", has_root=True),
    Collective("sendrecv", has_redop=True, checks_in_place=False),
)
VERSIONS = ("2.0", "2.10", "2.13.0", "2.13.13", "2.16.9", "2.17.8", "2.19.6")


def _at_least(version: str, other: str) -> bool:
    first, second = ([int(part) for part in one.split(".")] for one in (version, other))
    return first >= second


def _time(us: float, version: str) -> str:
    if _at_least(version, "2.17.4"):
        return next(text for text in (f"{us:.2f}", f"{us:.1f}", f"{us:.0f}") if len(text) <= 7)
    return f"{us:.0f}" if us >= 10_000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _rate(gbytes: float, version: str) -> str:
    if _at_least(version, "2.17.4"):
        return next(text for text in (f"{gbytes:.2f}", f"{gbytes:.1f}", f"{gbytes:.0f}") if len(text) <= 6)
    return f"{gbytes:.2f}"


def nccl_tests(
    version: str = "2.17.8",
    collective: Collective = ALL_REDUCE,
    n: int = 8,
    sizes: Sequence[int] = SIZES,
    *,
    wrong: int = 0,
    num_groups: int = 1,
    is_checked: bool = True,
    suffix: str = "",
    time_column: str = "time",
    timestamps: bool = False,
    per_iteration: bool = False,
) -> str:
    """What one run prints. Before 2.13 each program has its own columns, and ``error`` is a difference."""
    is_shared = _at_least(version, "2.13")
    program, lines = f"{collective.name}_perf{suffix}", list[str]()
    if _at_least(version, "2.17.4"):
        lines.append(f"# nccl-tests version {version} nccl-headers=22902 nccl-library=22902")
    if _at_least(version, "2.16"):
        lines.append(f"# Collective test starting: {program}")
    more = " agg iters: 1 validation: 1 graph: 0" if is_shared else " validation: 1 "
    bounds = f"minBytes {sizes[0]} maxBytes {sizes[-1]}"
    lines.append(f"# nThread 1 nGpus {n} {bounds} step: 2(factor) warmup iters: 5 iters: 20{more}")
    lines += ["#", "# Using devices"]
    for rank in range(n):
        group = f"Group {rank % num_groups:2} " if _at_least(version, "2.13.10") else ""
        bus = "0000:07:00" if _at_least(version, "2.15") else "0x07"
        device = f"on {'node-a':>10} device {rank % 8:2} [{bus}] NVIDIA H100 80GB HBM3"
        lines.append(f"{'#  ' if group else '#   '}Rank {rank:2} {group}Pid {4000 + rank:6} {device}")
    told = ["redop"] * (is_shared or collective.has_redop) + ["root"] * (is_shared or collective.has_root)
    rates = [time_column, "algbw", "busbw", "#wrong" if is_shared else "error"]
    rates += ["i_min", "i_max", "i_p99", "i_cv%"] * per_iteration
    lines += ["#", f"# {'':>10}  {'':>12}  {'':>8}            out-of-place                       in-place"]
    header = f"# {'size':>10}  {'count':>12}  {'type':>8}" + "".join(f"  {name:>6}" for name in told)
    header += "".join(f"  {name:>7}" for name in rates) * 2
    lines.append(header + (f" {'timestamp':>19}" if timestamps else " "))
    lines.append(f"# {'(B)':>10}  {'(elements)':>12}" + "  (us)  (GB/s)  (GB/s)" * 2)
    for nbytes in sizes:
        seconds = collective.seconds(n // num_groups, nbytes)
        alg = nbytes / seconds * 1e-9
        redop, root = "sum" if collective.has_redop else "none", "0" if collective.has_root else "-1"
        row = f"{nbytes:12}  {nbytes // 4:12}  {'float':>8}"
        row += "".join(f"  {redop if name == 'redop' else root:>6}" for name in told)
        for place in (0, 1):
            checks = is_checked and (collective.checks_in_place or place == 0)
            check = f"{wrong if is_shared else 2e-07:5g}" if checks else "  N/A"
            own = alg / (2 - place)  # out of place it takes twice as long
            row += f"  {_time(1e6 * seconds * (2 - place), version):>7}  {_rate(own, version):>6}"
            row += f"  {_rate(own * collective.factor(n // num_groups), version):>6}  {check}"
            row += "    10.00    11.00    10.90     2.00" * per_iteration
        lines.append(row + ("  2025-01-01 00:00:00" if timestamps else ""))
    num_wrong = 2 * len(sizes) * (wrong > 0)
    lines.append(f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}")
    lines += ["# Avg bus bandwidth    : 200.0 ", "#"]
    if _at_least(version, "2.16"):
        lines.append(f"# Collective test concluded: {program}")
    return "\n".join(lines) + "\n"


PREFIXES: dict[str, Callable[[str], str]] = {
    "as it is": lambda line: line,
    "pasted without #": lambda line: line.removeprefix("#"),
    "mpirun --tag-output": lambda line: f"[1,0]<stdout>:{line}",
    "srun --label": lambda line: f" 0: {line}",
    "kubectl logs --timestamps": lambda line: f"2025-01-01T12:34:56.123456789Z {line}",
}
"""What stands in front of a line, by who put it there."""


def behind(prefix: str, text: str) -> str:
    """A text with a prefix in each of its lines."""
    return "\n".join(map(PREFIXES[prefix], text.splitlines())) + "\n"
