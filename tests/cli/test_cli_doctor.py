"""``fleetbench doctor``: what it sees, compared with what is really there."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import fork_command

from fleetbench.cli import doctor
from fleetbench.cli.doctor import Findings


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The findings as JSON; another process, because importing torch sets environment variables."""
    folder = tmp_path_factory.mktemp("doctor")
    assert fork_command(["doctor", "--json"], folder / "said", folder).wait(100) == 0
    found: dict[str, object] = json.loads((folder / "said").read_text(encoding="utf-8"))
    return found


def test_every_section_is_there(findings: dict[str, dict[str, dict[str, str]]]) -> None:
    """Versions, machine, torch and network, with the facts that a report of a problem needs."""
    sections = findings["sections"]
    assert {"versions", "host", "torch", "network"} <= set(sections)
    assert sections["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"CUDA", "NCCL", "gloo"} <= set(sections["torch"])
    assert set(psutil.net_if_addrs()) <= set(sections["network"])
    assert sections["network"]["host name"] == socket.gethostname()


def test_a_missing_gpu_is_skipped_by_name(findings: dict[str, Any]) -> None:
    """Either CUDA is there with its devices, or their absence is listed."""
    assert (findings["sections"]["torch"]["CUDA"] == "not available") == ("no GPU" in findings["skipped"])


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_a_containers_quota_is_in_cores(text: str, cores: float | None, tmp_path: Path) -> None:
    """cpu.max holds microseconds of a period."""
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert doctor.quota(path) == cores
    assert doctor.quota(tmp_path / "absent") is None


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load above half of the cores spoils step times."""
    for load, warned in ((1000.0, True), (0.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        findings = Findings()
        doctor.look_at_host(findings)
        assert any("busy" in text for text in findings.warnings) == warned
