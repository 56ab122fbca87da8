"""Keeper: the one process that holds a testbed. When it ends, for whatever reason, nothing of it is left.

``unshare --mount --net python -m real.testbed.keeper``. Its namespaces have no names, only files that are open in this process, so
nothing of them shows in the machine's own and nothing has to be taken down. It ends with its input, that is with the driver.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real.testbed import traffic
from real.testbed.json_lines import serve
from real.testbed.namespaces import current_network, enter_network, new_network

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
    """Network namespaces by name. They live as long as this process has them open, and workers are in them.

    Its methods but ``inside`` are the keeper's services; they return plain data.
    """

    def __init__(self) -> None:
        self._home = current_network()
        self._files: dict[str, int] = {}

    def add(self, names: Sequence[str]) -> dict[str, int]:
        """Make empty namespaces; the open files of all."""
        for name in names:
            try:
                self._files[name] = new_network()
            finally:
                enter_network(self._home)
        return self._files

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread is inside the namespace; what it opens and starts stays there."""
        enter_network(self._files[name])
        try:
            yield
        finally:
            enter_network(self._home)

    def apply(self, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Run steps in their order; the optional lines that were refused. Raises ``StepRefused``."""
        paths = {name: f"/proc/{os.getpid()}/fd/{file}" for name, file in self._files.items()}
        refused = []
        for step in steps:
            namespace, tool, optional = step["namespace"], step["tool"], step["optional"]
            lines = [line.format_map(paths) if tool == "ip" else line for line in step["lines"]]
            for batch in [[line] for line in lines] if optional else [lines]:
                with self.inside(namespace):
                    why = _sysctl(batch) if tool == "sysctl" else _batch(tool, batch)
                if why and not optional:
                    raise StepRefused(namespace, "; ".join(batch), why)
                if why:
                    refused.append({"namespace": namespace, "what": optional, "why": why})
        return refused

    def congestion_control(self) -> str:
        """TCP's congestion control in the namespaces."""
        with self.inside(next(iter(self._files))):
            return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()

    def counters(self) -> dict[str, dict[str, int]]:
        """``COUNTERS`` of every namespace since it was made."""
        found = {}
        for name in self._files:
            with self.inside(name):
                net = Path("/proc/thread-self/net")
                values = _columns((net / "snmp").read_text(encoding="ascii")) | _columns((net / "netstat").read_text(encoding="ascii"))
            found[name] = {what: sum(values.get(key, 0) for key in keys) for what, keys in COUNTERS.items()}
        return found

    def rates(self, **request: Any) -> list[float]:
        """``traffic.rates``."""
        return traffic.rates(self.inside, **request)

    def ring(self, **request: Any) -> list[float]:
        """``traffic.ring``."""
        return traffic.ring(self.inside, **request)


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
    """Run ``ip`` or ``tc`` over lines of our own; the reason where one was refused."""
    text, environment = "\n".join(lines) + "\n", {"PATH": TOOL_PATH, "LC_ALL": "C"}
    try:
        done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False, env=environment)
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


def main() -> None:
    """Serve until the input ends."""
    network = Network()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": getattr(network, request.pop("do"))(**request)}
        except (OSError, StepRefused) as error:
            return {"error": ": ".join(map(str, error.args))}

    serve(answer)


if __name__ == "__main__":
    main()
