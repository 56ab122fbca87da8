"""Who is to blame for the end of a launch; and which interface leads to the other nodes of a job."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from fleetbench.errors import EnvironmentLacks
from real.processes import joining
from real.processes.joining import interface_towards, is_loopback, own_among
from real.processes.roles import Role


@pytest.mark.parametrize(
    ("num_devices", "visible", "launcher", "backend"),
    [
        (0, None, "torchrun", "gloo"),
        (1, None, "torchrun", "gloo"),
        (1, "1", "slurm", "nccl"),
        (2, None, "torchrun", "nccl"),
        (2, None, "none", "gloo"),
    ],
    ids=["no device", "one device for two", "each sees its own", "a device each", "started alone"],
)
def test_nccl_carries_trainers_that_have_a_device_each(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, visible: str | None, launcher: str, backend: str
) -> None:
    """The others meet on gloo, wherever their tensors are."""
    asked: list[str] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: asked.append(backend))
    role = Role(kind="trainer", rank=0, trainers=2, trainers_per_node=2, launcher=launcher)  # type: ignore[arg-type]  # a parameter's
    joining.join(role, timedelta(seconds=1))
    assert asked == [backend]


def test_the_interface_towards_an_address() -> None:
    """Towards the loopback it is the loopback; an unknown name is an error with a hint."""
    assert interface_towards("127.0.0.1", 1) == "lo"
    with pytest.raises(EnvironmentLacks) as caught:
        interface_towards("no-such-host.invalid", 1)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value.hint)


def test_a_name_that_is_the_loopback_here_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host's own name that its system lists under 127.0.1.1; not where it is meant, or somebody has chosen an interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(joining, "interface_towards", lambda *_, **__: "lo")
    with pytest.raises(EnvironmentLacks, match="no other machine comes"):
        joining.take_interface("node0", 1)
    joining.take_interface("localhost", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    joining.take_interface("node0", 1)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("127.0.1.1", True), ("10.0.0.1", False), ("node0", False)],
)
def test_addresses_that_mean_the_machine_itself(host: str, is_it: bool) -> None:
    """Names other than localhost may mean any machine."""
    assert is_loopback(host) == is_it


def test_this_machine_is_found_among_hosts() -> None:
    """Addresses of this machine's interfaces, and no others."""
    assert own_among(["192.0.2.1", "127.0.0.1", "no-such-host.invalid"]) == [1]
