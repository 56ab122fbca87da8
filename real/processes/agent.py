"""Agent: what starts and ends the workers of one launch, in a process of its own.

``python -m real.processes.agent CONFIG.json``. When a worker fails, it ends the others and writes who failed first, and
how, to the file that the configuration names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from real.processes.agent_config import AgentConfig
from real.processes.nodes import Nodes
from real.processes.supervisor import Told, supervise


def launch(config: AgentConfig) -> int:
    """Run the workers to their end; 0, or 1 when one failed."""
    os.environ.update(config.environment)
    if config.nodes is None and config.port is None:
        codes = _supervised(config)
    else:
        from real.processes.elastic import run_among, run_on_port  # imports torch

        if config.nodes is not None:
            return run_among(Nodes(**config.nodes), config)
        codes = run_on_port(config)
    if codes:
        Path(config.failure).write_text(json.dumps(codes), encoding="utf-8")
    return 1 if codes else 0


def _supervised(config: AgentConfig) -> dict[int, int]:
    try:
        return supervise(config)
    except Told as told:  # its exit code says which signal ended it
        signal.signal(told.which, signal.SIG_DFL)
        os.kill(os.getpid(), told.which)
        raise


if __name__ == "__main__":
    sys.exit(launch(AgentConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
