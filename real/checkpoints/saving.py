"""Saving and loading: every trainer does its part, and either all succeed or none does."""

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetbench.config import decode
from fleetbench.digests import file_digest, reading
from fleetbench.errors import ConfigError
from fleetbench.plan.training import begin_anew, family
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.checkpoint import MODEL, Draft, Save, last_save, numbered, open_save, read_part
from real.checkpoints.meeting import Meeting
from real.checkpoints.persistables import (
    SHARED,
    Restored,
    capture,
    decode_progress,
    model_tensors,
    own_part,
    pack_optimizer,
    prefixes,
    put,
    read,
    refuse_another_model,
    refuse_another_strategy,
    refuse_misfits,
    refuse_other_optimizers,
    restore,
)
from real.communication.communicators import strategy_digest
from real.engine.carried import Carried
from real.engine.engine import Engine
from real.engine.planning import Progress
from real.engine.refusals import refuse_open

SAVE = "fleet.save_persistables"
LOAD = "fleet.load_persistables"

ANOTHER = "take another checkpoint"
SEVERAL_FOLDERS = "give every trainer the same folder"


class SumsDropped(UserWarning):
    """Warns that state of trainers is dropped: gradients not yet applied, or an outer optimizer's round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of ``fleet.load_persistables``."""

    step: int = 0
    """Last finished step; the loop continues with the next one. 0 if only part of a model was loaded. With
    several models, the first one's."""
    epoch: int = 0
    """Number of finished epochs, as passed to ``fleet.end_epoch``."""
    loaded: tuple[str, ...] = ()
    """Names of the model's parameters and buffers that were replaced; of all of several models, such as ``1.weight``."""
    missing: tuple[str, ...] = ()
    """Names of the model's parameters and buffers that were not loaded."""
    left_over: tuple[str, ...] = ()
    """Names of the checkpoint's tensors that were not wanted or that the model does not have."""
    extra: Any = None
    """Object that the script saved as ``extra``."""


def save(engines: Sequence[Engine], meeting: Meeting, path: Path, *, extra: Any) -> None:
    """Save the training, between two steps of every model, into ``path``, which all trainers must see.

    Every trainer calls it. The first model's parts hold all optimizers, and ``extra``.

    Raises ``ConfigError`` in the middle of a step, or if trainers save at different steps or paths;
    ``EnvironmentLacks`` if nothing can be written. The previous save then stays in force.
    """
    progress = [engine.progress(SAVE) for engine in engines]
    for engine in engines:
        engine.take_over()
    meeting.meet(SAVE)
    meeting.same(str(path), "saves to another folder", SAVE, SEVERAL_FOLDERS)
    states = json.dumps([own.state.to_dict() for own in progress], sort_keys=True)
    meeting.same(states, "is at another step", SAVE, "save after the same step on every trainer")
    has_parted = [any(own) for own in zip(*meeting.gather([int(engine.executor.has_parted) for engine in engines]), strict=True)]
    packed = [pack_optimizer(one, *(engine.model for engine in engines)) for one in optimizers_of(engines)]
    shared, own_parts, told = dict[str, Any](), dict[str, Any](), list[dict[str, Any]]()
    for number, engine in enumerate(engines):
        model = number if len(engines) > 1 else None
        mine = ([], None) if number else (packed, extra)
        parts, own, manifest = capture(engine, progress[number], *mine, has_parted=has_parted[number])
        shared |= {numbered(name, model): part for name, part in parts.items()}
        own_parts[numbered(own_part(meeting.rank), model)] = own
        told.append(manifest)
    put_in_force(meeting, path, shared, own_parts, {"trainers": meeting.trainers, **({"models": told} if told[1:] else told[0])})


