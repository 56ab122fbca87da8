"""Enter: become another program inside a host of the testbed.

``python -m real.testbed.enter MAP.json PROGRAM ARGUMENT...``. Where the map has several hosts, the worker's
RANK says which. Only the network is the host's: files, users' rights and processes stay those of the machine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from real.testbed import kernel


def enter_host(map_file: Path) -> None:
    """Move this process (of one thread) into the network of the map's only host, or of its RANK's."""
    plan = json.loads(map_file.read_text(encoding="utf-8"))
    files = plan["files"]
    file = files[0] if len(files) == 1 else files[int(os.environ["RANK"])]
    keeper = Path("/proc", str(plan["keeper"]))
    try:
        network = os.open(keeper / "fd" / str(file), os.O_RDONLY | os.O_CLOEXEC)
        user = os.open(keeper / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC) if plan["rootless"] else None
    except OSError as error:
        sys.exit(f"the testbed is gone: {error}")
    if user is not None:
        kernel.enter(user, kernel.NEW_USER)
    kernel.enter(network, kernel.NEW_NET)


if __name__ == "__main__":
    enter_host(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the same process goes on as the program
