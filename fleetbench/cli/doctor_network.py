"""``fleetbench doctor --network``: what links carry, what they should carry, and which variable to set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted

if TYPE_CHECKING:
    from rich.table import Table

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
    links = tested.links
    _emit_times(links)
    if tested.transports is not None:
        _emit_transports(tested.transports)
    _emit_hosts(links)
    if links.pairs or links.interfaces:
        _emit_between(links)
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
        speeds = [_rate(8 * speed) for speed in (each.algbw_bytes_per_s, each.busbw_bytes_per_s)]
        kib, is_right = each.size_bytes / 2**10, "right" if each.is_correct else "WRONG"
        size = f"{kib:g} KiB" if kib < 2**10 else f"{kib / 2**10:g} MiB"
        table.add_row(size, units.seconds(each.median_s), *speeds, is_right)
    if links.fit is not None:
        latency = units.seconds(links.fit.latency / 1e9)
        table.caption = f"as a ring of links with {latency} and {_rate(links.fit.bandwidth)}"
    emit_table(table)


def _emit_transports(found: Transports) -> None:
    table = new_table(f"NCCL {found.version or ''}", "", "used", left=("used",), show_header=False)
    _texts_wrap(table, 50)
    via = ", ".join(f"{number} x {kind}" for kind, number in sorted(found.connections.items()))
    table.add_row("network", f"{found.network or 'none'} {' '.join(found.devices)}")
    table.add_row("connections", via or "none seen")
    table.add_row("channels", ", ".join(map(str, found.channels)) or units.NONE)
    table.add_row("NVLS", found.nvls or "not said")
    for name, value in sorted(found.environment.items()):
        table.add_row(name, value)
    emit_table(table)


def _emit_hosts(links: Links) -> None:
    """Print the hosts; those with the same hardware share their rows."""
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for name, host in zip(links.host_names, links.hosts, strict=True):
        groups.setdefault(tuple(_rows(host, links)), []).append(name)
    for rows, names in groups.items():
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        table = new_table(f"hardware of {names[0]}{more}", "link", "should carry", "state", left=("state",))
        _texts_wrap(table, 36)
        for row in rows:
            table.add_row(*row)
        emit_table(table)


def _rows(host: Host, links: Links) -> list[tuple[str, str, str]]:
    rows = []
    for each in host.interfaces:
        used = ", in use" if each.name == links.interface else ""
        rows.append((each.name, _rate(each.speed), f"up{used}, MTU {each.mtu or units.NONE}"))
    rows += [(f"{port.name} {port.link_layer}", _rate(port.rate), port.state) for port in host.ports]
    return rows


def _emit_between(links: Links) -> None:
    table = new_table("between hosts", "link", "carries", "", left=("",))
    _texts_wrap(table, 28)
    names = links.host_names
    for pair in links.pairs:
        between = " - ".join(names[host] for host in pair.hosts)
        table.add_row(between, _rate(8 * pair.bytes_per_s), "4 MiB from one rank to one")
    table.add_section()
    for each in links.interfaces:
        used = ", in use" if each.name == links.interface else ""
        speed = _rate(8 * each.times[-1].busbw_bytes_per_s if each.times else None)
        table.add_row(f"gloo over {each.name}{used}", speed, each.error or "all-reduce of all ranks")
    emit_table(table)


def _texts_wrap(table: Table, columns: int) -> None:
    """Keep the table within 80 columns by wrapping its last column."""
    table.columns[-1].max_width = columns
    table.columns[-1].overflow = "fold"


def _rate(bits_per_s: float | None) -> str:
    """Format bits per second with a decimal prefix."""
    if bits_per_s is None:
        return units.NONE
    units_of = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"))
    scale, unit = next((each for each in units_of if bits_per_s >= each[0]), units_of[-1])
    return f"{bits_per_s / scale:.3g} {unit}"
