"""Training with parameter servers: trainer, background sender and server as three roles of one strategy.

Each role handles its events one after the other. Messages between two processes arrive in the order in
which they were sent; the order between different ranks or servers is undefined. The modes:

- *Synchronous*: every update uses the mean of one gradient from each trainer, and all trainers wait for it.
- *Asynchronous*: a trainer hands its gradient to its sender and computes the next. The sender sums up to
  ``max_merge`` gradients and pushes the sum; the server updates by each push as it comes.
- *GeoSGD*: a trainer trains a full copy, ``latest``. Its sender keeps another, ``old``. After ``k_steps``
  steps, or fewer when the trainer falls idle, the sender pushes the rows touched since: delta = (latest -
  old) / trainers; old += delta; the server adds the delta. Then the sender pulls the rows that others
  changed: latest += server - old; old = server. Dense parameters are exchanged in the same way, all at
  once. ``old += delta`` leaves the rest of a change to later exchanges in which the row is touched again.

Messages (``send`` with ``message``, received as ``Message`` with that ``kind``; ``rank`` of a message is
the trainer's, or the server's if a server sends it; a message to several servers is split into their
shards):

=========  ========  ==========  =====================================================================
from       to        message     meaning
=========  ========  ==========  =====================================================================
trainer    sender    gradient    one step's gradient, dense and rows
trainer    sender    step        GeoSGD: a step is done, its rows are marked
trainer    sender    flush       push and pull everything that remains, then send ``drained``
trainer    servers   look_up     rows of embeddings that the next forward or the script reads
trainer    servers   leave       this trainer has ended
sender     trainer   taken       ``count`` gradients or steps have left the queue
sender     trainer   fresh       the synchronous update is installed
sender     trainer   drained     after a flush: nothing is queued, in flight or unseen
sender     servers   join *      the trainer takes part; sent once, first
sender     servers   initial *   trainer 0's answer to ``blank``: the initial parameters
sender     servers   gradient    a push of ``count`` summed gradients
sender     servers   delta       GeoSGD: a push
sender     servers   pull        asks for dense parameters, in GeoSGD also for rows that others changed
sender     servers   barrier *   this trainer waits for the others
server     sender    ready *     answer to ``join``: the parameters, once they are initialised
server     sender    blank *     answer to trainer 0's ``join``: parameters are not initialised
server     sender    applied     a push has been applied
server     sender    parameters  the pulled parameters, or those after a synchronous update
server     sender    barrier *   all trainers wait at the barrier, and may continue
server     trainer   rows        the looked-up rows
=========  ========  ==========  =====================================================================

The executor sends messages with a star, or waits for them, when a script or a clock requires it: the roles
of trainer and sender do not decide them, and their recordings do not contain them. The role of the server
decides its responses. The executor also decides that servers write checkpoints, and that the job ends
because a trainer was killed or hangs.

Operations of a rank that have a special meaning with servers:

- ``wait``: the trainer stops until an event gives it something to do or releases it;
- ``merge`` of ``gradient``: take the ``count`` oldest gradients from the queue and sum them; of ``delta``:
  take the marked rows, delta = (latest - old) / ``divisor``, old += delta;
- ``mark`` on a trainer: the step's rows are touched; on a server: the rows of ``rank``'s delta are changed
  for every other trainer;
- ``install`` of ``parameters``: replace dense parameters by the servers'; of ``rows``: replace the looked-up
  rows by the servers'; of ``delta``: latest += server - old, old = server; on a server: set the initial
  parameters;
- ``update`` on a server: a step of the optimizer by ``rank``'s push, or by the sum of ``count`` trainers'
  pushes, added in the order of ranks, over ``divisor``; on a trainer: a step of its own optimizer;
- ``skip``: the step ends without a local update;
- ``accumulate`` of ``delta``: add the delta to the parameters, without an optimizer;
- ``stop``: all trainers have left, and the server ends.

No operation contains rows or bytes: the executor keeps track of which rows are marked.
"""

