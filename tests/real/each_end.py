"""Ends of a script, each in a fork: ``each_end.py BEGIN ENDS FOLDER``; see ``processes.run_each_end``."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

from fleetbench.children import end_with_parent


def become(text: str) -> None:
    """Execute, and end as Python ends a process after a script: threads, exit functions, then the interpreter itself."""
    code = 0
    try:
        exec(text, {"__name__": "__main__"})  # noqa: S102  # a test's
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  # it is the end of a process
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    ctypes.pythonapi.Py_Exit(code)


begin, ends, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
parent, forks = os.getpid(), []
gc.freeze()  # what was imported is neither collected nor copied when a fork ends
for number, end in enumerate(ends):
    if not (pid := os.fork()):
        end_with_parent(parent)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        become(f"{begin}\n{end}")
    forks.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
(folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
