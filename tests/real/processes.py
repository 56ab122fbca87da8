"""Run a test's scripts as forks of a process that has imported torch: on several ranks of gloo, or by themselves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from real.processes.fork_server import fork_server
from real.processes.started import QUIET

WITH_VARIABLES = Path(__file__).with_name("with_variables.py")
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


def run_scripts(arguments: Sequence[str | Path], folder: Path, *variables: Mapping[str, str], timeout_s: float = 100.0) -> list[str]:
    """Run ``SCRIPT ARGUMENTS...`` at the same time, once for each of ``variables`` of the environment; what each printed.

    Raises ``AssertionError`` where one did not end well.
    """
    server = fork_server({**os.environ, **QUIET})
    logs = [folder / f"{number}.log" for number in range(len(variables))]
    processes = [
        server.fork(
            [str(WITH_VARIABLES), *(f"{name}={value}" for name, value in own.items()), "--", *map(str, arguments)],
            log,
        )
        for own, log in zip(variables, logs, strict=True)
    ]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text(encoding="utf-8") for log in logs]
    assert not any(codes), "\n".join(texts)
    return texts
