"""Elastic local steps on processes: workers that die, leave early and join, against loops written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy
from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.elastic import Elastic

WORKER = str(Path(__file__).with_name("elastic_worker.py"))
DILOCO = {"k_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
IPV6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="SKIPPED: no IPv6")
pytestmark = [pytest.mark.torchft, pytest.mark.usefixtures("forked_launches")]


@pytest.fixture(autouse=True)
def quiet_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As importing torchft leaves it."""
    monkeypatch.setenv("RUST_LOG", "warn")


def launched(folder: Path, restarts: int = 0, nproc: int = 3, notes: list[str] | None = None, **job: Any) -> list[str]:
    """Train ``nproc`` workers, and return the notes of their ends, also in ``notes``."""
    from real.elastic.launching import launch_elastic

    notes = [] if notes is None else notes
    job["configs"] = {**job["configs"], "elastic": True}
    script = [WORKER, str(folder), json.dumps(job)]
    launch_elastic(nproc, script, restarts=restarts, log_dir=folder / "log", echo=lambda _: None, say=notes.append)
    return notes


def saved(folder: Path, rank: int, step: int, life: int = 0) -> np.ndarray[Any, Any]:
    """Return a worker's parameters after a step."""
    found: np.ndarray[Any, Any] = np.load(folder / f"{rank}-{life}-{step}.npy")
    return found


def written_out(rounds: Sequence[Mapping[int, Sequence[int]]], outer: tuple[float, float], merge: int = 1) -> list[torch.Tensor]:
    """Parameters after each round: those who arrive, each with the steps that it has trained, and torch's SGD as outer optimizer."""
    networks = [problem.model("float64") for _ in range(3)]
    inner = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in networks]
    theta = [own.detach().clone().requires_grad_() for own in networks[0].parameters()]
    sgd, found = torch.optim.SGD(theta, outer[0], outer[1], nesterov=outer[1] > 0), []
    for members in rounds:
        for rank, steps in members.items():
            for step in steps:
                inputs, labels = problem.own_batch(step, rank, 3, "float64")
                (cross_entropy(networks[rank](inputs), labels) / merge).backward()
                if step % merge == 0:
                    inner[rank].step()
                    inner[rank].zero_grad()
        total = sum(map(len, members.values()))
        with torch.no_grad():
            for place, own in enumerate(theta):
                own.grad = sum((own - [*networks[rank].parameters()][place]) * (len(steps) / total) for rank, steps in members.items())
        sgd.step()
        with torch.no_grad():
            for network in networks:
                for own, agreed in zip(network.parameters(), theta, strict=True):
                    own.copy_(agreed)
        found.append(problem.flat(networks[0]))
    return found


