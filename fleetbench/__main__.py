"""``python -m fleetbench``: the same as the ``fleetbench`` command."""

import sys
from pathlib import Path

from fleetbench.cli.main import main

if __name__ == "__main__":
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]  # the working directory, whose ``real`` or ``sim`` would be found before ours
    sys.exit(main())
