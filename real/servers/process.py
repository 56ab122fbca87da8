"""Process: one server of a leg.

``python -m real.servers.process FOLDER NUMBER`` reads FOLDER/servers.json and leaves its report beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fleetbench.digests import write_whole
from fleetbench.errors import FleetbenchError
from real.servers.security import encrypts
from real.servers.server import ParameterServer
from real.servers.server_options import ServerOptions

SPEC = "servers.json"


def report_path(folder: Path, server: int) -> Path:
    """Where a server leaves its report."""
    return folder / f"server{server}.json"


def main(folder: Path, number: int) -> int:
    """Serve until all trainers have ended; the exit code."""
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    options = ServerOptions(
        server=number,
        servers=len(spec["endpoints"]),
        trainers=spec["trainers"],
        endpoint=spec["endpoints"][number],
        token=spec["token"],
        encrypted=encrypts(os.environ, ()),  # all of a leg's processes are on this machine
        timeout_s=spec["timeout_s"],
        startup_timeout_s=spec["startup_timeout_s"],
        record=spec["record"],
    )
    server = ParameterServer(options)
    try:
        server.bind()
        report = server.run()
    except FleetbenchError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the server's log
        return error.exit_code
    finally:
        server.close()
    told = {
        "updates": report.updates,
        "staleness": sorted(report.staleness.items()),
        "busy_s": report.busy_s,
        "served_s": report.served_s,
        "bytes_received": report.bytes_received,
        "bytes_sent": report.bytes_sent,
        "roles": [server.role.recording().to_dict()] if options.record and server.role is not None else [],
    }
    write_whole(report_path(folder, number), json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
