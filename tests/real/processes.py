"""Run a function of a test on several ranks of gloo, joined through a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.generic]]


def run_ranks(script: Path, ranks: int, *arguments: str, timeout_s: float = 110.0) -> list[Arrays]:
    """Run ``script RANK RANKS STORE OUTPUT ARGUMENTS...`` once a rank; the arrays that each saved to OUTPUT."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        outputs = [Path(folder) / f"rank{rank}.npz" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(ranks), f"{folder}/store", str(output), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            texts = [process.communicate(timeout=timeout_s)[0].decode() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        assert all(process.returncode == 0 for process in processes), "\n".join(texts)
        return [dict(np.load(output)) for output in outputs]
