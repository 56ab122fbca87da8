"""Start a script once a rank, on this machine over gloo, and collect what its ranks wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from real.testbed.testbed import Testbed

Found = list[dict[str, Any]]


def run_ranks(script: Path, ranks: int, job: dict[str, Any], timeout_s: float = 3600.0, testbed: Testbed | None = None) -> Found:
    """Run ``script RANK RANKS STORE OUTPUT JOB``, with the job as JSON, each rank on its host of ``testbed``; what rank 0 wrote.

    Raises ``RuntimeError`` with all ranks' output where one fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(Testbed.environment if testbed else {})}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"log{rank}" for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(script), str(rank), str(ranks), f"{folder}/store", f"{folder}/found{rank}", json.dumps(job)]
            own = {**environment, "RANK": str(rank)}
            with log.open("wb") as out:
                entered = testbed.command(command) if testbed else command
                processes.append(subprocess.Popen(entered, env=own, stdout=out, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() not in (None, 0) for process in processes):
                    time.sleep(2.0)  # the others' own ends tell who was first
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            texts = [f"--- rank {rank}\n{log.read_text(encoding='utf-8')[-3000:]}" for rank, log in enumerate(logs)]
            raise RuntimeError("\n".join(texts))
        return [json.loads(line) for line in (Path(folder) / "found0").read_text(encoding="utf-8").splitlines()]
