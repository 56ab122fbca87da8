"""Network: the namespaces that the keeper holds, and the carrying out of steps inside them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real.testbed import kernel

TOOL_PATH = f"{os.defpath}:/usr/local/sbin:/usr/sbin:/sbin"
"""Where ``ip`` and ``tc`` are, also for users whose own path leaves out the administrator's folders."""
COUNTERS = {
    "retransmits": ("RetransSegs",),
    "timeouts": ("TCPTimeouts",),
    "reorders": ("TCPSACKReorder", "TCPTSReorder", "TCPRenoReorder"),
    "segments": ("OutSegs",),
}
"""What is read of every namespace: the kernel's counters that add up to it (proc_net_snmp(5))."""


class StepRefused(Exception):  # noqa: N818  # says what happened
    """A line of a step that is not optional was refused; the arguments are the namespace, the line and the reason."""


class Network:
    """Network namespaces by name. They live as long as this process has them open, and workers are in them."""

    def __init__(self) -> None:
        self._home = kernel.current_network()
        self.files: dict[str, int] = {}

    def add(self, names: Sequence[str]) -> None:
        """Make empty namespaces."""
        for name in names:
            try:
                self.files[name] = kernel.new_network()
            finally:
                kernel.enter(self._home, kernel.NEW_NET)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread is inside the namespace; what it opens and starts stays there."""
        kernel.enter(self.files[name], kernel.NEW_NET)
        try:
            yield
        finally:
            kernel.enter(self._home, kernel.NEW_NET)

    def carry_out(self, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Run steps in their order; the optional lines that were refused. Raises ``StepRefused``."""
        paths = {name: f"/proc/{os.getpid()}/fd/{file}" for name, file in self.files.items()}
        refused = []
        for step in steps:
            lines = [line.format_map(paths) if step["tool"] == "ip" else line for line in step["lines"]]
            batches = [[line] for line in lines] if step["optional"] else [lines]
            with self.inside(step["namespace"]):
                for batch in batches:
                    why = _RUN[step["tool"]](batch) if step["tool"] in _RUN else _batch(step["tool"], batch)
                    if why is not None and not step["optional"]:
                        raise StepRefused(step["namespace"], "; ".join(batch), why)
                    if why is not None:
                        refused.append({"namespace": step["namespace"], "what": step["optional"], "why": why})
        return refused

    def congestion_control(self) -> str:
        """TCP's congestion control in the namespaces."""
        with self.inside(next(iter(self.files))):
            return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()

    def counters(self) -> dict[str, dict[str, int]]:
        """``COUNTERS`` of every namespace since it was made."""
        found = {}
        for name in self.files:
            with self.inside(name):
                net = Path("/proc/thread-self/net")
                values = _columns((net / "snmp").read_text(encoding="ascii")) | _columns((net / "netstat").read_text(encoding="ascii"))
            found[name] = {what: sum(values.get(key, 0) for key in keys) for what, keys in COUNTERS.items()}
        return found


def _columns(text: str) -> dict[str, int]:
    """Pairs of lines, names above values, as in /proc/net/snmp."""
    lines = text.splitlines()
    return {
        name: int(value)
        for names, values in zip(lines[::2], lines[1::2], strict=True)
        for name, value in zip(names.split()[1:], values.split()[1:], strict=True)
        if names.startswith(("Tcp:", "TcpExt:"))
    }


def _batch(tool: str, lines: Sequence[str]) -> str | None:
    """Run ``ip`` or ``tc`` over lines; the reason where one was refused."""
    try:
        done = subprocess.run(  # lines of our own
            [tool, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": TOOL_PATH, "LC_ALL": "C"},
        )
    except OSError as error:
        return f"{tool}: {error.strerror}"
    return None if done.returncode == 0 else " ".join(done.stderr.split()) or f"{tool} ended with exit code {done.returncode}"


def _sysctl(lines: Sequence[str]) -> str | None:
    """Write settings of this network namespace, of alternatives (``a|b``) the first that is taken; why another was refused."""
    reason = None
    for line in lines:
        for choice in line.split("|"):
            name, _, value = choice.partition("=")
            try:
                Path("/proc/sys", name).write_text(value, encoding="ascii")
            except FileNotFoundError:
                if "ipv6" in name:  # a kernel without it has it off
                    break
                reason = f"{name}: no such setting"
            except OSError as error:
                reason = f"{choice}: {error.strerror}"
            else:
                break
    return reason


def _steer(lines: Sequence[str]) -> str | None:
    """Let the CPUs of a mask take every receive queue of a device, each flow one of them."""
    try:
        kernel.mount_sysfs()
        for line in lines:
            device, _, mask = line.partition("=")
            for queue in sorted(Path("/sys/class/net", device, "queues").glob("rx-*")):
                (queue / "rps_cpus").write_text(mask, encoding="ascii")
    except OSError as error:
        return str(error)
    return None


_RUN = {"sysctl": _sysctl, "rps": _steer}
