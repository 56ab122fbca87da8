"""Tests side by side, in forks of the process that has collected them: ``pytest --workers 3``.

Workers that were processes of their own would import and collect everything again, which takes a core a quarter of a minute. Files wait in
a pipe, the next free worker takes one, and tells of its tests by lines of JSON. What measures time, and what needs a GPU, which no fork may
use, runs afterwards in this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby, zip_longest
from pathlib import Path
from typing import Any

import pytest

from real.processes.fork_server import shared

Items = Sequence[pytest.Item]
Tell = Callable[[str, Any], None]
ALONE = ("alone", "gpu")
_NUMBER = 2
"""Bytes of a file's number in the pipe, which a read takes as one."""


class Worker:
    """This process's side of a fork. Life cycle: made; read until it ends; ended."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid, self.told = pid, told
        self.item: str | None = None
        """What it runs; none before its first test and after its last."""
        self._rest = b""

    def read(self) -> list[tuple[str, Any]] | None:
        """What it has told since; none at its end."""
        if not (data := os.read(self.told, 1 << 16)):
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def end(self) -> int:
        """Kill it, if it lives; its exit code."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.told)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run(session: pytest.Session, num: int) -> None:
    """Run all tests, those that are to run alone at the end."""
    alone = [item for item in session.items if any(item.get_closest_marker(name) for name in ALONE)]
    others = set(session.items) - set(alone)
    files = [list(items) for _, items in groupby((item for item in session.items if item in others), key=lambda item: item.path)]
    _run_beside(session, files, num)
    for item, following in zip_longest(alone, alone[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        _stop_where_asked(session)


def _run_beside(session: pytest.Session, files: Sequence[Items], num: int) -> None:
    queue, entry = os.pipe()
    os.write(entry, b"".join(number.to_bytes(_NUMBER, "big") for number in range(len(files))))
    os.close(entry)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # each worker has a folder of its own in it
    numbers = count()
    workers = {worker.told: worker for worker in (_fork(session, files, queue, next(numbers)) for _ in range(num))}
    try:
        while workers:
            for told in select.select(list(workers), [], [])[0]:
                worker = workers[told]
                if (found := worker.read()) is not None:
                    for what, value in found:
                        _hear(session, worker, what, value)
                    continue
                del workers[told]
                code = worker.end()
                if worker.item is not None:  # it has died: another one runs what is left of this file
                    rest = _report_death(session, worker.item, code, files)
                    another = _fork(session, files, queue, next(numbers), rest)
                    workers[another.told] = another
    finally:
        for worker in workers.values():
            worker.end()
        os.close(queue)


def _hear(session: pytest.Session, worker: Worker, what: str, value: Any) -> None:
    if what == "item":
        if worker.item is not None:
            session.config.hook.pytest_runtest_logfinish(nodeid=worker.item, location=("", None, ""))
        worker.item = value
        return
    for name in ("location", "longrepr"):  # JSON has no tuples
        if isinstance(value[name], list):
            value[name] = tuple(value[name])
    report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
    session.config.hook.pytest_runtest_logreport(report=report)
    _stop_where_asked(session)


def _stop_where_asked(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _report_death(session: pytest.Session, nodeid: str, code: int, files: Sequence[Items]) -> Items:
    """The test that a worker died in has failed; what is left of its file."""
    items = next(items for items in files if any(item.nodeid == nodeid for item in items))
    place = next(place for place, item in enumerate(items) if item.nodeid == nodeid)
    said = f"its process ended with {code}"
    report = pytest.TestReport(nodeid, items[place].location, {}, "failed", said, "call")
    session.config.hook.pytest_runtest_logreport(report=report)
    _stop_where_asked(session)
    return items[place + 1 :]


def _fork(session: pytest.Session, files: Sequence[Items], queue: int, number: int, first: Items = ()) -> Worker:
    told, telling = os.pipe()
    if pid := os.fork():
        os.close(telling)
        return Worker(pid, told)
    code = 1
    try:
        os.close(told)
        _settle(session.config, number)

        def tell(what: str, value: Any) -> None:
            data = json.dumps([what, value]).encode() + b"\n"
            while data:
                data = data[os.write(telling, data) :]

        session.config.pluginmanager.register(_Telling(session.config, tell))
        for items in _to_run(files, queue, first):
            for item, following in zip_longest(items, items[1:]):
                tell("item", item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        tell("item", None)
        for server in shared:
            server.close()
        code = 0
    except BaseException:  # noqa: BLE001  # it is the end of a process
        traceback.print_exc()
    finally:
        os._exit(code)  # what the first process has registered for its own end is not this one's


def _to_run(files: Sequence[Items], queue: int, first: Items) -> Iterator[Items]:
    if first:
        yield first
    while number := os.read(queue, _NUMBER):
        yield files[int.from_bytes(number, "big")]


def _settle(config: pytest.Config, number: int) -> None:
    """Give a worker what two processes must not share: files that catch output, folders, the terminal."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    if (reporter := config.pluginmanager.getplugin("terminalreporter")) is not None:
        reporter._tw._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as this process
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._given_basetemp, folders._basetemp = folders.getbasetemp() / f"worker{number}", None
    tempfile.tempdir = None
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="of-a-worker-")  # within the session's


class _Telling:
    """Plugin of a worker: every report goes to the first process."""

    def __init__(self, config: pytest.Config, tell: Tell) -> None:
        self._config, self._tell = config, tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        self._tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
