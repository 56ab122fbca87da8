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
    """Its answer comes when it is written; a request whose answer was lost is done again."""
    with desk() as server:
        server.enter(0, 1)
        server.say("gradient", 0, 3, server.push([1, 1], [2]), rate=1.0)
        assert [head.kind for head in server.say("save", 0, 4, [str(tmp_path).encode()])] == ["saved"]
        assert [head.kind for head in server.say("gradient", 1, 2, server.push([5, 5], [2]), rate=1.0)] == ["applied"]
        (path,) = tmp_path.iterdir()
        saved = load_file(path)
        assert saved["parameters.0"].tolist() == [-1, -1]
        assert np.array_equal(saved["parameters.1"][:, 0], [0, 0, -1, 0])
        assert server.dense() == [-6, -6]
        path.unlink()
        server.say("save", 0, 4, [str(tmp_path).encode()])
        assert server.said("saved") == [b""]
        assert list(tmp_path.iterdir()) == [path]


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
        server.say("save", 0, 3, [folder])
        assert server.said("saved") == [b""]
        (path,) = tmp_path.iterdir()
        before = path.read_bytes()

        def fail(_tensors: object, partial: Path, _metadata: object) -> None:
            partial.write_bytes(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "save_file", fail)
            server.say("gradient", 1, 2, server.push([1, 1], []), rate=1.0)
            server.say("save", 0, 4, [folder])
            assert server.said("saved") == [str(error).encode()]
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == before
        server.say("save", 0, 5, [folder])
        assert server.said("saved") == [b""]
        assert load_file(path)["parameters.0"].tolist() == [-1, -1]


def test_what_a_killed_server_left_half_written_goes(tmp_path: Path) -> None:
    """An hour later, with the next checkpoint of the same server; what is written just now stays, and what another one writes."""
    own, other = "shard-00000-of-00001.safetensors", "shard-00001-of-00002.safetensors"
    for name, age_s in ((f"{own}.1.partial", 4000), (f"{own}.2.partial", 60), (f"{other}.3.partial", 4000)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with desk() as server:
        server.enter(0, 1)
        server.say("save", 0, 3, [str(tmp_path).encode()])
        assert server.said("saved") == [b""]
    assert sorted(path.name for path in tmp_path.iterdir()) == [own, f"{own}.2.partial", f"{other}.3.partial"]


def test_there_is_no_checkpoint_before_there_are_parameters(tmp_path: Path) -> None:
    """The request is answered at once, and says so."""
    with desk(trainers=1) as server:
        server.hello(0)
        server.say("join", 0, 1, [server.spec.to_json()])
        assert [head.kind for head in server.say("save", 0, 2, [str(tmp_path).encode()])] == ["saved"]
        assert server.said("saved") == [b"there are no parameters yet"]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../elsewhere", "{outside}", "link", "link/deeper", "new/../../elsewhere", "{own}2"])
def test_a_trainer_has_a_server_write_below_its_own_folder_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for another place, by whatever way, is told; nothing is written, the server goes on, and below its folder it writes."""
    own, outside = tmp_path / "own", tmp_path / "outside"
    for folder in (own, outside):
        folder.mkdir()
    (own / "link").symlink_to(outside)
    monkeypatch.chdir(own)
    with desk(folder=own) as server:
        server.enter(0, 1)
        asked = name.format(outside=outside, own=own)
        assert [head.kind for head in server.say("save", 0, 3, [asked.encode()])] == ["saved"]
        (why,) = server.said("saved")
        assert f"is not below {own}".encode() in why
        assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "own"]
        assert not list(outside.iterdir())
        server.say("save", 0, 4, [b"new/deeper"])
        assert server.said("saved") == [b""]
        assert len(list((own / "new" / "deeper").iterdir())) == 1


@pytest.mark.parametrize("way", ["init_server", "run_server"])
def test_a_folder_that_the_servers_own_script_names_is_its_own(way: str, tmp_path: Path) -> None:
    """Trainers may ask for a checkpoint there, and in no other folder beside the one that it was started in."""
    with desk(folder=tmp_path / "started") as server:
        if way == "init_server":
            assert not server.server.restore(tmp_path / "named")
        else:
            server.server._writer.every(None, tmp_path / "named")
        server.enter(0, 1)
        for sequence, name, error in ((3, "named", b""), (4, "started/x", b""), (5, "other", b"is not below")):
            server.say("save", 0, sequence, [str(tmp_path / name).encode()])
            assert (tmp_path / name).exists() is not bool(error)


def test_a_trainer_that_may_not_save_there_is_told_and_trains_on(tmp_path: Path) -> None:
    """Its ``save`` raises where the server may write, and the job goes on to its end."""
    with job(folder=tmp_path / "own") as running:
        model, optimizer, training = counting(running, 0, served())
        with pytest.raises(WorkerFailed, match=r"(?s)could not be written: server 0: .*elsewhere is not below .*own"):
            training.save(tmp_path / "elsewhere")
        add(model, optimizer, 0, 1.0, 1.0)
        training.save(tmp_path / "own")
        training.finish()
        running.reports()
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


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
