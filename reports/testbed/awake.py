"""Do processors that never sleep mend the testbed at 200 Mbit/s? Gloo's all-reduces with and without, A B B A.

Run from the repository's root, as root: ``python reports/testbed/awake.py``. A latency of 0 that is asked of ``/dev/cpu_dma_latency``
(the kernel's PM QoS) keeps idle processors polling while the file is open. Replaces ``awake_raw.json`` and prints its table.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import struct
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from measure import IDLE_S, MBIT, SIZES, fit_alpha_s
from ranks import Ranks

from fleetbench.cluster import Cluster, Link
from fleetbench.quantities import BitsPerSecond
from fleetbench.store import machine, versions
from real.testbed.testbed import Testbed

RAW = Path(__file__).parent / "awake_raw.json"
RATE_BPS = 200 * MBIT
ORDER = (False, True, True, False)


@contextlib.contextmanager
def awake(*, wanted: bool) -> Iterator[None]:
    """Keep the processors from sleeping inside."""
    if not wanted:
        yield
        return
    device = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    try:
        os.write(device, struct.pack("i", 0))
        yield
    finally:
        os.close(device)


def main() -> None:
    """Measure, keep, and print."""
    head = {"started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(), "versions": versions()}
    turns = []
    for hosts in (3, 4):
        cluster = Cluster(nodes=hosts, inter=Link(bandwidth=BitsPerSecond(RATE_BPS)))
        with tempfile.TemporaryDirectory(prefix="fleetbench-") as name, Testbed(cluster) as testbed:
            testbed.verify()
            with Ranks(testbed, Path(name)) as ranks:
                ranks.open()
                for wanted in ORDER:
                    with awake(wanted=wanted):
                        for idle_s in (0.0, IDLE_S):
                            times = ranks.medians(RATE_BPS, sizes=SIZES, idle_s=idle_s)
                            turns.append({"hosts": hosts, "awake": wanted, "idle_s": idle_s, "times_s": times})
    RAW.write_text(json.dumps({**head, "turns": turns}, indent=1) + "\n", encoding="utf-8")
    print("| hosts | processors | alpha, ms | 100 kB: idle over back to back |\n|---|---|---|---|")
    for hosts in (3, 4):
        for wanted in (False, True):
            mine = [turn for turn in turns if (turn["hosts"], turn["awake"]) == (hosts, wanted)]
            medians = {
                idle_s: {
                    nbytes: statistics.median(turn["times_s"][nbytes] for turn in mine if turn["idle_s"] == idle_s) for nbytes in SIZES
                }
                for idle_s in (0.0, IDLE_S)
            }
            both = {nbytes: statistics.mean(found[nbytes] for found in medians.values()) for nbytes in SIZES if nbytes >= 100_000}
            ratio = medians[IDLE_S][100_000] / medians[0.0][100_000]
            print(f"| {hosts} | {'awake' if wanted else 'as they are'} | {1e3 * fit_alpha_s(both, hosts, RATE_BPS):.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
