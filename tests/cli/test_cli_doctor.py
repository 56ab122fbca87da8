"""``fleetbench doctor``: what it sees, compared with what is really there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleetbench.cli import examination, network_findings
from fleetbench.cli.findings import Findings
from fleetbench.cli.network_findings import gloo_interface, infiniband_adapters, is_listening, look_at_network, nccl_interfaces
from fleetbench.cli.rank_findings import rank_facts, rank_warnings


@pytest.fixture(scope="module")
def findings() -> dict[str, object]:
    """The findings as JSON; another process, because importing torch sets environment variables."""
    done = subprocess.run([sys.executable, "-m", "fleetbench", "doctor", "--json"], capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_section_is_there(findings: dict[str, dict[str, dict[str, str]]]) -> None:
    """Versions, machine, torch, network and limits, with the facts that a report of a problem needs."""
    sections = findings["sections"]
    assert {"versions", "host", "torch", "network", "limits"} <= set(sections)
    assert sections["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"CUDA", "NCCL", "gloo"} <= set(sections["torch"])
    assert set(psutil.net_if_addrs()) <= set(sections["network"])
    assert {"gloo would take", "NCCL would take", "InfiniBand", "port 29500"} <= set(sections["network"])
    assert {"open files", "processes", "locked memory"} <= set(sections["limits"])


def test_a_missing_gpu_is_skipped_by_name(findings: dict[str, list[str]]) -> None:
    """Either the GPUs are listed, or their absence is."""
    assert ("gpu" in findings["sections"]) != ("no GPU" in findings["skipped"])


def test_a_listening_port_is_seen_on_any_address() -> None:
    """A listener on loopback makes the port taken; closing it frees it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert is_listening(port)
    assert not is_listening(port)


def test_gloo_takes_the_interface_that_the_variable_names() -> None:
    """The variable wins, and an interface that is not there is no interface."""
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "lo"})[0] == "lo"
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "absent0"})[0] is None


def test_gloo_else_takes_the_host_names_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that owns the address the host name resolves to; loopback where it resolves to none of ours."""
    monkeypatch.setattr(network_findings, "_addresses", lambda _: ["203.0.113.77", "127.0.0.1"])
    assert gloo_interface({})[0] == "lo"
    monkeypatch.setattr(network_findings, "_addresses", lambda _: ["203.0.113.77"])
    assert gloo_interface({}) == ("lo", f"the host name {socket.gethostname()} has no address of this machine")


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_a_containers_quota_is_in_cores(text: str, cores: float | None, tmp_path: Path) -> None:
    """cpu.max holds microseconds of a period."""
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert examination.cpu_quota(path) == cores
    assert examination.cpu_quota(tmp_path / "absent") is None


def test_gpus_are_listed_with_their_utilisation() -> None:
    """One line of nvidia-smi a GPU."""
    listing = "0, NVIDIA H100, 37, 1024, 81559\n1, NVIDIA H100, 0, 0, 81559\n"
    assert examination.gpu_facts(listing) == {
        "0": "NVIDIA H100, 37 % busy, 1024 of 81559 MiB used",
        "1": "NVIDIA H100, 0 % busy, 0 of 81559 MiB used",
    }


def test_a_disabled_infiniband_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL over sockets, beside an adapter, is most often a mistake; without an adapter it is not."""
    _adapter(tmp_path, "mlx5_0", "4: ACTIVE")
    monkeypatch.setattr(network_findings, "INFINIBAND", tmp_path)
    for environment, warned in (({"NCCL_IB_DISABLE": "1"}, True), ({}, False)):
        findings = Findings()
        look_at_network(findings, environment)
        assert any("InfiniBand" in text for text in findings.warnings) == warned
        assert findings.sections["network"]["InfiniBand"].startswith("mlx5_0 (port 1")


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load above half of the cores spoils step times."""
    for load, warned in ((1000.0, True), (0.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        findings = Findings()
        examination._look_at_host(findings)
        assert any("busy" in text for text in findings.warnings) == warned


NAMES = ["lo", "docker0", "eth0", "eth1", "ib0", "ib1", "virbr0"]


@pytest.mark.parametrize(
    ("names", "variable", "taken"),
    [
        (NAMES, None, ["ib0", "ib1"]),
        (["lo", "docker0", "eth0", "eth1", "virbr0"], None, ["eth0", "eth1"]),
        (["lo", "docker0", "virbr0"], None, ["docker0"]),
        (["lo", "virbr0"], None, ["lo"]),
        (["virbr0"], None, ["virbr0"]),
        ([], None, []),
        (NAMES, "eth", ["eth0", "eth1"]),
        (NAMES, "eth1,ib", ["eth1", "ib0", "ib1"]),
        (NAMES, "=eth", []),
        (NAMES, "=eth1", ["eth1"]),
        (NAMES, "^ib,docker,lo", ["eth0", "eth1", "virbr0"]),
        (NAMES, "^=eth0", ["lo", "docker0", "eth1", "ib0", "ib1", "virbr0"]),
    ],
)
def test_nccl_takes_interfaces_by_its_own_rules(names: list[str], variable: str | None, taken: list[str]) -> None:
    """As its documentation of NCCL_SOCKET_IFNAME says: prefixes, ``=`` for whole names, ``^`` for all others; InfiniBand first."""
    assert nccl_interfaces({} if variable is None else {"NCCL_SOCKET_IFNAME": variable}, names)[0] == taken


def _adapter(root: Path, name: str, state: str) -> None:
    port = root / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("state", state), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
        (port / file).write_text(f"{text}\n")


def test_infinibands_ports_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's words for state, rate and link layer; an adapter without an active port carries nothing for NCCL."""
    assert infiniband_adapters(tmp_path / "absent") == {}
    _adapter(tmp_path, "mlx5_0", "1: DOWN")
    monkeypatch.setattr(network_findings, "INFINIBAND", tmp_path)
    for active in (False, True):
        if active:
            _adapter(tmp_path, "mlx5_1", "4: ACTIVE")
        findings = Findings()
        look_at_network(findings, {})
        assert any("no port of theirs is active" in text for text in findings.warnings) != active
        assert findings.sections["network"]["NCCL would take"].startswith("mlx5_1 by verbs") == active
    assert infiniband_adapters(tmp_path)["mlx5_1"] == "(port 1: 4: ACTIVE, 200 Gb/sec (4X HDR), InfiniBand)"


