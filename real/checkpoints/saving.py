"""Saving and loading: every trainer does its part, and either all succeed or none does."""

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetbench.digests import file_digest, reading
from fleetbench.errors import ConfigError
from fleetbench.plan.training import begin_anew, family
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.checkpoint import Draft, last_save, model_part, open_save, read_part
from real.checkpoints.meeting import Meeting
from real.checkpoints.persistables import (
    SHARED,
    Restored,
    Tensors,
    capture,
    decode_progress,
    model_tensors,
    own_part,
    pack_optimizer,
    prefixes,
    put,
    random_state,
    refuse_another_model,
    refuse_misfits,
    refuse_other_optimizers,
    replace,
    restored,
    set_random_state,
    unpack_optimizer,
)
from real.engine.carried import Carried
from real.engine.engine import Engine
from real.engine.outside import refuse_flying
from real.engine.planning import Progress

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
    models = [capture(*each[:2], has_parted=each[2]) for each in zip(engines, progress, has_parted, strict=True)]
    shared: dict[str, Any] = {model_part(number): one.tensors for number, one in enumerate(models)}
    shared[SHARED] = {"models": [one.shared for one in models], "optimizers": packed}
    own = {
        "models": [one.own for one in models],
        "optimizers": packed if engines[0].executor.combination.is_local else [],
        "random": random_state(engines[0].communicators.device),
        "extra": extra,
    }
    put_in_force(meeting, path, shared, {own_part(meeting.rank): own}, {"trainers": meeting.trainers})


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


@torch.no_grad()
def load(engines: Sequence[Engine], meeting: Meeting, path: Path, *, resynchronize: bool) -> Loaded:
    """Continue from a checkpoint of as many models, in the same order.

    Every trainer calls it, between two steps. Raises ``ConfigError``, on all trainers, if the checkpoint does not fit
    one of them; nothing has changed then. Only a plan that would differ is found later, when models before it have
    been restored.
    """
    number = _met(engines, meeting, path)
    optimizers, models = optimizers_of(engines), [engine.model for engine in engines]
    with meeting.together(LOAD):
        save = open_save(path, number)
        where = str(save.folder)
        with reading(where, ANOTHER):
            saved_by = save.manifest["trainers"]
            if saved_by != meeting.trainers and not resynchronize:
                hint = f"start {saved_by}, or restart from the averaged model: fleet.load_persistables(..., resynchronize=True)"
                raise ConfigError("was saved by another number of trainers", where, f"saved by {saved_by}, here {meeting.trainers}", hint)
            shared, own = save.read(SHARED), save.read(own_part(0 if resynchronize else meeting.rank))
            if len(shared["models"]) != len(engines):
                hint = "call fleet.distributed_model for the saved models, in their order, before the load; predicate= loads some of one"
                told = f"saved {len(shared['models'])}, here {len(engines)}"
                raise ConfigError("was saved with another number of models", where, told, hint)
            found: list[Restored] = []
            for index, engine in enumerate(engines):
                tensors, table = save.read(model_part(index)), shared["models"][index]
                its = where if len(engines) == 1 else f"{where}, model {index}"
                if resynchronize:
                    found.append(_anew(engine, meeting, tensors, table, its))
                else:
                    found.append(restored(engine, tensors, table, own["models"][index], its))
            packed = shared["optimizers"] if resynchronize else own["optimizers"] or shared["optimizers"]
            refuse_other_optimizers(models, optimizers, packed, where)
    for engine, (progress, carried, _) in zip(engines, found, strict=True):
        engine.resume(progress, carried, where)
    for optimizer, data in zip(optimizers, packed, strict=True):
        unpack_optimizer(optimizer, data)
    for engine, (_, _, tensors) in zip(engines, found, strict=True):
        replace(engine, tensors)
    if not resynchronize:
        set_random_state(own["random"], engines[0].communicators.device)
    state = found[0].progress.state
    names = (prefix + name for prefix, model in zip(prefixes(engines), models, strict=True) for name in model_tensors(model))
    return Loaded(step=state.next_step - 1, epoch=state.epoch, loaded=tuple(names), extra=own["extra"])


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


def _anew(engine: Engine, meeting: Meeting, tensors: Tensors, shared: Mapping[str, Any], where: str) -> Restored:
    """Return the state from which all trainers restart: the averaged model, with another number of them or another strategy."""
    refuse_another_model(engine.model, tensors, None, where)
    saved = decode_progress(shared["progress"]).state
    same = shared["strategy"] == engine.strategy.changes()
    begun = begin_anew(saved, family(engine.strategy, engine.plan), meeting.rank, same_strategy=same)
    if saved.merged:
        warnings.warn(f"gradients of {saved.merged} steps without an update are dropped", SumsDropped, stacklevel=4)
    if shared["parted"] and DistributedStrategy.from_dict(shared["strategy"]).has_outer:
        what = "updates since the last merge belong to single trainers and are dropped; save at the end of a round"
        warnings.warn(what, SumsDropped, stacklevel=4)
    carried = Carried(origin=tensors, velocity=shared["velocity"] if same else {})
    return Restored(Progress(state=begun, order={}), carried, tensors)


def load_some(engine: Engine, meeting: Meeting, path: Path, predicate: Callable[[str], bool], *, model: int = 0) -> Loaded:
    """Replace the model's tensors that a checkpoint or a file has and ``predicate`` accepts by name.

    ``model``: the model's number, which chooses its part of a checkpoint of several models. Every trainer calls it.
    Raises as ``load`` does.
    """
    number = _met([engine], meeting, path)
    engine.take_over()
    with meeting.together(LOAD):
        file = path if path.is_file() else open_save(path, number).file(model_part(model))
        saved, digest, where = read_part(file), file_digest(file), str(file)
        own = model_tensors(engine.model)
        chosen = {name: saved[name] for name in own if name in saved and predicate(name)}
        if not chosen:
            names = f"the checkpoint has {', '.join(list(saved)[:3])}, the model {', '.join(list(own)[:3])}"
            raise ConfigError("has no tensor that is both wanted and in the model", where, names, "let predicate(name) be true for some")
        refuse_misfits(own, chosen, where)
        refuse_flying(chosen, engine.executor)
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