def test_rounds_are_over_those_that_arrive(tmp_path: Path) -> None:
    """A round of all, one with unequal steps, one that a worker dies in, one with a death in the exchange, and one alone."""
    acts = {1: [(5, "synchronize"), (8, "die in exchange")], 2: [(8, "die")]}
    notes = launched(tmp_path, configs=DILOCO, steps=15, acts=acts)
    rounds: list[dict[int, Sequence[int]]] = [
        {0: (1, 2, 3), 1: (1, 2, 3), 2: (1, 2, 3)},
        {0: (4, 5, 6), 1: (4, 5), 2: (4, 5, 6)},
        {0: (7, 8, 9)},  # worker 2 has died before its second step, and worker 1 when all distances were to be summed
        {0: (10, 11, 12)},
        {0: (13, 14, 15)},
    ]
    truth = written_out(rounds, (0.7, 0.9))
    for after, agreed in enumerate(truth, start=1):
        np.testing.assert_allclose(saved(tmp_path, 0, 3 * after) - 0, agreed, rtol=0, atol=1e-12, err_msg=f"round {after}")
    for rank in (1, 2):
        assert np.array_equal(saved(tmp_path, rank, 3), saved(tmp_path, 0, 3))
    assert np.array_equal(saved(tmp_path, 1, 5), saved(tmp_path, 0, 6))
    assert (tmp_path / "0-0-6.txt").read_text() == "0 3 6"
    assert (tmp_path / "0-0-15.txt").read_text() == "0 1 15"
    assert sorted(note.split(";")[0] for note in notes) == [
        f"note: rank {rank} was killed by SIGKILL, and is not started again" for rank in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configs", "merge"), [(DILOCO, 1), ({"k_steps": 3}, 1), ({"k_steps": 3, "begin_step": 1, "elastic_lr": "linear"}, 2)]
)
def test_undisturbed_it_is_plain_local_sgd(configs: dict[str, Any], merge: int, tmp_path: Path) -> None:
    """With all workers there, rounds are those of the same strategy without elastic, also with gradient merge."""
    steps = 8 * merge
    assert launched(tmp_path, configs=configs, steps=steps, merge=merge, alike=merge == 1, acts={}) == []
    ends = [3, 6] if "outer_lr" in configs else [1, 4, 7]  # in updates; plain averaging begins with a round of one
    rounds = [range(merge * begin + 1, merge * end + 1) for begin, end in zip([0, *ends], ends, strict=False)]
    outer = (0.7, 0.9) if "outer_lr" in configs else (1.0, 0.0)
    truth = written_out([dict.fromkeys(range(3), own) for own in rounds], outer, merge)
    for own, agreed in zip(rounds, truth, strict=True):
        for rank in range(3):
            np.testing.assert_allclose(saved(tmp_path, rank, own[-1]), agreed, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_newcomer_has_its_peers_bits(tmp_path: Path) -> None:
    """A worker that is started again continues with its peers' step, and from then on has their Theta, to the bit."""
    notes = launched(tmp_path, restarts=2, configs={**DILOCO, "elastic_lr": "sqrt"}, steps=0, acts={2: [(5, "die")]})
    assert notes[0].startswith("note: rank 2 was killed by SIGKILL, and is started again (1 of 2)")
    steps = sorted(int(path.stem.split("-")[2]) for path in tmp_path.glob("2-1-*.npy"))
    begun = steps[0]  # after the round at whose end it has joined
    assert begun > 3
    assert steps == [*range(begun, begun + 10)]
    for step in range(begun, begun + 10, 3):
        assert np.array_equal(saved(tmp_path, 2, step, life=1), saved(tmp_path, 0, step))
        assert np.array_equal(saved(tmp_path, 1, step), saved(tmp_path, 0, step))
    assert (tmp_path / f"2-1-{begun + 9}.txt").read_text() == f"2 3 {begun + 9}"
    assert (tmp_path / "0-0-6.txt").read_text() == "0 2 6"


@pytest.mark.slow
def test_a_worker_that_is_left_behind_takes_what_the_others_agree_on(tmp_path: Path) -> None:
    """A worker stopped for seconds is taken for dead; when it arrives, its own steps of that time do not count."""
    assert launched(tmp_path, configs=DILOCO, steps=0, acts={2: [(5, "stop")]}) == []
    assert "gone on without worker 2, which takes their parameters: its last " in (tmp_path / "log" / "workerlog.2").read_text()
    assert "gone on without" not in (tmp_path / "log" / "workerlog.0").read_text()
    joint = next(step for step in range(9, 10_000, 3) if (tmp_path / f"0-0-{step}.txt").read_text().split()[1] == "3")
    assert (tmp_path / "0-0-6.txt").read_text() == "0 2 6"
    for after in (0, 3, 6, 9):
        assert np.array_equal(saved(tmp_path, 2, 6 + after), saved(tmp_path, 0, joint + after))
        assert np.array_equal(saved(tmp_path, 1, joint + after), saved(tmp_path, 0, joint + after))


def test_with_the_last_worker_the_job_has_failed(tmp_path: Path) -> None:
    """When nobody is left who knows what the job has learnt, nobody is started again to learn it anew."""
    notes: list[str] = []
    with pytest.raises(WorkerFailed, match="rank 0: was killed by SIGKILL"):
        launched(tmp_path, restarts=3, nproc=1, notes=notes, configs=DILOCO, steps=9, acts={0: [(5, "die")]})
    assert [note.split(";")[0] for note in notes] == ["note: rank 0 was killed by SIGKILL, and is not started again, as no other is left"]
    assert not [*tmp_path.glob("0-1-*")]


@pytest.mark.parametrize(("life", "host"), [("0", "127.0.0.1"), ("1", "127.0.0.1"), pytest.param("0", "[::1]", marks=IPV6)])
def test_workers_that_were_all_started_again_do_not_begin_anew(life: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's first workers begin; later lives without peers that have learnt something do not."""
    from real.elastic.gathering import LIGHTHOUSE, RESTARTS, Gathering, lighthouse
    from real.elastic.workers import Workers

    with lighthouse(host) as address:
        monkeypatch.setenv(LIGHTHOUSE, address)
        monkeypatch.setenv(RESTARTS, life)
        workers = Workers(Gathering("00000", 5.0), Elastic(lr="constant"), rank=0, nominal=1, timeout_s=5.0)
        try:
            with nullcontext() if life == "0" else pytest.raises(WorkerFailed, match="with them what they have learnt"):
                workers.gather()
        finally:
            workers.close()


FLUSHED = """
import torch
from fleetbench import DistributedStrategy, fleet
configs = {"k_steps": 9, "elastic": True, "elastic_lr": "linear"}
merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": False, "remainder": "flush"}}
fleet.init(DistributedStrategy(localsgd=True, localsgd_configs=configs, **merged), timeout_s=3)  # the second worker never comes
network = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(network.weight)
network = fleet.distributed_model(network)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(network.parameters(), lr=1.0))
network(torch.ones(1, 1)).sum().backward()
optimizer.step()
fleet.end_epoch()
fleet.synchronize()
print("weight", network.weight.item(), "of", fleet.worker_num())
"""


def test_what_cannot_be_elastic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lighthouse, nothing is joined; what needs the same trainers throughout is no strategy."""
    from real.elastic.collective import ElasticCollective
    from real.elastic.gathering import Gathering

    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigError, match=r"lighthouse.*\nHINT: start with fleetbench launch --restarts N"):
        Gathering("00000", 5.0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    strategy = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 3, "elastic": True})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE.*how many workers.*\nHINT: .*RANK=0 WORLD_SIZE=4"):
        ElasticCollective(strategy, 5.0)
    for changes in ({"fragments": 3}, {"buffers": "average"}, {"optimizer_state": "average"}):
        with pytest.raises(ConfigError, match=r"elastic and .* exclude each other"):
            DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 3, "elastic": True, **changes})


def test_a_script_that_fails_ends_the_job_by_name(tmp_path: Path) -> None:
    """An error of the configuration would come again: nobody is started again, and the command fails."""
    from real.elastic.launching import launch_elastic

    notes: list[str] = []
    (tmp_path / "script.py").write_text("import sys; sys.exit(2)")
    with pytest.raises(WorkerFailed, match=r"rank \d: ended with exit code 2"):
        launch_elastic(2, [str(tmp_path / "script.py")], restarts=3, log_dir=tmp_path, echo=lambda _: None, say=notes.append)
    assert all("is not started again" in note for note in notes)
