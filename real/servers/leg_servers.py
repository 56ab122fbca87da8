"""LegServers: the server processes of one leg, from before its first step until all trainers have left.

Each is ``python -m real.servers.leg_servers FOLDER NUMBER``, which reads FOLDER/servers.json and writes its
report to FOLDER/serverNUMBER.json.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetbench.digests import write_whole
from fleetbench.errors import FleetbenchError, WorkerFailed
from fleetbench.staleness import ServerLoad
from real.processes.diagnosis import how_it_ended
from real.processes.started import Started, end, start
from real.servers.links import Options
from real.servers.server import ParameterServer

_SPEC = "servers.json"
_GRACE_S = 10.0
"""Seconds for servers to end after the last trainer has left."""


class LegServers:
    """The server processes of one leg.

    Life cycle: created; ``start``; ``check``, regularly; ``end``, which returns the servers' reports; ``kill``, in any
    state. ``endpoints``: ``host:port`` of each server. ``enter``: returns the command that runs a program on the host
    of the server with a given number; ``None`` if all servers run on the driver's host.
    """

    def __init__(
        self,
        folder: Path,
        log_dir: Path,
        endpoints: Sequence[str],
        *,
        enter: Callable[[int, Sequence[str]], Sequence[str]] | None = None,
        environment: Mapping[str, str],
        **options: object,
    ) -> None:
        """``options``: other fields of ``Options``, equal for all servers."""
        self._environment = {**os.environ, **environment}
        folder.mkdir(parents=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.endpoints = tuple(endpoints)
        self._folder, self._log_dir, self._enter = folder, log_dir, enter
        (folder / _SPEC).write_text(json.dumps({"endpoints": self.endpoints, **options}), encoding="utf-8")
        self._processes: list[Started] = []

    def start(self) -> None:
        """Start the servers, which end with this process at the latest."""
        for server in range(len(self.endpoints)):
            log = self._log_dir / f"serverlog.{server}"
            command = [sys.executable, "-P", "-m", "real.servers.leg_servers", str(self._folder), str(server)]
            command = command if self._enter is None else list(self._enter(server, command))
            self._processes.append(start("server", server, command, self._environment, log))

    def check(self) -> None:
        """Raise ``WorkerFailed`` naming a server that has ended with an error."""
        for process in self._processes:
            if code := process.popen.poll():
                raise WorkerFailed(how_it_ended(code), process.name, hint=f"its output: {process.log}")

    def end(self) -> list[dict[str, Any]]:
        """Wait until the servers have ended, and return their reports; call it after all trainers have left.

        Raises ``WorkerFailed`` for a server that does not end, or ends with an error.
        """
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise WorkerFailed("has not ended after the last trainer", process.name, hint=f"its output: {process.log}") from None
        self.check()
        return [json.loads((self._folder / f"server{process.rank}.json").read_text(encoding="utf-8")) for process in self._processes]

    def kill(self) -> None:
        """End the servers that still run."""
        end(self._processes)


def loads_of(reports: Sequence[Mapping[str, Any]]) -> list[ServerLoad]:
    """Return each server's load during counted steps, from the servers' reports."""
    counts = [Counter({int(missed): int(num) for missed, num in one["staleness"]}) for one in reports]
    return [
        ServerLoad(until_ns=one["span_ns"], busy_ns=one["busy_ns"], staleness=count) for one, count in zip(reports, counts, strict=True)
    ]


def main(folder: Path, number: int) -> int:
    """Serve until all trainers have left, and return the exit code."""
    spec = json.loads((folder / _SPEC).read_text(encoding="utf-8"))
    server = ParameterServer(Options(**spec | {"number": number, "endpoints": tuple(spec["endpoints"])}))
    try:
        server.bind()
        load = server.run()
    except FleetbenchError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the server's log
        return error.exit_code
    finally:
        server.close()
    told = {"busy_ns": load.busy_ns, "span_ns": load.until_ns - load.since_ns, "staleness": sorted(load.staleness.items())}
    roles = [server.role.recording().to_dict()] if server.options.record and server.role is not None else []
    write_whole(folder / f"server{number}.json", json.dumps({**told, "roles": roles}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
