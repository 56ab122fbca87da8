"""Sender: the worker beside a trainer. It merges and pushes what was handed to it, and pulls what others changed."""

from fleetbench.plan.events import Event, Message, TimerFired
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Issue, SenderState


def on_sender(rules: ServerRules, state: SenderState, event: Event) -> tuple[SenderState, Operations]:
    """What a trainer's background sender starts now."""
    issue = Issue(state.next_id)
    match event:
        case TimerFired():
            state = state._replace(idle=state.queued > 0)
        case Message(kind="gradient" | "step"):
            state = state._replace(queued=state.queued + 1, idle=False)
            if _most_together(rules) > 1:
                issue.add(kind="set_timer", delay_ns=rules.idle_ns)
        case Message(kind="applied"):
            acknowledged = tuple(num + (server == event.rank) for server, num in enumerate(state.acknowledged))
            state = state._replace(acknowledged=acknowledged)
        case Message(kind="parameters"):
            state = _hear_parameters(rules, state, event, issue)
        case Message(kind="flush"):
            owes_pull = rules.mode == "geo_sgd" or (rules.mode == "asynchronous" and rules.has_dense)
            state = state._replace(flushes=True, owes_pull=owes_pull)
        case _:
            pass
    if rules.mode != "synchronous":
        state = (_exchange if rules.mode == "geo_sgd" else _push_and_pull)(rules, state, issue)
    elif state.queued:
        state = _push(state, issue, 1)
    if state.flushes and not (state.queued or state.in_flight or state.pulling or state.owes_pull):
        issue.add(kind="send", group="trainer", message="drained")
        state = state._replace(flushes=False)
    return state._replace(next_id=issue.next_id), issue.operations


def _most_together(rules: ServerRules) -> int:
    """So many gradients or noted steps make a push due. With more than one, some may are left over, and only a timer gets them out."""
    return {"synchronous": 1, "asynchronous": rules.max_merge, "geo_sgd": rules.k_steps}[rules.mode]


def _hear_parameters(rules: ServerRules, state: SenderState, event: Message, issue: Issue) -> SenderState:
    """Parameters of one server: after a pull, or after a synchronous update, of which they are the acknowledgement."""
    state = state._replace(answers=state.answers + 1)
    if rules.mode == "synchronous":
        acknowledged = tuple(num + (server == event.rank) for server, num in enumerate(state.acknowledged))
        state = state._replace(acknowledged=acknowledged)
    if state.answers < rules.servers:
        return state
    issue.add(kind="install", payload="delta" if rules.mode == "geo_sgd" else "parameters")
    if rules.mode == "synchronous":
        issue.add(kind="send", group="trainer", message="fresh")
    return state._replace(answers=0, pulling=False)


def _push(state: SenderState, issue: Issue, count: int) -> SenderState:
    """Take ``count`` gradients, sum them, push the sum."""
    issue.add(kind="merge", payload="gradient", count=count)
    issue.add(kind="send", payload="gradient", group="servers", message="gradient", count=count)
    issue.add(kind="send", group="trainer", message="taken", count=count)
    queued = state.queued - count
    return state._replace(queued=queued, pushed=state.pushed + 1, idle=state.idle and queued > 0)


def _pull(state: SenderState, issue: Issue) -> SenderState:
    issue.add(kind="send", group="servers", message="pull")
    return state._replace(pulling=True, answers=0, unseen=0, owes_pull=False)


def _push_and_pull(rules: ServerRules, state: SenderState, issue: Issue) -> SenderState:
    """As much of pushing and pulling as may begin now."""
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
    """GeoSGD: push the deltas of the rows touched since the last exchange; after that, pull what others changed."""
    if state.in_flight or state.pulling:
        return state
    if state.unseen or (state.owes_pull and not state.queued):
        return _pull(state, issue)
    if state.queued >= rules.k_steps or ((state.idle or state.flushes) and state.queued > 0):
        count = state.queued
        issue.add(kind="merge", payload="delta", divisor=rules.trainers, count=count)
        issue.add(kind="send", payload="delta", group="servers", message="delta", count=count)
        issue.add(kind="send", group="trainer", message="taken", count=count)
        return state._replace(queued=0, pushed=state.pushed + 1, unseen=count, idle=False)
    return state
