"""Network: the network namespaces of a testbed, held by the driver as open files.

They end with the driver, however it ends. They have no names, so they are not visible in the machine's own
network, and nothing has to be removed. A process inside has another network, but the files, users' rights and
processes of the machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.errors import EnvironmentLacks

if TYPE_CHECKING:
    from real.testbed.link_shaping import Step

TOOL_PATH = f"{os.defpath}:/usr/local/sbin:/usr/sbin:/sbin"
"""Search path for ``ip`` and ``tc``; a user's own path may lack the administrator's folders."""
COUNTERS = {
    "retransmits": ("RetransSegs",),
    "timeouts": ("TCPTimeouts",),
    "reorders": ("TCPSACKReorder", "TCPTSReorder", "TCPRenoReorder"),
}
"""Figures, each with the kernel's counters that add up to it (proc_net_snmp(5))."""
_NEW_NET = 0x40000000  # linux/sched.h


class Network:
    """Empty network namespaces by name, from the constructor until ``close``.

    Raises ``EnvironmentLacks`` if this process may not create them, or a tool is missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for tool in ("ip", "tc", "nsenter"):
            if shutil.which(tool, path=TOOL_PATH) is None:
                raise lacking(f"the testbed needs {tool}, and it is not installed")
        self._home = _current_network()
        self._files: dict[str, int] = {}
        try:
            for name in names:
                self._files[name] = self._new()
        except OSError as error:
            self.close()
            raise lacking(f"no network namespace can be created: {error.strerror}") from None

    def close(self) -> None:
        """Close the files; the namespaces end when no process is inside any more."""
        for file in (*self._files.values(), self._home):
            os.close(file)

    def path(self, name: str) -> str:
        """Return the path of a file by which other processes enter the namespace."""
        return f"/proc/{os.getpid()}/fd/{self._files[name]}"

    def command(self, names: Sequence[str], program: Sequence[str]) -> list[str]:
        """Return a command that runs ``program`` in the only namespace of ``names``, or in the one at index RANK."""
        if len(names) == 1:
            return ["nsenter", f"--net={self.path(names[0])}", *program]
        choice = f'exec nsenter --net="$(set -- {" ".join(map(self.path, names))}; shift "$RANK"; echo "$1")" "$0" "$@"'
        return ["sh", "-c", choice, *program]

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Move this thread into the namespace during the ``with``; what it opens and starts there stays there."""
        _call("setns", self._files[name], _NEW_NET)
        try:
            yield
        finally:
            _call("setns", self._home, _NEW_NET)

    def apply(self, steps: Sequence[Step]) -> list[dict[str, str]]:
        """Run steps in order, and return which features are missing because optional lines were refused, and why.

        Raises ``EnvironmentLacks`` if any other line is refused.
        """
        paths = {name: self.path(name) for name in self._files}
        refused: list[dict[str, str]] = []
        for step in steps:
            lines = [line.format_map(paths) if step.tool == "ip" else line for line in step.lines]
            for batch in [[line] for line in lines] if step.optional else [lines]:
                with self.inside(step.namespace):
                    why = _sysctl(batch) if step.tool == "sysctl" else _batch(step.tool, batch)
                if why and not step.optional:
                    raise lacking(f"{step.namespace}: {'; '.join(batch)}: {why}")
                if why and (entry := {"what": step.optional, "why": why}) not in refused:
                    refused.append(entry)
        return refused

    def counters(self) -> dict[str, int]:
        """Return the ``COUNTERS`` since the namespaces' creation, summed over all of them."""
        found = dict.fromkeys(COUNTERS, 0)
        for name in self._files:
            with self.inside(name):
                net = Path("/proc/thread-self/net")
                values = _columns((net / "snmp").read_text(encoding="ascii")) | _columns((net / "netstat").read_text(encoding="ascii"))
            found = {what: total + sum(values.get(key, 0) for key in COUNTERS[what]) for what, total in found.items()}
        return found

    def _new(self) -> int:
        """Create a network namespace, and return the open file that keeps it alive."""
        _call("unshare", _NEW_NET)
        try:
            return _current_network()
        finally:
            _call("setns", self._home, _NEW_NET)


def lacking(what: str) -> EnvironmentLacks:
    """Return the error of a machine on which no testbed can be built."""
    needed = "Linux with network namespaces, ip and tc of iproute2, nsenter of util-linux, and root"
    hint = f"needs {needed}; else `unshare --map-root-user --net fleetbench ...`"
    return EnvironmentLacks(what, "run.launcher", "'testbed'", hint)


def is_rootless() -> bool:
    """Whether root's rights are those of a user namespace (user_namespaces(7))."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != ["0", "0", "4294967295"]


def _call(name: str, *numbers: int) -> None:
    """Call ``setns`` or ``unshare`` of libc for this thread; Python has them in ``os`` from 3.12 on."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _current_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _columns(text: str) -> dict[str, int]:
    """Read pairs of lines, names above values, as in /proc/net/snmp."""
    lines = text.splitlines()
    return {
        name: int(value)
        for names, values in zip(lines[::2], lines[1::2], strict=True)
        for name, value in zip(names.split()[1:], values.split()[1:], strict=True)
        if names.startswith(("Tcp:", "TcpExt:"))
    }


def _batch(tool: str, lines: Sequence[str]) -> str | None:
    """Run ``ip`` or ``tc`` over lines; return the reason if one was refused."""
    text, environment = "\n".join(lines) + "\n", {"PATH": TOOL_PATH, "LC_ALL": "C"}
    done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False, env=environment)
    return None if done.returncode == 0 else " ".join(done.stderr.split()) or f"{tool} ended with exit code {done.returncode}"


def _sysctl(lines: Sequence[str]) -> str | None:
    """Write settings of this network namespace; return the reason if one was refused."""
    for line in lines:
        name, _, value = line.partition("=")
        try:
            Path("/proc/sys", name).write_text(value, encoding="ascii")
        except FileNotFoundError:
            if "ipv6" not in name:  # off in a kernel without it
                return f"{name}: no such setting"
        except OSError as error:
            return f"{line}: {error.strerror}"
    return None