def test_a_port_that_may_be_taken_at_any_time_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives outgoing connections numbers from a range; a rendezvous in it is a matter of luck."""
    path = tmp_path / "range"
    monkeypatch.setattr(network_findings, "OUTGOING", path)
    for text, warned in (("32768\t60999\n", False), ("1024 65535\n", True)):
        path.write_text(text)
        findings = Findings()
        look_at_network(findings, {})
        assert any("outgoing" in warning for warning in findings.warnings) == warned


ENOUGH = {"open files": 65536, "processes": -1, "locked memory": -1}


@pytest.mark.parametrize(
    ("soft", "quota", "shared", "infiniband", "warned"),
    [
        ({}, None, 2**30, True, None),
        ({"open files": 256}, None, 2**30, False, "open files"),
        ({"processes": 512}, None, 2**30, False, "ulimit -u"),
        ({}, 100, 2**30, False, "container"),
        ({}, None, 2**20, False, "shared memory"),
        ({}, None, None, False, None),
        ({"locked memory": 65536}, None, 2**30, True, "locked"),
        ({"locked memory": 65536}, None, 2**30, False, None),
    ],
)
def test_limits_that_will_stop_a_job_are_warned_of(
    soft: dict[str, int], quota: int | None, shared: int | None, infiniband: bool, warned: str | None
) -> None:
    """One limit too low gives one warning that names it; enough of everything gives none."""
    found = examination.limit_warnings({**ENOUGH, **soft}, quota, shared_free=shared, has_infiniband=infiniband)
    assert len(found) == (warned is not None)
    assert all(str(warned) in text for text in found)


@pytest.mark.parametrize(("text", "num"), [("4194304\n", 4194304), ("max\n", None)])
def test_a_containers_processes_are_counted(text: str, num: int | None, tmp_path: Path) -> None:
    """pids.max is a number, or max."""
    path = tmp_path / "pids.max"
    path.write_text(text)
    assert examination.process_quota(path) == num
    assert examination.process_quota(tmp_path / "absent") is None


def _rank(host: str, torch: str = "2.13.0", gloo: str | None = "eth0") -> dict[str, object]:
    return {"host": host, "gloo": gloo, "versions": {"torch": torch, "python": "3.11.9", "fleetbench": "0.1.0"}}


def test_ranks_that_do_not_fit_are_named() -> None:
    """Another version, the loopback among several hosts, and a clock that is off by more than it may be wrong."""
    told = [_rank("a"), _rank("b", torch="2.12.0"), _rank("c", gloo="lo")]
    clocks = [(0, 0), (30_000_000, 25_000_000), (-30_000_000, 50_000)]
    versions, loopback, clock = rank_warnings(told, clocks)
    assert "rank 1 on b has torch 2.12.0, rank 0 has 2.13.0" in versions
    assert "rank 2 on c would use the loopback" in loopback
    assert "the clock of rank 2 on c is -30.0 ms" in clock
    assert rank_facts(told, clocks)["1"] == "b, gloo over eth0, clock +30.000 ms (at most 25.000 ms wrong)"
    assert rank_warnings([_rank("a", gloo="lo"), _rank("a", gloo="lo")], [(0, 0), (0, 1)]) == []


def test_ranks_of_one_machine_have_one_clock() -> None:
    """Under torchrun rank 0 alone prints, every rank is there, and the measured offset is nothing within its own error."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fleetbench",
        "doctor",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    ranks = json.loads(done.stdout)["sections"]["ranks"]
    assert list(ranks) == ["0", "1"]
    found = re.search(r"clock ([+-][\d.]+) ms \(at most ([\d.]+) ms wrong\)", ranks["1"])
    assert found is not None
    assert abs(float(found[1])) <= float(found[2])
    assert float(found[2]) < 50
