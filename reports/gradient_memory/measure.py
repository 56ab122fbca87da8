"""What gradients take on two ranks: fleetbench beside DistributedDataParallel. ``python reports/gradient_memory/measure.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ARMS = ("alone", "DDP", "DDP, bucket views", "fleetbench", "fleetbench, one bucket")


def main() -> None:
    """Run every arm, and write and print its figures."""
    found = []
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "figures.json")
            launch = [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", "--", str(HERE / "rank.py"), arm, str(output)]
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # every tensor's pages go back as soon as it is freed
            subprocess.run(launch, check=True, cwd=folder, env=environment)
            found.append(json.loads(output.read_text()))
    (HERE / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    for one in found:
        print(f"{one['arm']:24} at rest {one['at_rest']:.2f}, peak {one['peak']:.2f} times all gradients")


if __name__ == "__main__":
    main()
