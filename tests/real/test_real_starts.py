"""Starts: workers that torchrun starts again, ranks of ``mp.spawn``, a trainer's own children, a script alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from processes import run_each_end, run_python, run_scripts, server_of_tests

from fleetbench.errors import WorkerFailed
from real.processes.joining import own_part

LINES = """
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
def step():
    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def _attempt(store: Any, ranks: range, trainers: int, timeout_s: float = 20.0) -> list[Any]:
    """What each of ``ranks`` gets or raises when they join at the same time."""
    found: list[Any] = [None] * trainers

    def join(rank: int) -> None:
        try:
            found[rank] = own_part(store, rank, trainers, timedelta(seconds=timeout_s))
        except Exception as error:  # noqa: BLE001  # it is the result
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in ranks]


@pytest.fixture
def agents_store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of torchrun's agent, which outlives the workers."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.HashStore()  # type: ignore[attr-defined]  # missing from __all__ only


def test_an_attempt_sees_nothing_of_the_one_before(agents_store: Any) -> None:
    """Whatever its ranks have written, also where only some of them had come; ranks of one attempt meet."""
    written = []
    for ranks in (range(3), range(1, 3), range(2), range(3)):  # twice somebody is missing
        is_whole = len(ranks) == 3
        stores = _attempt(agents_store, ranks, 3, timeout_s=20.0 if is_whole else 0.2)
        if not is_whole:
            assert all(isinstance(store, WorkerFailed) for store in stores[ranks[0] > 0 :][:1])
            continue
        for rank, store in zip(ranks, stores, strict=True):
            assert not store.check([f"note{rank}"])
            store.set(f"note{rank}", str(len(written)))
        written.append(stores)
    assert len(written) == 2
    for number, stores in enumerate(written):
        notes = [store.get(f"note{rank}") for store in stores for rank in range(3)]
        assert notes == [str(number).encode()] * 9


@pytest.mark.slow
def test_workers_that_torchrun_starts_again_train(tmp_path: Path) -> None:
    """Rank 1 fails in the first attempt, rank 0 in the second, and the third trains to its end."""
    script = tmp_path / "again.py"
    script.write_text(
        "import os, torch\nfrom fleetbench import fleet\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"fleet.init(timeout_s=60)\n{LINES}"
        "for number in range(6):\n    step()\n"
        "    fails = number == 3 and attempt < 2 and fleet.worker_index() == 1 - attempt\n"
        "    if fails: raise ValueError('planned')\n"
        "print(f'attempt {attempt} ends\\n', end='', flush=True)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", str(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("attempt 2 ends") == 2


def test_a_scripts_own_group_hears_nothing_of_an_earlier_attempt(tmp_path: Path) -> None:
    """Neither that a rank has failed then, nor that one has left."""
    failed = json.dumps({"rank": 1, "what": "failed at step 3: ValueError: planned"})
    script = tmp_path / "own.py"
    script.write_text(
        "import os, sys, time, torch\nimport torch.distributed as dist\nfrom fleetbench import fleet\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}/store', rank=int(os.environ['RANK']), "
        "world_size=2)\nstore = dist.distributed_c10d._get_default_store()\n"
        f"store.set('fleetbench/failures/failed', {failed!r}); store.set('fleetbench/leaving', '')\n"
        f"fleet.init(timeout_s=60)\n{LINES}"
        "for number in range(20):\n    step(); time.sleep(0.1)\n"
    )
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for text in run_scripts([script, tmp_path], tmp_path, *({**both, "RANK": rank} for rank in "01")):
        assert "planned" not in text


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from fleetbench import fleet, DistributedStrategy
def work(rank, folder, fails):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    fleet.init(DistributedStrategy(localsgd=True), timeout_s=60)
%s
    role = fleet._job.role
    told = [rank, fleet.worker_index(), fleet.worker_num(), fleet.worker_endpoints(), role.rank, role.trainers,
        role.local_rank, role.trainers_per_node]
    sys.stdout.write(f"{told}\\n")  # one write: lines of ranks do not mix
    sys.stdout.flush()
    step()
    if fails and rank == 2: raise ValueError("the third layer is odd")
    step()
if __name__ == "__main__":
    mp.start_processes(work, args=(sys.argv[1], len(sys.argv) > 2), nprocs=4, start_method=%r)
"""


@pytest.fixture(params=["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def spawned(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A script that starts four ranks by ``torch.multiprocessing``."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED % (LINES.replace("\n", "\n    "), request.param))
    return script


def test_ranks_of_a_scripts_own_spawn_know_their_place(spawned: Path, tmp_path: Path) -> None:
    """Rank and size are the process group's, local rank and trainers per node follow from its hosts."""
    ended = run_python([spawned, tmp_path], tmp_path)
    assert ended.code == 0, ended.out
    host = socket.gethostname()
    everywhere = [f"{host}:{rank}" for rank in range(4)]
    told = sorted(line for line in ended.out.splitlines() if line.startswith("["))
    assert told == [str([rank, rank, 4, everywhere, rank, 4, rank, 4]) for rank in range(4)]


def test_an_error_of_a_spawned_rank_is_the_one_that_its_parent_raises(spawned: Path, tmp_path: Path) -> None:
    """By rank and message, although such a process ends without the interpreter's hooks."""
    ended = run_python([spawned, tmp_path, "fails"], tmp_path)
    assert ended.code == 1, ended.out
    assert "Process 2 terminated with the following error" in ended.out
    assert "ValueError: the third layer is odd" in ended.out
    assert "left early" not in ended.out


FORKING = f"""
import os, sys, torch
from fleetbench import fleet
fleet.init(timeout_s=60)
{LINES}
def fork(end):
    pid = os.fork()
    if not pid: end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def fails(): raise ValueError("of the fork")
for number in range(4):
    step()
    if number == 1: print("forks", fork(lambda: sys.exit(3)), fork(fails), flush=True)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_forks_of_two_ranks_end_by_themselves(tmp_path: Path) -> None:
    """They wait for no other rank, tell none of their errors, and both ranks train to their end."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "FLEETBENCH_STORE": str(tmp_path / "store")}
    scripts = [f"os.environ.update({both}, RANK='{rank}')\n{FORKING}" for rank in range(2)]
    ended = run_each_end("import os", scripts, tmp_path)
    assert [(each.code, each.out) for each in ended] == [(0, "forks 3 1\nends\n")] * 2, ended


def test_a_lone_script_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    """No other machine can connect to it."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, time, torch\nos.environ.pop('GLOO_SOCKET_IFNAME')\n"
        "from fleetbench import fleet\nfleet.init()\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    server, variables = server_of_tests()
    process = server.fork([str(script)], tmp_path / "log", variables)
    try:
        while "ready" not in (tmp_path / "log").read_text():
            assert process.poll() is None
        connections = psutil.Process(process.pid).net_connections()
        listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    finally:
        process.kill()
        process.wait()
    assert listening == {"127.0.0.1"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # of tests, so that those in this process do, too
