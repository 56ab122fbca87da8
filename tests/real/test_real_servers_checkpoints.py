"""Checkpoints of a server that runs: one that fails is told, and no process ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file
from server_desk import desk
from server_job import ServerThread, job, served
from test_real_servers_training import add, counting

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.servers.server_options import ServerOptions


def test_a_checkpoint_is_of_the_moment_that_was_asked_for(tmp_path: Path) -> None:
    """Its answer comes when it is written."""
    with desk() as server:
        server.enter(0, 1)
        server.say("gradient", 0, server.push([1, 1], [2]), rate=1.0)
        assert server.say("save", 0, [str(tmp_path).encode()]) == [("save", 0)]
        assert server.say("gradient", 1, server.push([5, 5], [2]), rate=1.0) == [("applied", 1)]
        (path,) = tmp_path.iterdir()
        saved = load_file(path)
        assert saved["parameters.0"].tolist() == [-1, -1]
        assert np.array_equal(saved["parameters.1"][:, 0], [0, 0, -1, 0])
        assert server.dense() == [-6, -6]


@pytest.mark.parametrize(
    "error",
    [SafetensorError("No space left on device"), PermissionError("not yours"), MemoryError("no room")],
    ids=["full", "unwritable", "memory"],
)
def test_a_checkpoint_that_cannot_be_written_ends_nobody(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it is told why, the one before stays, nothing is left lying about, and the next one works."""
    from real.servers import checkpoints

    folder = str(tmp_path).encode()
    with desk() as server:
        server.enter(0, 1)
        server.say("save", 0, [folder])
        assert server.said("save") == [b""]
        (path,) = tmp_path.iterdir()
        before = path.read_bytes()

        def fail(_tensors: object, partial: Path, _metadata: object) -> None:
            partial.write_bytes(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "save_file", fail)
            server.say("gradient", 1, server.push([1, 1], []), rate=1.0)
            server.say("save", 0, [folder])
            assert server.said("save") == [str(error).encode()]
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == before
        server.say("save", 0, [folder])
        assert server.said("save") == [b""]
        assert load_file(path)["parameters.0"].tolist() == [-1, -1]


def test_what_a_killed_server_left_half_written_goes(tmp_path: Path) -> None:
    """An hour later, with the next checkpoint of the same server; what is written just now stays, and what another one writes."""
    own, other = "shard-00000-of-00001.safetensors", "shard-00001-of-00002.safetensors"
    for name, age_s in ((f"{own}.1.partial", 4000), (f"{own}.2.partial", 60), (f"{other}.3.partial", 4000)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with desk() as server:
        server.enter(0, 1)
        server.say("save", 0, [str(tmp_path).encode()])
        assert server.said("save") == [b""]
    assert sorted(path.name for path in tmp_path.iterdir()) == [own, f"{own}.2.partial", f"{other}.3.partial"]


def test_there_is_no_checkpoint_before_there_are_parameters(tmp_path: Path) -> None:
    """A server whose first trainer has joined, and has not brought any, writes none."""
    with desk(trainers=1) as server:
        server.join(0)
        assert server.server._save(tmp_path) == ""
        assert list(tmp_path.iterdir()) == []


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Training itself ends well, ``save`` tells the trainer why, and the server, whose parameters are lost, ends with an error."""
    no_folder = tmp_path / "file"
    no_folder.write_text("in the way")
    with job() as running:
        running.threads[0].abandon()
        options = ServerOptions(server=0, servers=1, trainers=1, endpoint=running.endpoints[0], **running.options)  # type: ignore[arg-type]  # as given
        running.threads[0] = ServerThread(options, save_to=no_folder)
        running.threads[0].start()
        model, optimizer, training = counting(running, 0, served())
        with pytest.raises(WorkerFailed, match="the checkpoint could not be written: server 0: "):
            training.save(no_folder)
        add(model, optimizer, 0, 1.0, 1.0)
        training.finish()
        running.reports()
        assert isinstance(running.threads[0].error, EnvironmentLacks)
        assert "does not hold the last checkpoint" in str(running.threads[0].error)