from dataclasses import dataclass
from typing import Literal

from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, LookUp, Message, StepBegin, TimerFired
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Issue, Role, RoleState, SenderState, ServerState, TrainerState


@dataclass(frozen=True, slots=True)
class ServerTraining:
    """Decides for the three roles from one set of rules and from messages only.

    It has no ``whole_step`` and observes no scalar.
    """

    rules: ServerRules

    def init(self, role: Role, rank: int, first_step: int = 1) -> RoleState:  # noqa: ARG002  # all ranks of a role begin alike
        """Return the state before the first event."""
        if role == "trainer":
            return TrainerState()
        return SenderState(acknowledged=(0,) * self.rules.servers) if role == "sender" else ServerState()

    def on(self, state: RoleState, now_ns: int, event: Event) -> tuple[RoleState, Operations]:  # noqa: ARG002  # time comes as ``TimerFired``
        """Handle ``event``: return the role's next state and the operations that it starts now."""
        if isinstance(state, TrainerState):
            return on_trainer(self.rules, state, event)
        if isinstance(state, SenderState):
            return on_sender(self.rules, state, event)
        return on_server(self.rules, state, event)


def on_trainer(rules: ServerRules, state: TrainerState, event: Event) -> tuple[TrainerState, Operations]:
    """Decide for a trainer, which computes gradients or, in GeoSGD, trains its own copy.

    It hands over what its sender is to exchange. While ``state.waits`` is not None, it receives only
    messages.
    """
    issue = Issue(state.next_id)
    match event:
        case StepBegin(step):
            assert not state.in_step, "a step ends before the next begins"
            assert state.waits is None
            return state._replace(step=step, in_step=True), ()
        case LookUp() if rules.mode != "geo_sgd":
            assert state.waits is None
            issue.send("servers", "look_up", payload="rows")
            issue.add("wait")
            state = state._replace(waits="rows", answers=0)
        case BackwardEnd():
            assert state.in_step, "StepBegin comes before BackwardEnd"
            state = _end_backward(rules, state, issue)
        case Message():
            state = _hear(rules, state, event, issue)
        case Flush() | DataEnd():
            assert state.waits is None
            issue.send("sender", "flush")
            issue.add("wait")
            state = state._replace(waits="drained", ends=isinstance(event, DataEnd))
    return state._replace(next_id=issue.next_id), issue.operations


def _end_backward(rules: ServerRules, state: TrainerState, issue: Issue) -> TrainerState:
    if rules.mode == "synchronous":
        issue.send("sender", "gradient", payload="gradient", count=1)
        issue.add("wait")
        return state._replace(waits="fresh", queued=state.queued + 1)
    if state.queued == rules.room:
        issue.add("wait")
        return state._replace(waits="room")
    return _hand_on(rules, state, issue)


def _hand_on(rules: ServerRules, state: TrainerState, issue: Issue) -> TrainerState:
    """End a step: hand its gradient to the sender or, in GeoSGD, apply it to the trainer's own copy."""
    if rules.mode == "geo_sgd":
        issue.add("update")
        issue.add("mark", payload="rows")
        issue.send("sender", "step", count=1)
    else:
        issue.send("sender", "gradient", payload="gradient", count=1)
        issue.add("skip")
    return state._replace(in_step=False, queued=state.queued + 1)


def _hear(rules: ServerRules, state: TrainerState, event: Message, issue: Issue) -> TrainerState:
    if event.kind == "taken":
        state = state._replace(queued=state.queued - event.count)
        if state.waits == "room":
            return _hand_on(rules, state._replace(waits=None), issue)
    elif event.kind == "fresh" and state.waits == "fresh":
        issue.add("skip")
        return state._replace(waits=None, in_step=False)
    elif event.kind == "rows" and state.waits == "rows":
        state = state._replace(answers=state.answers + 1)
        if state.answers == rules.servers:
            issue.add("install", payload="rows")
            return state._replace(waits=None)
    elif event.kind == "drained" and state.waits == "drained":
        if state.ends:
            issue.send("servers", "leave")
        return state._replace(waits=None)
    return state


