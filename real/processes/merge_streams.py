"""Become another program whose errors go where its output goes.

``python -m real.processes.merge_streams PROGRAM ARGUMENT...``. The elastic agent opens a worker's two
streams separately; in one file they would overwrite each other.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.dup2(1, 2)
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606  # the same process goes on as the program
