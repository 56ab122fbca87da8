"""NCCL's log, read: each test writes the lines that NCCL would print, with hosts and numbers of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fleetbench.config import decode, encode
from fleetbench.why.nccl_log import Transports, read_nccl_log, remarks

PREFIXES = ("", "[rank3]: ", "[1,3]<stdout>:", "2026-03-01T10:00:00.123Z ", "3: [default3]:")
LAST = "comm 0x5581aa00 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0"


def log(*said: str, prefix: str = "", version: str = "2.21.5") -> str:
    """A job's output: what NCCL says on two ranks of one host, between other lines."""
    starts = [f"{prefix}alpha:{pid}:{pid + 90} [{gpu}] NCCL INFO " for gpu, pid in enumerate((700, 701))]
    first = ["epoch 1: loss 0.7, via NET/IB", f"{prefix}NCCL version {version}+cuda12.4"]
    return "\n".join([*first, *(start + line for line in said for start in starts), "Using network nobody's"])


def channels(via: str, num: int = 2) -> Iterable[str]:
    """Lines of connected channels."""
    return (f"Channel {number:02d}/0 : 0[0] -> 1[1] {via}" for number in range(num))


IB = (
    "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB/SHARP [RO]; OOB eth7:10.20.0.5<0>",
    "Using network IB",
    "NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)",
    LAST,
)
SOCKET = (
    "NET/IB : No device found.",
    "NET/Socket : Using [0]eth7:10.20.0.5<0> [1]eth8:10.21.0.5<0>",
    "Using network Socket",
    LAST,
)
END = ("Connected all rings, use ring PXN 0 GDR 1", "Connected all trees", "Connected NVLS tree")
COUNTS = "16 coll channels, 16 collnet channels, 16 nvls channels, 16 p2p channels, 2 p2p channels per peer"
FAST = (*channels("via P2P/CUMEM/read"), *channels("[send] via NET/IB/0(2)/GDRDMA/Shared"))
RIGHT = (*IB, *FAST, *END, COUNTS)


def read(*said: str, prefix: str = "") -> Transports:
    """The log of these lines."""
    found = read_nccl_log(log(*said, prefix=prefix))
    assert found is not None
    assert decode(encode(found), Transports, "") == found
    return found


def what_to_do(found: Transports, nodes: int = 2, *, has_infiniband: bool = True) -> list[str]:
    """The remedies."""
    return [remark.remedy for remark in remarks(found, nodes, has_infiniband)]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_log_where_everything_is_right_gives_no_remark(prefix: str) -> None:
    """Peer to peer inside nodes, GPUDirect RDMA between them, NVLS, many channels; after any prefix."""
    found = read(*RIGHT, prefix=prefix)
    assert (found.version, found.network) == ("2.21.5", "IB")
    assert found.devices == ("mlx5_0:1/IB", "mlx5_3:1/IB/SHARP")
    assert found.connections == {"P2P/CUMEM": 4, "NET/IB/GDRDMA": 4}
    assert (found.channels, found.nvls) == ((16,), "used")
    assert not found.environment
    assert what_to_do(found) == []


@pytest.mark.parametrize("text", ["", "loss 0.3\nNCCL version 2.21.5+cuda12.4", "Using network IB\nvia SHM"])
def test_a_log_without_nccl_gives_nothing(text: str) -> None:
    """NCCL_DEBUG=VERSION and what a script prints itself say nothing of transports."""
    assert read_nccl_log(text) is None


@pytest.mark.parametrize(("variable", "value"), [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC")])
def test_p2p_that_is_off_is_to_be_switched_on(variable: str, value: str) -> None:
    """NCCL up to 2.22 reports NCCL_P2P_DISABLE=1 as a level; both go away with both variables."""
    shared = (*channels("via SHM/direct/direct"), *channels("[send] via NET/IB/0/GDRDMA"))
    found = read(f"{variable} set by environment to {value}", *IB, *shared, COUNTS)
    assert found.connections == {"SHM": 4, "NET/IB/GDRDMA": 4}
    assert what_to_do(found) == ["unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL"]


def test_sockets_are_a_loss_where_there_is_infiniband() -> None:
    """Named is the variable that the log shows, or else how a container sees adapters."""
    lines = (*SOCKET, *channels("[receive] via NET/Socket/0"), *channels("via P2P/IPC"), COUNTS)
    found = read(*lines)
    assert (found.network, found.devices) == ("Socket", ("eth7", "eth8"))
    assert "--device=/dev/infiniband" in what_to_do(found)[0]
    assert what_to_do(found, has_infiniband=False) == what_to_do(found, nodes=1) == []
    for variable, value in (("NCCL_IB_DISABLE", "1."), ("NCCL_NET", "Socket"), ("NCCL_IB_HCA", "mlx5_9")):
        assert what_to_do(read(f"{variable} set by environment to {value}", *lines)) == [f"unset {variable}"]
    allowed = read("NCCL_IB_DISABLE set by environment to 0.", *lines)
    assert "--device=/dev/infiniband" in what_to_do(allowed)[0]


def test_gpudirect_rdma_that_is_off_is_named() -> None:
    """Of any network but sockets; one connection that has it is enough."""
    plain = (*IB, *channels("via P2P/CUMEM"), *channels("[send] via NET/IB/1"), COUNTS)
    assert "nvidia_peermem" in what_to_do(read(*plain))[0]
    limited = read("NCCL_NET_GDR_LEVEL set by environment to LOC", *plain)
    assert what_to_do(limited) == ["unset NCCL_NET_GDR_LEVEL"]
    assert what_to_do(read(*plain, *channels("[receive] via NET/IB/1/GDRDMA"))) == []


def test_nvls_that_is_off_is_to_be_switched_on() -> None:
    """Switched off by a variable, or available without a channel."""
    off = read("NCCL_NVLS_ENABLE set by environment to 0.", *channels("via P2P/CUMEM"))
    assert what_to_do(off) == ["unset NCCL_NVLS_ENABLE"]
    without = COUNTS.replace("16 nvls", "0 nvls")
    assert what_to_do(read(*IB, *channels("via P2P/CUMEM"), without)) == ["NCCL_NVLS_ENABLE=1"]
    old = "NVLS multicast support is not available on dev 0"
    found = read(old, *channels("via P2P/CUMEM"), without)
    assert (found.nvls, what_to_do(found)) == ("unavailable", [])


def test_one_channel_is_a_loss() -> None:
    """Limited by a variable, or by what NCCL finds; the communicators of one process are each counted."""
    one = "1 coll channels, 0 nvls channels, 1 p2p channels, 1 p2p channels per peer"
    found = read(*channels("via P2P/IPC", 1), one, one)
    assert (found.channels, what_to_do(found)) == ((1, 1), ["NCCL_MIN_NCHANNELS=4"])
    limited = read("NCCL_MAX_NCHANNELS set by environment to 1.", one)
    assert what_to_do(limited) == ["unset NCCL_MAX_NCHANNELS"]
    assert read(one, one.replace("1 coll", "8 coll")).channels == (1, 8)
