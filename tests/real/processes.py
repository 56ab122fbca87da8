"""Run a test's scripts as forks of a process that has imported torch: on several ranks of gloo, or by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fork_server import Forked, ForkServer, fork_server, shared

from real.processes.started import QUIET

WITH_VARIABLES = Path(__file__).with_name("with_variables.py")
FORKING_CLI = Path(__file__).with_name("forking_cli.py")
EACH_END = Path(__file__).with_name("each_end.py")
Arrays = dict[str, npt.NDArray[np.generic]]


def values_of(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """What tests of the module take for ``argument`` and do not skip: a launch that many of them look at need train nothing else."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    found = [item.callspec.params.get(argument) for item in tests if hasattr(item, "callspec") and not item.get_closest_marker("skip")]
    return [value for value in found if value is not None]


def server_of_tests() -> tuple[ForkServer, dict[str, str]]:
    """The fork server that is there, and what a test has in its environment beside it: a new server imports torch for five seconds."""
    now = {**os.environ, **QUIET}
    base = shared[0].environment if shared and shared[0].code is None else now
    if base.keys() - now.keys():
        base = now
    return fork_server(base), {name: value for name, value in now.items() if base.get(name) != value}


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it wrote."""

    code: int
    out: str
    err: str = ""


class ForkedLaunches:
    """In the place of ``real.processes.started.start_process``, for commands of Python: neither launchers nor ranks need import torch."""

    def __init__(self) -> None:
        self.started: list[tuple[Forked, Mapping[str, str]]] = []
        """Every process, and its environment."""
        self._server, self._variables = server_of_tests()

    def __call__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], **_: object) -> Forked:
        """See ``start_process``."""
        assert command[0] == sys.executable
        arguments = [word for word in command[1:] if word not in ("-u", "-P")]
        if arguments[:2] == ["-m", "fleetbench"]:
            arguments[:2] = [str(FORKING_CLI)]
        self.started.append((self._server.fork(arguments, log, {**self._variables, **environment}), environment))
        return self.started[-1][0]


@contextlib.contextmanager
def forked_launches() -> Iterator[ForkedLaunches]:
    """Launches of scripts fork their processes, as those of experiments do, for four seconds of a core a process."""
    forks = ForkedLaunches()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("real.processes.started", "real.job.launch"):
            patch.setattr(f"{module}.start_process", forks)
        yield forks


def fork_command(arguments: Sequence[str | Path], output: Path, temporary: Path) -> Forked:
    """Start ``fleetbench ARGUMENTS...`` as a fork, and its ranks as forks of that; ``temporary`` is its TMPDIR."""
    server, variables = server_of_tests()
    return server.fork([str(FORKING_CLI), *map(str, arguments)], output, {**variables, "TMPDIR": str(temporary)})


def run_python(arguments: Sequence[str | Path], folder: Path, timeout_s: float = 100.0) -> Ended:
    """Run ``python ARGUMENTS...`` (``-m MODULE ...`` or ``SCRIPT ...``) as a fork; output and errors are one text."""
    server, variables = server_of_tests()
    process = server.fork([*map(str, arguments)], folder / "log", variables)
    try:
        return Ended(process.wait(timeout_s), (folder / "log").read_text(encoding="utf-8"))
    finally:
        process.kill()
        process.wait()


def run_each_end(begin: str, ends: Sequence[str], folder: Path, timeout_s: float = 60.0) -> list[Ended]:
    """Run ``begin`` and one of ``ends`` after the other, as a script; each ends as Python itself ends a process, all at the same time."""
    done = run_python([EACH_END, begin, json.dumps(ends), folder], folder, timeout_s)
    assert done.code == 0, done.out
    codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
    texts = [[(folder / f"{number}.{name}").read_text(encoding="utf-8") for name in ("out", "err")] for number in range(len(ends))]
    return [Ended(code, *both) for code, both in zip(codes, texts, strict=True)]


def run_ranks(script: Path, ranks: int, *arguments: str, timeout_s: float = 280.0) -> list[Arrays]:
    """Run ``script RANK RANKS STORE OUTPUT ARGUMENTS...`` once a rank, as forks; the arrays that each saved to OUTPUT."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, variables = server_of_tests()
        processes = [
            server.fork(
                [str(script), str(rank), str(ranks), str(folder / "store"), str(folder / f"rank{rank}.npz"), *arguments],
                folder / f"{rank}.log",
                variables,
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
    server, variables_of_all = server_of_tests()
    logs = [folder / f"{number}.log" for number in range(len(variables))]
    processes = [
        server.fork(
            [str(WITH_VARIABLES), *(f"{name}={value}" for name, value in own.items()), "--", *map(str, arguments)],
            log,
            variables_of_all,
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
