"""``fleetbench doctor --network``: what links carry, what they should carry, and which variable to set, if any."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted

if TYPE_CHECKING:
    from fleetbench.why.interfaces import Host
    from fleetbench.why.links import Links
    from fleetbench.why.nccl_log import Transports
    from real.why.link_test import LinkReport

_EXAMPLE = "fleetbench doctor --network -- torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500"


def run_network(command: Sequence[str], nproc: int | None, *, as_json: bool) -> int:
    """Test the links and print the findings; remarks do not change the exit code."""
    if command and nproc is not None:
        raise ConfigError("the command says how many ranks there are", "--nproc", str(nproc), "leave it out")
    if tuple(command) == ("--",):
        raise ConfigError("no command follows it", "--", hint=_EXAMPLE)
    from real.why.link_test import run_here, run_with

    tested = run_with(command, say) if command else run_here(nproc or _default_ranks(), say)
    if tested is None:
        say("rank 0 runs on another node, whose fleetbench doctor prints the result")
    elif as_json:
        emit(json.dumps({**encode(tested), "remarks": encode(tested.remarks)}, indent=1))
    else:
        _emit(tested)
    return 0


def _default_ranks() -> int:
    import torch

    return max(2, torch.cuda.device_count())


def _emit(tested: LinkReport) -> None:
    links, names = tested.links, tested.links.host_names
    _emit_times(links)
    if tested.transports is not None:
        _emit_facts(f"NCCL {tested.transports.version or ''}", ("", "used"), _transports(tested.transports))
    alike: dict[tuple[tuple[str, str, str], ...], list[int]] = {}
    for number, host in enumerate(links.hosts):
        alike.setdefault(tuple(_hardware(host, links)), []).append(number)
    for rows, (first, *more) in alike.items():
        title = f"hardware of {names[first]}{f' and {len(more)} more like it' if more else ''}"
        _emit_facts(title, ("link", "should carry", "state"), rows)
        if links.hosts[first].topology:
            emit(links.hosts[first].topology)
    what = "4 MiB, one rank to one"
    between = [(" - ".join(names[host] for host in pair.hosts), units.rate(8 * pair.bytes_per_s), what) for pair in links.pairs]
    for each in links.interfaces:
        speed = 8 * each.times[-1].busbw_bytes_per_s if each.times else None
        between.append((f"gloo over {each.name}{_used(each.name, links)}", units.rate(speed), each.error or "all-reduce of all ranks"))
    if between:
        _emit_facts("between hosts", ("link", "carries", ""), between)
    for number, remark in enumerate(tested.remarks, start=1):
        emit(f"{number}. {remark.what}\n   REMEDY: {remark.remedy}")
    if not tested.remarks:
        emit("no remedy: nothing found that slows the exchange")


def _emit_times(links: Links) -> None:
    over = f" over {links.interface}" if links.interface else ""
    ranks, hosts = counted(links.ranks, "rank"), counted(len(links.hosts), "host")
    title = f"all-reduce: {ranks} on {hosts}, {links.backend}{over}"
    table = new_table(title, "size", "time", "algbw", "busbw", "sum")
    for each in links.times:
        speeds = [units.rate(8 * speed) for speed in (each.size_bytes / each.median_s, each.busbw_bytes_per_s)]
        kib, is_right = each.size_bytes / 2**10, "right" if each.is_correct else "WRONG"
        size = f"{kib:g} KiB" if kib < 2**10 else f"{kib / 2**10:g} MiB"
        table.add_row(size, units.seconds(each.median_s), *speeds, is_right)
    if links.fit is not None:
        latency = units.seconds(links.fit.latency / 1e9)
        table.caption = f"as a ring of links with {latency} and {units.rate(links.fit.bandwidth)}"
    emit_table(table)


def _emit_facts(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of texts whose last column wraps, so that the table stays within 80 columns."""
    table = new_table(title, *columns, left=columns[-1:])
    table.columns[-1].max_width = 24
    for row in rows:
        table.add_row(*row)
    emit_table(table)


def _transports(found: Transports) -> list[tuple[str, str]]:
    via = ", ".join(f"{number} x {kind}" for kind, number in sorted(found.connections.items()))
    return [
        ("network", f"{found.network or 'none'} {' '.join(found.devices)}"),
        ("connections", via or "none seen"),
        ("channels", ", ".join(map(str, found.channels)) or units.NONE),
        ("NVLS", found.nvls or "not said"),
        *sorted(found.environment.items()),
    ]


def _hardware(host: Host, links: Links) -> list[tuple[str, str, str]]:
    rows = [(each.name, units.rate(each.speed), f"up{_used(each.name, links)}, MTU {each.mtu or units.NONE}") for each in host.interfaces]
    rows += [(f"{port.name} {port.link_layer}", units.rate(port.rate), port.state) for port in host.ports]
    return rows + ([("NVLink", units.rate(host.nvlink), "all links of a GPU")] if host.nvlink else [])


def _used(name: str, links: Links) -> str:
    return ", in use" if name == links.interface else ""