def on_sender(rules: ServerRules, state: SenderState, event: Event) -> tuple[SenderState, Operations]:
    """Decide for a trainer's background sender, which merges and pushes gradients and pulls others' changes."""
    issue = Issue(state.next_id)
    match event:
        case TimerFired():
            state = state._replace(idle=state.queued > 0)
        case Message(kind="gradient" | "step"):
            state = state._replace(queued=state.queued + 1, idle=False)
            together = {"synchronous": 1, "asynchronous": rules.max_merge, "geo_sgd": rules.k_steps}[rules.mode]
            if together > 1:  # a push of several gradients or steps: a timer flushes those that are left over
                issue.add("set_timer", delay_ns=rules.idle_ns)
        case Message(kind="applied"):
            state = _acknowledge(state, event.rank)
        case Message(kind="parameters"):
            state = _hear_parameters(rules, state, event, issue)
        case Message(kind="flush"):
            owes_pull = rules.mode == "geo_sgd" or (rules.mode == "asynchronous" and rules.has_dense)
            state = state._replace(flushes=True, owes_pull=owes_pull)
    if rules.mode != "synchronous":
        state = (_exchange if rules.mode == "geo_sgd" else _push_and_pull)(rules, state, issue)
    elif state.queued:
        state = _push(state, issue, 1)
    if state.flushes and not (state.queued or state.in_flight or state.pulling or state.owes_pull):
        issue.send("trainer", "drained")
        state = state._replace(flushes=False)
    return state._replace(next_id=issue.next_id), issue.operations


def _hear_parameters(rules: ServerRules, state: SenderState, event: Message, issue: Issue) -> SenderState:
    """Handle parameters of one server, which answer a pull or acknowledge a synchronous update."""
    state = state._replace(answers=state.answers + 1)
    if rules.mode == "synchronous":
        state = _acknowledge(state, event.rank)
    if state.answers < rules.servers:
        return state
    issue.add("install", payload="delta" if rules.mode == "geo_sgd" else "parameters")
    if rules.mode == "synchronous":
        issue.send("trainer", "fresh")
    return state._replace(answers=0, pulling=False)


def _acknowledge(state: SenderState, by: int) -> SenderState:
    return state._replace(acknowledged=tuple(num + (server == by) for server, num in enumerate(state.acknowledged)))


def _push(state: SenderState, issue: Issue, count: int, what: Literal["gradient", "delta"] = "gradient", divisor: int = 1) -> SenderState:
    issue.add("merge", payload=what, divisor=divisor, count=count)
    issue.send("servers", what, payload=what, count=count)
    issue.send("trainer", "taken", count=count)
    queued = state.queued - count
    return state._replace(queued=queued, pushed=state.pushed + 1, idle=state.idle and queued > 0)


def _pull(state: SenderState, issue: Issue) -> SenderState:
    issue.send("servers", "pull")
    return state._replace(pulling=True, answers=0, unseen=0, owes_pull=False)


def _push_and_pull(rules: ServerRules, state: SenderState, issue: Issue) -> SenderState:
    """Start as many pushes and pulls as possible now."""
    while True:
        owes_pull = rules.has_dense and (state.unseen >= rules.sends_before_receive or (state.owes_pull and not state.queued))
        is_due = state.queued >= rules.max_merge or ((state.idle or state.flushes) and state.queued > 0)
        may_push = rules.independent_receive or not (state.pulling or owes_pull)
        if is_due and may_push and state.in_flight < rules.pushes_in_flight:
            count = min(state.queued, rules.max_merge)
            state = _push(state, issue, count)
            state = state._replace(unseen=state.unseen + count)
        elif owes_pull and not state.pulling and (state.in_flight == 0 or (rules.independent_receive and not state.flushes)):
            state = _pull(state, issue)
        else:
            return state


