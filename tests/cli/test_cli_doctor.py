"""``fleetbench doctor``: what it sees, compared with what is really there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from processes import fork_command

from fleetbench.cli.main import main
from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.why.interfaces import Host, Interface, Port
from fleetbench.why.links import AllReduceTime, InterfaceTime, Links, PairTime
from fleetbench.why.nccl_log import Transports
from real.why import link_test
from real.why.link_test import LinkReport


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The findings as JSON; another process, because importing torch sets environment variables."""
    folder = tmp_path_factory.mktemp("doctor")
    assert fork_command(["doctor", "--json"], folder / "said", folder).wait(100) == 0
    found: dict[str, object] = json.loads((folder / "said").read_text(encoding="utf-8"))
    return found


def test_a_missing_gpu_is_skipped_by_name(findings: dict[str, Any]) -> None:
    """Either CUDA is there with its devices, or their absence is listed."""
    assert (findings["sections"]["torch"]["CUDA"] == "not available") == ("no GPU" in findings["skipped"])


def report() -> LinkReport:
    """What a link test of two hosts with everything may find."""
    interface = Interface(name="enp170s0np0", addresses=("10.0.0.1/24",), mtu=9000, speed=BitsPerSecond(400 * 10**9))
    port = Port(name="mlx5_10:1", link_layer="InfiniBand", state="ACTIVE", rate=BitsPerSecond(400 * 10**9))
    gpus: dict[str, Any] = {"topology": "GPU0 X NV18", "nvlink": BitsPerSecond(3824 * 10**9)}
    hosts = tuple(Host(name=f"gpu-node-{number}", interfaces=(interface,), ports=(port,), **gpus) for number in (17, 18))
    times = tuple(
        AllReduceTime(size_bytes=size, median_s=size / 1e9, num=9, busbw_bytes_per_s=1.9e9, is_correct=size < 2**24)
        for size in (2**16, 2**24)
    )
    links = Links(
        backend="nccl",
        ranks=16,
        hosts=hosts,
        times=times,
        fit=Link(bandwidth=BitsPerSecond(10**10), latency=Nanoseconds(20_000)),
        pairs=(PairTime(hosts=(0, 1), bytes_per_s=1e9),),
        interfaces=(InterfaceTime(name="enp170s0np0", times=times), InterfaceTime(name="ib0", error="timed out connecting")),
    )
    names = ("P2P/CUMEM", "P2P/direct pointer", "NET/IB", "SHM")
    transports = Transports(
        version="2.27.3",
        network="IB",
        devices=tuple(f"mlx5_{number}:1/IB" for number in range(8)),
        connections=dict.fromkeys(names, 128),
        channels=(16,),
        environment={"NCCL_NET_GDR_LEVEL": "LOC"},
    )
    return LinkReport(links=links, transports=transports)


def test_the_link_test_is_shown_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of what is used and what should be, then each remedy."""
    monkeypatch.setattr(link_test, "run_with", lambda *_: report())
    assert main(["doctor", "--network", "--", "srun", "-N2"]) == 0
    said = capsys.readouterr().out
    tables, _, remedies = said.partition("1. ")
    assert max(map(len, tables.splitlines())) <= 80
    for word in ("16 ranks on 2 hosts", "WRONG", "3824 Gbit/s", "gpu-node-17 and 1 more", "GPU0 X NV18", "timed out", "2.27.3"):
        assert word in tables.replace("\n", " "), word
    assert "unset NCCL_NET_GDR_LEVEL" in remedies
    assert "wrong sum" in remedies


def test_the_link_test_can_be_read_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the remedies beside what was found."""
    monkeypatch.setattr(link_test, "run_here", lambda *_: report())
    assert main(["doctor", "--network", "--nproc", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["links"]["ranks"] == 16
    assert told["remarks"][1]["remedy"] == "unset NCCL_NET_GDR_LEVEL"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nproc", "2"], "goes with --network"),
        (["--", "torchrun"], "goes with --network"),
        (["--network", "--"], "no command follows"),
        (["--network", "--nproc", "2", "--", "torchrun"], "says how many ranks"),
        (["--network", "--nproc", "1"], "at least 2"),
    ],
)
def test_bad_usage_of_the_link_test_is_named(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert main(["doctor", *words]) == 2
    assert what in capsys.readouterr().err
