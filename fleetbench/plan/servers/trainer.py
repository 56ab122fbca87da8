"""Trainer: computes gradients, or in GeoSGD trains its own copy, and hands on what its sender is to exchange."""

from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, LookUp, Message, StepBegin
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Issue, TrainerState


def on_trainer(rules: ServerRules, state: TrainerState, event: Event) -> tuple[TrainerState, Operations]:
    """What a trainer starts now. It is told nothing but messages while ``state.waits``."""
    issue = Issue(state.next_id)
    match event:
        case StepBegin(step):
            assert not state.in_step, "a step ends before the next begins"
            assert state.waits is None
            return state._replace(step=step, in_step=True), ()
        case LookUp() if rules.mode != "geo_sgd":
            assert state.waits is None
            issue.add(kind="send", payload="rows", group="servers", message="look_up")
            issue.add(kind="wait")
            state = state._replace(waits="rows", answers=0)
        case BackwardEnd():
            assert state.in_step, "StepBegin comes before BackwardEnd"
            state = _end_backward(rules, state, issue)
        case Message():
            state = _hear(rules, state, event, issue)
        case Flush() | DataEnd():
            assert state.waits is None
            issue.add(kind="send", group="sender", message="flush")
            issue.add(kind="wait")
            state = state._replace(waits="drained", ends=isinstance(event, DataEnd))
        case _:
            pass
    return state._replace(next_id=issue.next_id), issue.operations


def _end_backward(rules: ServerRules, state: TrainerState, issue: Issue) -> TrainerState:
    if rules.mode == "synchronous":
        issue.add(kind="send", payload="gradient", group="sender", message="gradient", count=1)
        issue.add(kind="wait")
        return state._replace(waits="fresh", queued=state.queued + 1)
    if state.queued == rules.room:
        issue.add(kind="wait")
        return state._replace(waits="room")
    return _hand_on(rules, state, issue)


def _hand_on(rules: ServerRules, state: TrainerState, issue: Issue) -> TrainerState:
    """End a step: its gradient goes to the sender, or in GeoSGD it is applied here, and the sender learns of it."""
    if rules.mode == "geo_sgd":
        issue.add(kind="update")
        issue.add(kind="mark", payload="rows")
        issue.add(kind="send", group="sender", message="step", count=1)
    else:
        issue.add(kind="send", payload="gradient", group="sender", message="gradient", count=1)
        issue.add(kind="skip")
    return state._replace(in_step=False, queued=state.queued + 1)


def _hear(rules: ServerRules, state: TrainerState, event: Message, issue: Issue) -> TrainerState:
    if event.kind == "taken":
        state = state._replace(queued=state.queued - event.count)
        if state.waits == "room":
            return _hand_on(rules, state._replace(waits=None), issue)
    elif event.kind == "fresh" and state.waits == "fresh":
        issue.add(kind="skip")
        return state._replace(waits=None, in_step=False)
    elif event.kind == "rows" and state.waits == "rows":
        state = state._replace(answers=state.answers + 1)
        if state.answers == rules.servers:
            issue.add(kind="install", payload="rows")
            return state._replace(waits=None)
    elif event.kind == "drained" and state.waits == "drained":
        if state.ends:
            issue.add(kind="send", group="servers", message="leave")
        return state._replace(waits=None)
    return state
