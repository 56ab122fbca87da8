"""Go on as a script that was started with environment variables of its own: ``with_variables.py NAME=VALUE... -- SCRIPT ARGUMENTS...``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

end = sys.argv.index("--")
os.environ.update(variable.split("=", 1) for variable in sys.argv[1:end])
sys.argv = sys.argv[end + 1 :]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
