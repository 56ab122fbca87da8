"""The files that one experiment passes from the command to a step: ``python reports/redesign/hops.py CHECKOUT``.

Runs the built-in quickstart in a folder of its own, simulated and real, with a profiler in every Python process. When a step's first event
reaches the strategy in the process that executes it, its stack is written; so is the stack of every process that
starts another. A hop is a frame of the project whose caller stands in another file.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROFILER = """
import os, sys, traceback
ROOT, OUT, PACKAGES = os.environ["HOPS_ROOT"], os.environ["HOPS_OUT"], ("fleetbench/", "sim/", "real/", "tuner/")

def dump(kind):
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ROOT)]
    files = [os.path.relpath(frame.filename, ROOT) + ":" + frame.name for frame in frames]
    files = [name for name in files if name.startswith(PACKAGES)]
    if kind == "step" or any(name.startswith("real/") for name in files):
        open(f"{OUT}/{kind}-{os.getpid()}", "w").write("\\n".join(files))

def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in ("on", "segment") and code.co_filename == ROOT + "/fleetbench/plan/training.py":
        sys.setprofile(None)
        dump("step")

sys.setprofile(profile)
sys.addaudithook(lambda event, arguments: dump("start") if event in ("subprocess.Popen", "os.posix_spawn", "os.fork") else None)
"""


def hops(stack: list[str]) -> int:
    """Frames whose caller stands in another file."""
    files = [line.partition(":")[0] for line in stack]
    return sum(one != other for one, other in itertools.pairwise(files))


def main(root: Path) -> None:
    """Print the stacks of a simulated and of a real run."""
    for command in ("sim", "real"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "sitecustomize.py").write_text(PROFILER, encoding="utf-8")
            environment = {
                **os.environ,
                "PYTHONPATH": f"{folder}:{root}",
                "HOPS_ROOT": str(root),
                "HOPS_OUT": str(folder),
                "FLEETBENCH_BUSY": "accept",
            }
            arguments = ["sim", str(root / "examples" / "sixty_four_gpus.toml")] if command == "sim" else ["real"]
            call = [
                sys.executable,
                "-c",
                "from fleetbench.cli.main import main; raise SystemExit(main())",
                *arguments,
                "--set",
                "workload.steps=3",
            ]
            subprocess.run(call, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stacks = {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("st*-*"))}
            starts = [stack for name, stack in stacks.items() if name.startswith("start") and stack[0].startswith("fleetbench/cli/main")]
            steps = [stack for name, stack in stacks.items() if name.startswith("step")]
            for kind, stack in [*(("start", stack) for stack in starts[:1]), ("step", steps[-1])]:
                print(f"{command}, {kind}: {hops(stack)} hops, {len(stack)} frames\n  " + "\n  ".join(stack))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
