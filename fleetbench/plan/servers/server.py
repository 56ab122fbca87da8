"""Server: applies what trainers push, in the order in which it comes or round by round, and sends what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetbench.plan.events import Event, Message
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.issue import Issue
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import ServerState


def on_server(rules: ServerRules, state: ServerState, event: Event) -> tuple[ServerState, Operations]:
    """What a server starts now. A message's ``rank`` is the trainer's."""
    if state.stopped or not isinstance(event, Message):
        return state, ()
    issue = Issue(state.next_id)
    if event.kind in _HEARD:
        state = _HEARD[event.kind](rules, state, event, issue)
    return state._replace(next_id=issue.next_id), issue.operations


def staleness(state: ServerState, push: Message) -> int:
    """Updates between what a push was computed from and the push; ``state`` is the one before it."""
    return state.version - push.version


def _present(rules: ServerRules, state: ServerState) -> tuple[int, ...]:
    gone = {*state.left, *state.lost}
    return tuple(rank for rank in range(rules.trainers) if rank not in gone)


def _join(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:  # noqa: ARG001  # messages are heard alike
    rank = event.rank
    state = state._replace(left=_without(state.left, rank), lost=_without(state.lost, rank), met=_without(state.met, rank))
    if state.initialised:
        issue.add(kind="send", group="sender", rank=rank, message="ready")
        return state
    if rank == 0:
        issue.add(kind="send", group="sender", rank=rank, message="blank")
    return state._replace(joining=_with(state.joining, rank))


def _initialise(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:  # noqa: ARG001  # messages are heard alike
    if state.initialised:
        return state
    issue.add(kind="install", payload="parameters")
    for joined in state.joining:
        issue.add(kind="send", group="sender", rank=joined, message="ready")
    return state._replace(initialised=True, joining=())


def _hear_gradient(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:
    if rules.mode == "synchronous":
        return _close_round(rules, state._replace(arrived=_with(state.arrived, event.rank)), issue)
    issue.add(kind="update", payload="gradient", rank=event.rank, count=event.count)
    issue.add(kind="send", group="sender", rank=event.rank, message="applied", count=event.count)
    return state._replace(version=state.version + 1)


def _hear_delta(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:  # noqa: ARG001  # messages are heard alike
    issue.add(kind="accumulate", payload="delta", rank=event.rank, count=event.count)
    issue.add(kind="mark", payload="rows", rank=event.rank)
    issue.add(kind="send", group="sender", rank=event.rank, message="applied", count=event.count)
    return state._replace(version=state.version + 1)


def _answer_pull(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:  # noqa: ARG001  # messages are heard alike
    issue.add(kind="send", payload="parameters", group="sender", rank=event.rank, message="parameters")
    return state


def _answer_look_up(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:  # noqa: ARG001  # messages are heard alike
    issue.add(kind="send", payload="rows", group="trainer", rank=event.rank, message="rows")
    return state


def _meet(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:
    state = _close_round(rules, state._replace(met=_with(state.met, event.rank)), issue)
    return _leave_barrier(rules, state, issue)


def _leave(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:
    state = state._replace(left=_with(state.left, event.rank), lost=_without(state.lost, event.rank))
    return _go_on_without(rules, state, event.rank, issue)


def _close_round(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    """Synchronous: once all that are present have sent a gradient, one update by the mean of them. Who stands at a barrier owes none."""
    if not state.arrived or not set(_present(rules, state)) <= {*state.arrived, *state.met}:
        return state
    num = len(state.arrived)
    issue.add(kind="update", payload="gradient", divisor=num, count=num)
    for rank in state.arrived:
        issue.add(kind="send", payload="parameters", group="sender", rank=rank, message="parameters")
    return state._replace(arrived=(), version=state.version + 1)


def _leave_barrier(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    if not state.met or not set(_present(rules, state)) <= set(state.met):
        return state
    for rank in state.met:
        issue.add(kind="send", group="sender", rank=rank, message="barrier")
    return state._replace(met=())


def _go_on_without(rules: ServerRules, state: ServerState, rank: int, issue: Issue) -> ServerState:
    """A trainer has gone: nobody waits for it any longer, and behind the last one the server ends."""
    state = state._replace(joining=_without(state.joining, rank), met=_without(state.met, rank))
    state = _leave_barrier(rules, _close_round(rules, state, issue), issue)
    if not _present(rules, state):
        issue.add(kind="stop")
        return state._replace(stopped=True)
    return state


def _lose(rules: ServerRules, state: ServerState, event: Message, issue: Issue) -> ServerState:
    """A trainer has fallen silent: asynchronous training goes on without it, synchronous training ends and names it.

    So does all training where it is trainer 0, and the parameters, which nobody else brings, are not there yet.
    """
    rank = event.rank
    if rank in state.lost or rank in state.left:
        return state
    state = state._replace(lost=_with(state.lost, rank))
    if rules.mode == "synchronous" or (rank == 0 and not state.initialised):
        issue.add(kind="stop", rank=rank)
        return state._replace(stopped=True)
    issue.add(kind="drop", rank=rank)
    return _go_on_without(rules, state, rank, issue)


def _with(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return ranks if rank in ranks else tuple(sorted((*ranks, rank)))


def _without(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(other for other in ranks if other != rank)


_HEARD: Mapping[str, Callable[[ServerRules, ServerState, Message, Issue], ServerState]] = {
    "join": _join,
    "initial": _initialise,
    "gradient": _hear_gradient,
    "delta": _hear_delta,
    "pull": _answer_pull,
    "look_up": _answer_look_up,
    "barrier": _meet,
    "leave": _leave,
    "lost": _lose,
}