def optimizers_of(engines: Sequence[Engine]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of all models, each once: one optimizer may hold several models."""
    return [*{id(one): one for engine in engines for one in engine.optimizers}.values()]


def put_in_force(meeting: Meeting, path: Path, shared: Mapping[str, Any], own: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Write a save into ``path``: rank 0 ``shared`` parts and the manifest ``told``, each trainer its ``own`` parts.

    Parts are given by name. Every trainer calls it. Raises ``EnvironmentLacks`` if nothing can be written; the previous
    save then stays in force.
    """
    keeps = meeting.rank == 0
    draft = Draft(path, 1 + in_force(meeting, path, SAVE))
    try:
        with meeting.together(SAVE):
            if keeps:
                draft.begin()
        with meeting.together(SAVE):
            parts = {**(shared if keeps else {}), **own}
            written = {name: draft.write(name, part) for name, part in parts.items()}
        digests = meeting.texts(json.dumps(written))
    except Exception:
        if keeps:
            draft.discard()
        raise
    with meeting.together(SAVE):  # as soon as one trainer knows that it is in force, it must stay
        if keeps:
            manifest = {**told, "versions": {"torch": str(torch.__version__)}}
            draft.commit(manifest, {name: digest for text in digests for name, digest in json.loads(text).items()})
    if keeps:
        draft.sweep()


def load(engines: Sequence[Engine], meeting: Meeting, path: Path, *, resynchronize: bool) -> Loaded:
    """Continue from a checkpoint of as many models, in the same order.

    Every trainer calls it, between two steps. Raises ``ConfigError``, on all trainers, if the checkpoint does not fit
    one of them; nothing has changed then. Only a plan that would differ is found later, when models before it have
    been restored.
    """
    number = _met(engines, meeting, path)
    found: list[Restored] = []
    optimizers = optimizers_of(engines)
    with meeting.together(LOAD):
        save = open_save(path, number)
        with reading(save.folder, ANOTHER):
            if save.num_models != len(engines):
                hint = "call fleet.distributed_model for the saved models, in their order, before the load; predicate= loads some of one"
                told = f"saved {save.num_models}, here {len(engines)}"
                raise ConfigError("was saved with another number of models", save.where, told, hint)
            for index, engine in enumerate(engines):
                found.append((_read_anew if resynchronize else _read)(engine, meeting, save.of(index)))
            refuse_other_optimizers([engine.model for engine in engines], optimizers, found[0].optimizers, save.where)
    for index, engine in enumerate(engines):
        restore(engine, found[index], [] if index else optimizers, save.of(index).where)
    state = found[0].progress.state
    return Loaded(
        step=state.next_step - 1,
        epoch=state.epoch,
        loaded=tuple(
            prefix + name for prefix, engine in zip(prefixes(engines), engines, strict=True) for name in model_tensors(engine.model)
        ),
        extra=found[0].extra,
    )


def _met(engines: Sequence[Engine], meeting: Meeting, path: Path) -> int:
    """Meet between two steps for a load from ``path``, and return the number of its save in force."""
    for engine in engines:
        engine.progress(LOAD)
    meeting.meet(LOAD)
    meeting.same(str(path), "loads from another folder", LOAD, SEVERAL_FOLDERS)
    return in_force(meeting, path)


def in_force(meeting: Meeting, path: Path, where: str = LOAD) -> int:
    """Return the number of the last save in force that any trainer sees; 0 if none, or for a file."""
    with meeting.together(where):
        last = 0 if path.is_file() else last_save(path)
    return max(number for (number,) in meeting.gather([last]))


def _read(engine: Engine, meeting: Meeting, save: Save) -> Restored:
    """Return this trainer's state.

    Raises ``ConfigError`` if the number of trainers or the strategy has changed.
    """
    manifest, where = save.manifest, save.where
    if manifest["trainers"] != meeting.trainers:
        what = "was saved by another number of trainers"
        hint = f"start {manifest['trainers']}, or restart from the averaged model: fleet.load_persistables(..., resynchronize=True)"
        raise ConfigError(what, where, f"saved by {manifest['trainers']}, here {meeting.trainers}", hint)
    refuse_another_strategy(manifest, engine.strategy, where)
    return read(engine, save, meeting.rank)


def _read_anew(engine: Engine, meeting: Meeting, save: Save) -> Restored:
    """Return the state from which all trainers restart, with another number of them or another strategy.

    It is rank 0's state with the averaged model.
    """
    manifest, where = save.manifest, save.where
    model, shared = save.read(MODEL), save.read(SHARED)
    refuse_another_model(engine.model, model, None, where)
    saved = decode_progress(shared["progress"]).state
    same = manifest["strategy_digest"] == strategy_digest(engine.strategy)
    begun = begin_anew(saved, family(engine.strategy, engine.plan), meeting.rank, same_strategy=same)
    if saved.merged:
        warnings.warn(f"gradients of {saved.merged} steps without an update are dropped", SumsDropped, stacklevel=4)
    if manifest["parted"] and decode(manifest["strategy"], DistributedStrategy, where).has_outer:
        what = "updates since the last merge belong to single trainers and are dropped; save at the end of a round"
        warnings.warn(what, SumsDropped, stacklevel=4)
    return Restored(
        carried=Carried(velocity=shared["velocity"] if same else {}),
        progress=Progress(state=begun, order={}),
        model=model,
        optimizers=shared["optimizers"],
        extra=save.read(own_part(0))["extra"],
    )


def load_some(engine: Engine, meeting: Meeting, path: Path, predicate: Callable[[str], bool], *, model: int = 0) -> Loaded:
    """Replace the model's tensors that a checkpoint or a file has and ``predicate`` accepts by name.

    ``model``: the model's number, which chooses its part of a checkpoint of several models. Every trainer calls it.
    Raises as ``load`` does.
    """
    number = _met([engine], meeting, path)
    engine.take_over()
    with meeting.together(LOAD):
        file = path if path.is_file() else open_save(path, number).of(model).file(MODEL)
        saved, digest, where = read_part(file), file_digest(file), str(file)
        own = model_tensors(engine.model)
        chosen = {name: saved[name] for name in own if name in saved and predicate(name)}
        if not chosen:
            names = f"the checkpoint has {', '.join(list(saved)[:3])}, the model {', '.join(list(own)[:3])}"
            raise ConfigError("has no tensor that is both wanted and in the model", where, names, "let predicate(name) be true for some")
        refuse_misfits(own, chosen, where)
        refuse_open(engine.has_agreed or not engine.executor.steps_outside, 0, LOAD)
    meeting.same(digest, "loads other tensors", LOAD, "give every trainer the same file")
    meeting.same("\n".join(chosen), "wants other tensors", LOAD, "let predicate be the same on every trainer")
    put(engine, chosen)
    loaded = Loaded(
        loaded=tuple(chosen),
        missing=tuple(name for name in own if name not in chosen),
        left_over=tuple(name for name in saved if name not in chosen),
    )
    if meeting.rank == 0:
        said = [f"loaded {len(chosen)} of the model's {len(own)} tensors from {where}"]
        lists = (("not loaded", loaded.missing), ("left over", loaded.left_over))
        said += [f"{what}: {', '.join(names)}" for what, names in lists if names]
        print("\n".join(said), file=sys.stderr)  # noqa: T201  # a start from another model's parameters must show this
    return loaded
