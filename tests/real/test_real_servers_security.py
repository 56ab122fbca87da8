"""Who may speak to a server, and how much of what is said is kept. One stranger and one port scan of each kind: the rest is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from server_job import TOKEN

from fleetbench.errors import ConfigError
from real.servers.door import Door
from real.servers.leg_servers import LegServers, local_places
from real.servers.links import LinkOptions, Links
from real.servers.security import ENCRYPT, encrypts


@pytest.mark.parametrize(("value", "means"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_encryption_is_asked_for_by_one(value: str | None, means: bool) -> None:
    """Zero, nothing and no variable ask for none."""
    assert encrypts({} if value is None else {ENCRYPT: value}) is means


@pytest.mark.parametrize("value", ["true", "yes", "on", "2", " 1"])
def test_another_word_for_yes_is_not_taken_for_no(value: str, tmp_path: Path) -> None:
    """It is an error that names the variable, before any server of an experiment is started."""
    with pytest.raises(ConfigError, match=ENCRYPT):
        encrypts({ENCRYPT: value})
    with pytest.raises(ConfigError, match=ENCRYPT):
        LegServers(tmp_path / "leg", tmp_path, local_places(1), 1, timeout_s=1.0, startup_timeout_s=1.0, environment={ENCRYPT: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("timeout_s", "silence_ms"), [(1.0, 20_000), (600.0, 600_000), (1e9, 6_553_500)])
def test_a_frame_may_take_as_long_as_the_job_is_patient(timeout_s: float, silence_ms: int) -> None:
    """libzmq would break a connection on which no frame ends for 20 s, again and again, however long the job's own timeout is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, LinkOptions(rank=0, endpoints=("127.0.0.1:9",), token=TOKEN, timeout_s=timeout_s))
    door = Door("127.0.0.1:9", TOKEN, encrypted=False, say=print, timeout_s=timeout_s)
    try:
        for socket in (links._links[0].socket, door._socket):
            assert socket.heartbeat_timeout == silence_ms
            assert socket.heartbeat_ttl == silence_ms
    finally:
        door.close()
        links.close()
        context.destroy(linger=0)
