"""Server: applies what trainers push, in the order in which it comes or round by round, and sends what they ask for."""

from fleetbench.plan.events import Event, Message
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Issue, ServerState


def on_server(rules: ServerRules, state: ServerState, event: Event) -> tuple[ServerState, Operations]:  # noqa: C901  # a branch a message
    """What a server starts now. A message's ``rank`` is the trainer's."""
    if state.stopped or not isinstance(event, Message):
        return state, ()
    issue, rank = Issue(state.next_id), event.rank
    match event.kind:
        case "join":
            state = _join(state, rank, issue)
        case "initial" if not state.initialised:
            issue.add(kind="install", payload="parameters")
            for joined in state.joining:
                issue.add(kind="send", group="sender", rank=joined, message="ready")
            state = state._replace(initialised=True, joining=())
        case "gradient" if rules.mode == "synchronous":
            state = _close_round(rules, state._replace(arrived=_with(state.arrived, rank)), issue)
        case "gradient":
            issue.add(kind="update", payload="gradient", rank=rank, count=event.count)
            issue.add(kind="send", group="sender", rank=rank, message="applied", count=event.count)
            state = state._replace(version=state.version + 1)
        case "delta":
            issue.add(kind="accumulate", payload="delta", rank=rank, count=event.count)
            issue.add(kind="mark", payload="rows", rank=rank)
            issue.add(kind="send", group="sender", rank=rank, message="applied", count=event.count)
            state = state._replace(version=state.version + 1)
        case "pull":
            issue.add(kind="send", payload="parameters", group="sender", rank=rank, message="parameters")
        case "look_up":
            issue.add(kind="send", payload="rows", group="trainer", rank=rank, message="rows")
        case "barrier":
            state = _close_round(rules, state._replace(met=_with(state.met, rank)), issue)
            state = _leave_barrier(rules, state, issue)
        case "leave":
            state = state._replace(left=_with(state.left, rank), lost=_without(state.lost, rank))
            state = _go_on_without(rules, state, rank, issue)
        case "lost" if rank not in (*state.lost, *state.left):
            state = _lose(rules, state, rank, issue)
    return state._replace(next_id=issue.next_id), issue.operations


def _present(rules: ServerRules, state: ServerState) -> set[int]:
    return set(range(rules.trainers)) - {*state.left, *state.lost}


def _join(state: ServerState, rank: int, issue: Issue) -> ServerState:
    state = state._replace(left=_without(state.left, rank), lost=_without(state.lost, rank), met=_without(state.met, rank))
    if state.initialised:
        issue.add(kind="send", group="sender", rank=rank, message="ready")
        return state
    if rank == 0:
        issue.add(kind="send", group="sender", rank=rank, message="blank")
    return state._replace(joining=_with(state.joining, rank))


def _close_round(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    """Synchronous: once all that are present have sent a gradient, one update by the mean of them. Who stands at a barrier owes none."""
    if not state.arrived or not _present(rules, state) <= {*state.arrived, *state.met}:
        return state
    num = len(state.arrived)
    issue.add(kind="update", payload="gradient", divisor=num, count=num)
    for rank in state.arrived:
        issue.add(kind="send", payload="parameters", group="sender", rank=rank, message="parameters")
    return state._replace(arrived=(), version=state.version + 1)


def _leave_barrier(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    if not state.met or not _present(rules, state) <= set(state.met):
        return state
    for rank in state.met:
        issue.add(kind="send", group="sender", rank=rank, message="barrier")
    return state._replace(met=())


def _go_on_without(rules: ServerRules, state: ServerState, rank: int, issue: Issue) -> ServerState:
    """A trainer has gone: the others no longer wait for it. After the last one the server ends."""
    state = state._replace(joining=_without(state.joining, rank), met=_without(state.met, rank))
    state = _leave_barrier(rules, _close_round(rules, state, issue), issue)
    if not _present(rules, state):
        issue.add(kind="stop")
        return state._replace(stopped=True)
    return state


def _lose(rules: ServerRules, state: ServerState, rank: int, issue: Issue) -> ServerState:
    """A trainer has fallen silent: asynchronous training goes on without it, synchronous training ends and names it.

    So does all training where it is trainer 0, and the parameters, which no other trainer brings, are not there yet.
    """
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