def _exchange(rules: ServerRules, state: SenderState, issue: Issue) -> SenderState:
    """Push the deltas of the rows touched since the last exchange, then pull what others changed (GeoSGD)."""
    if state.in_flight or state.pulling:
        return state
    if state.unseen or (state.owes_pull and not state.queued):
        return _pull(state, issue)
    if state.queued >= rules.k_steps or ((state.idle or state.flushes) and state.queued > 0):
        return _push(state, issue, state.queued, "delta", rules.trainers)._replace(unseen=state.queued)
    return state


def on_server(rules: ServerRules, state: ServerState, event: Event) -> tuple[ServerState, Operations]:  # noqa: C901  # a branch per kind
    """Decide for a server, which applies pushes as they come or round by round; ``rank`` is a trainer's."""
    if state.stopped or not isinstance(event, Message):
        return state, ()
    issue, rank = Issue(state.next_id), event.rank
    match event.kind:
        case "join":
            state = _join(state, rank, issue)
        case "initial" if not state.initialised:
            issue.add("install", payload="parameters")
            for joined in state.joining:
                issue.send("sender", "ready", rank=joined)
            state = state._replace(initialised=True, joining=())
        case "gradient" if rules.mode == "synchronous":
            state = _close_round(rules, state._replace(arrived=_with(state.arrived, rank)), issue)
        case "gradient" | "delta":
            issue.add("update" if event.kind == "gradient" else "accumulate", payload=event.kind, rank=rank, count=event.count)
            if event.kind == "delta":
                issue.add("mark", payload="rows", rank=rank)
            issue.send("sender", "applied", rank=rank, count=event.count)
            state = state._replace(version=state.version + 1)
        case "pull":
            issue.send("sender", "parameters", payload="parameters", rank=rank)
        case "look_up":
            issue.send("trainer", "rows", payload="rows", rank=rank)
        case "barrier":
            state = _close_round(rules, state._replace(met=_with(state.met, rank)), issue)
            state = _leave_barrier(rules, state, issue)
        case "leave":
            state = _leave(rules, state._replace(left=_with(state.left, rank)), issue)
    return state._replace(next_id=issue.next_id), issue.operations


def _present(rules: ServerRules, state: ServerState) -> set[int]:
    return set(range(rules.trainers)) - set(state.left)


def _join(state: ServerState, rank: int, issue: Issue) -> ServerState:
    if state.initialised:
        issue.send("sender", "ready", rank=rank)
        return state
    if rank == 0:
        issue.send("sender", "blank", rank=rank)
    return state._replace(joining=_with(state.joining, rank))


def _close_round(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    """Update by the mean gradient once all present trainers have sent one (synchronous mode).

    Trainers that wait at a barrier need not send one.
    """
    if not state.arrived or not _present(rules, state) <= {*state.arrived, *state.met}:
        return state
    num = len(state.arrived)
    issue.add("update", payload="gradient", divisor=num, count=num)
    for rank in state.arrived:
        issue.send("sender", "parameters", payload="parameters", rank=rank)
    return state._replace(arrived=(), version=state.version + 1)


def _leave_barrier(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    if not state.met or not _present(rules, state) <= set(state.met):
        return state
    for rank in state.met:
        issue.send("sender", "barrier", rank=rank)
    return state._replace(met=())


def _leave(rules: ServerRules, state: ServerState, issue: Issue) -> ServerState:
    """Handle a trainer that has left: others no longer wait for it. After the last one has left, the server ends."""
    state = _leave_barrier(rules, _close_round(rules, state, issue), issue)
    if not _present(rules, state):
        issue.add("stop")
        return state._replace(stopped=True)
    return state


def _with(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return ranks if rank in ranks else tuple(sorted((*ranks, rank)))
