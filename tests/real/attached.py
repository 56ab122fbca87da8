"""Go on as a rank of a script that is attached: ``attached.py RANK RANKS STORE OUTPUT FOLDER STRATEGY|- SCRIPT ARGUMENTS...``.

It does what ``sitecustomize`` does, in a process that has imported torch.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch  # noqa: F401  # which imports both modules

from real.attach.following import follow
from real.processes.roles import ATTACH, STRATEGY

os.environ[ATTACH] = sys.argv[5]
if sys.argv[6] != "-":
    os.environ[STRATEGY] = sys.argv[6]
for name in ("torch.nn.parallel.distributed", "torch.optim.optimizer"):
    follow(sys.modules[name])
sys.argv = [sys.argv[7], *sys.argv[1:5], *sys.argv[8:]]
runpy.run_path(sys.argv[0], run_name="__main__")
