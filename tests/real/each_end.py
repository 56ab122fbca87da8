"""One begin of a script, and its ends, each in a fork: ``each_end.py BEGIN ENDS FOLDER``; see ``processes.run_each_end``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from fleetbench.children import end_with_parent

begin, ends, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
parent, forks = os.getpid(), []
imports, _, rest = begin.partition("\n\n")
exec(imports)  # noqa: S102  # a test's
gc.freeze()  # what was imported is neither collected nor copied when a fork ends
for number, end in enumerate(ends):
    if not (pid := os.fork()):
        end_with_parent(parent)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        exec(f"{rest}\n{end}")  # noqa: S102
        break  # to the end of this script, where Python ends it
    forks.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
