"""What looking at steps costs them: legs of one living script, watched and not, in turns (A B B A).

python reports/why/overhead.py [WIDTH BATCH ...]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from fleetbench.experiment import Run
from fleetbench.why.observed import RankLog
from real.why.job import LookedAt
from real.why.look import Look

HERE = Path(__file__).parent
PAIRS, STEPS = 8, 120


def main() -> None:
    """Measure each model and print a line of JSON for it."""
    words = sys.argv[1:] or ["256", "64", "512", "64", "512", "256"]
    for width, batch in zip(words[::2], words[1::2], strict=True):
        script = [str(HERE / "train.py"), "--width", width, "--batch", batch]
        ratios, plain = [], []
        with LookedAt([str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", *script], Run()) as job:
            job.look(Look(what="times", steps=STEPS))
            for pair in range(PAIRS):
                found = {}
                for what in ("times", "watch") if pair % 2 == 0 else ("watch", "times"):
                    found[what] = step_s(job.look(Look(what=what, steps=STEPS)))
                ratios.append(found["watch"] / found["times"])
                plain.append(found["times"])
        middle, spread = statistics.median(ratios), statistics.stdev(ratios)
        row = {
            "width": width,
            "batch": batch,
            "step_ms": 1e3 * statistics.median(plain),
            "ratio": middle,
            "stdev": spread,
            "ratios": ratios,
        }
        print(json.dumps(row), flush=True)


def step_s(parts: list) -> float:
    """Mean step of a look's ranks."""
    if "step_s" in parts[0]:
        return statistics.fmean(part["step_s"] for part in parts)
    logs = [RankLog.of(part["log"]) for part in parts]
    return statistics.fmean((log.step_ends_ns[-1] - log.step_ends_ns[0]) * 1e-9 / log.num_steps for log in logs)


if __name__ == "__main__":
    main()
