"""Stands for ``srun`` on one machine: starts a step's tasks with the variables that Slurm gives them.

It writes its own arguments to ``$FAKE_SRUN_LOG`` and refuses options that the real one does not know
by these names. As with ``--kill-on-bad-exit``, the first task that fails ends the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KNOWN = {"overlap", "kill-on-bad-exit", "distribution", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "wait"}

options: dict[str, str] = {}
command = sys.argv[1:]
while command and command[0].startswith("--"):
    name, _, value = command.pop(0).removeprefix("--").partition("=")
    assert name in KNOWN, name
    options[name] = value
Path(os.environ["FAKE_SRUN_LOG"]).write_text(json.dumps([options, command]))
if os.environ.get("FAKE_SRUN_DRY"):
    sys.exit(0)
num, per_node, nodes = (int(options[name]) for name in ("ntasks", "ntasks-per-node", "nodes"))
assert num == per_node * nodes
assert options["distribution"] == "block"
step = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": str(num),
    "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
    "SLURM_STEP_NODELIST": "localhost,elsewhere" if nodes > 1 else "localhost",
}
tasks = [
    subprocess.Popen(
        command,
        env={
            **os.environ,
            **step,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % per_node),
            "SLURM_NODEID": str(task // per_node),
        },
    )
    for task in range(num)
]
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
