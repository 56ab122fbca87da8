"""Relay: holds every packet that a host sends for the link's latency, for kernels without netem.

It is a separate process, started by the driver. Each host sends into an additional device with the link's token
bucket. The relay reads each frame there, waits, and sends it through the host's interface. So a packet first takes
its time on the wire, and then its latency. Packets that a host receives do not pass the relay.

``python -m real.testbed.latency_relay HOSTS``: HOSTS has descriptors and delays of every host, as JSON. Each
line of standard input is a number of nanoseconds by which the relay shortens all delays from then on.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack

from fleetbench.children import bound

DEVICE = "delay"
"""Name of the device that a host sends into."""
_TUN = "/dev/net/tun"
_NEW_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD: linux/if_tun.h
_FRAMES_WITH_HEADER = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
# TUN_F_CSUM, TUN_F_TSO4: a burst stays one frame, as between virtual Ethernet devices
_LONG_SEGMENTS = 0x01 | 0x02
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # linux/if_packet.h
_TARGET = slice(10, 16)
"""Position of a frame's destination address, after the header of virtio_net."""
_TICK_S = 0.0001
"""Shortest interval in seconds at which the relay looks; it handles the frames of an interval together."""
_PR_SET_TIMERSLACK = 29


def open_device(inside: AbstractContextManager[None]) -> int:
    """Create ``DEVICE`` in the namespace of ``inside``, and return its descriptor; closing it removes the device.

    Raises ``OSError`` if the kernel refuses.
    """
    with inside:
        device = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _NEW_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _FRAMES_WITH_HEADER))
            fcntl.ioctl(device, _SET_OFFLOAD, _LONG_SEGMENTS)
        except OSError:
            os.close(device)
            raise
    return device


def start(
    inside: Callable[[str], AbstractContextManager[None]], interface: str, delays: Mapping[str, Mapping[str, int]]
) -> subprocess.Popen[bytes]:
    """Create every host's device, and start the relay, which ends with this process.

    ``delays``: delay in ns, by host and by the receiver's Ethernet address. Raises ``OSError`` if the kernel
    refuses.
    """
    with ExitStack() as opened:
        hosts = []
        for host, by_address in delays.items():
            device = open_device(inside(host))
            opened.callback(os.close, device)
            with inside(host):
                out = opened.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
                out.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
                out.bind((interface, 0))
            hosts.append((device, out.fileno(), {address.replace(":", ""): ns for address, ns in by_address.items()}))
        command = [sys.executable, "-P", "-m", "real.testbed.latency_relay", json.dumps(hosts)]
        files = [file for device, out, _ in hosts for file in (device, out)]
        return subprocess.Popen(bound(command), stdin=subprocess.PIPE, pass_fds=files)


def relay(hosts: list[tuple[int, int, dict[bytes, int]]], told: int) -> None:
    """Forward each host's frames after the delay of their receiver, until the input ``told`` ends."""
    buffer = bytearray(1 << 17)
    view = memoryview(buffer)
    waiting: list[tuple[int, int, int, bytes]] = []  # time due in ns, order of arrival, descriptor to write to, frame
    order = held_less_ns = 0
    by_device = {device: (out, delays) for device, out, delays in hosts}
    for device in by_device:
        os.set_blocking(device, False)
    while True:
        timeout_s = max(0.0, (waiting[0][0] - time.monotonic_ns()) * 1e-9) if waiting else None
        ready, _, _ = select.select([*by_device, told], [], [], timeout_s)
        for device in ready:
            if device == told:
                lines = os.read(told, 1 << 12).split()
                if not lines:
                    return
                held_less_ns = max(0, held_less_ns + sum(map(int, lines)))
                continue
            out, delays = by_device[device]
            try:
                while True:
                    frame = bytes(view[: os.readv(device, [buffer])])
                    order += 1
                    held_ns = max(0, delays.get(frame[_TARGET], 0) - held_less_ns)
                    heapq.heappush(waiting, (time.monotonic_ns() + held_ns, order, out, frame))
            except BlockingIOError:  # the device is empty
                pass
        now = time.monotonic_ns()
        while waiting and waiting[0][0] <= now:
            _, _, out, frame = heapq.heappop(waiting)
            os.write(out, frame)
        time.sleep(_TICK_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted driver ends it, after its workers
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    relay(
        [(device, out, {bytes.fromhex(address): ns for address, ns in delays.items()}) for device, out, delays in json.loads(sys.argv[1])],
        sys.stdin.fileno(),
    )
