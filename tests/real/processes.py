"""Run a function of a test on several ranks of gloo, joined through a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from real.launch import QUIET
from real.processes.fork_server import fork_server

Arrays = dict[str, npt.NDArray[np.generic]]


def run_ranks(script: Path, ranks: int, *arguments: str, timeout_s: float = 280.0) -> list[Arrays]:
    """Run ``script RANK RANKS STORE OUTPUT ARGUMENTS...`` once a rank, as forks; the arrays that each saved to OUTPUT."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = fork_server({**os.environ, **QUIET})
        processes = [
            server.fork(
                [str(script), str(rank), str(ranks), str(folder / "store"), str(folder / f"rank{rank}.npz"), *arguments],
                folder / f"{rank}.log",
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert not any(codes), "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.log")))
        return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(ranks)]
