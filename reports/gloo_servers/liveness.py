"""What gloo's point-to-point messages make of a peer that ends, and of a receive that nobody wants any more.

python reports/gloo_servers/liveness.py [--timeout 10]: three processes, of which 2 receives from any source; prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SERVER = 2
KILLED = 1


def group_of(rank: int, path: str, timeout_s: float) -> Any:
    """A gloo group of three processes on the loopback."""
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # torch has no public name for them
    options._timeout, options._threads = timedelta(seconds=timeout_s), 1  # noqa: SLF001  # as above
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001  # as above
    return dist.ProcessGroupGloo(dist.FileStore(path, 3), rank, 3, options)


def outcome(name: str, operation: Any) -> None:
    """How an operation ended, and after how many seconds."""
    begin = time.monotonic()
    try:
        operation()
        ended = "done"
    except RuntimeError as error:
        ended = str(error).partition("] ")[2] or str(error)
    print(json.dumps({"what": name, "seconds": round(time.monotonic() - begin, 2), "ended": ended[:90]}), flush=True)


def work(rank: int, path: str, timeout_s: float) -> None:
    """Process 1 is killed after a second; the others wait for messages that never come, 0 of it, and 2 of anybody."""
    group, head = group_of(rank, path, timeout_s), torch.zeros(1)
    if rank == KILLED:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == SERVER:
        outcome("receive from any source, after a peer was killed", lambda: group.recv_anysource([head], 0).wait())
        outcome("send to the peer that lives, after that timeout", lambda: group.send([head], 0, 1).wait())
    else:
        outcome("receive from one source, which was killed", lambda: group.recv([head], KILLED, 1).wait())
        time.sleep(timeout_s + 1)
    os._exit(0)


def cancel(path: str, timeout_s: float) -> None:
    """A thread receives; another gives the group up."""
    groups: dict[int, Any] = {}
    joining = [threading.Thread(target=lambda rank=rank: groups.update({rank: group_of(rank, path, timeout_s)})) for rank in range(3)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    waiting = threading.Thread(target=lambda: outcome("receive in a thread", groups[0].recv([torch.zeros(1)], 1, 0).wait), daemon=True)
    waiting.start()
    time.sleep(0.5)
    for way in ("abort", "shutdown"):
        getattr(groups[0], way)()
        waiting.join(1.0)
        print(json.dumps({"what": f"the thread still waits one second after {way}()", "is": waiting.is_alive()}), flush=True)
    waiting.join()


def main() -> None:
    """Both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=10.0)
    timeout_s = parser.parse_args().timeout
    print(json.dumps({"torch": torch.__version__, "timeout_s": timeout_s}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work, args=(rank, f"{folder}/killed", timeout_s)) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        cancel(f"{folder}/cancel", timeout_s)


if __name__ == "__main__":
    main()
