"""Twin loop: asynchronous training as one loop over integer arrays, compiled by numba.

What ``sim.servers.job`` does event by event with ``fleetbench.plan.servers``' decisions, written out a
second time for speed: the branches of ``on_trainer``, ``on_sender`` and ``on_server`` that asynchronous
training takes, and the actors around them. Every event is scheduled where the actors schedule theirs, so
that events of one nanosecond keep their order. ``sim.servers.twin`` is the way in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

HEAR, GO_ON, READ_END, THINK_END, TIMER = range(5)
"""What an entry of the heap is."""
STEP, LOOK_UP_BEGINS, BACKWARD, FLUSH_BEGINS, DATA_END, TAKEN, ROWS, DRAINED = range(8)
"""What a trainer hears."""
GRADIENT, FLUSH, APPLIED, PARAMETERS, TIMER_FIRED = range(8, 13)
"""What a sender hears."""
PUSH, PULL, LOOK_UP, LEAVE = range(13, 17)
"""What a server hears."""
TO_LOOK_UP_AGAIN = -3
"""What a trainer tells itself."""
NOTHING, TO_READ, TO_LOOK_UP, TO_FLUSH, TO_END, TO_FINISH = range(6)
"""What a trainer does next, once nothing holds it."""
FREE, FOR_ROOM, FOR_ROWS, FOR_DRAINED = range(4)
"""What it waits for."""
SET_TIMER, MERGE, SEND_GRADIENT, SEND_TAKEN, SEND_PULL, INSTALL, SEND_DRAINED = range(7)
"""What a sender does."""
UPDATE, SEND_APPLIED, SEND_PARAMETERS, SEND_ROWS = range(7, 11)
"""What a server does."""

# Places in ``settings``.
(
    S_SERVERS, S_MAX_MERGE, S_QUEUE, S_IN_FLIGHT, S_IDLE_NS, S_INDEPENDENT, S_BEFORE_PULL, S_DENSE, S_WAITS,
    S_READ_NS, S_LATENCY_NS, S_HEADER_NS, S_PULLED_NS, S_ANSWER_PULL_NS, S_MERGE_NS, S_INSTALL_NS, S_FIRST_STEP, S_HEADER_BYTES,
) = range(18)  # fmt: skip
NUM_SETTINGS = 18
# Columns of ``tables``.
T_ASKED_NS, T_ROWS_NS, T_ANSWER_NS, T_ASKED_BYTES = range(4)
NUM_COLUMNS = 4
# Rows of ``pushes``, by the number of gradients in one.
P_WIRE_NS, P_TOOK_NS, P_BYTES = range(3)
# Places in a row of ``loads``.
L_SINCE, L_UNTIL, L_BUSY, L_LENGTH, L_LONGEST, L_LENGTH_NS, L_WAIT_NS, L_HEARD, L_GRADIENTS, L_STALE = range(10)
NUM_LOADS = 10
# Places in ``counters``.
_SEQ, _HEAP, _FREE, _COUNTS, _LOGGED, _NOW, _RING, _RING_END, _WAITED = range(9)
NUM_COUNTERS = 9


@njit(cache=True)
def _later(time: Any, seq: Any, what: Any, ring: Any, counters: Any, at_ns: int, payload: int) -> None:
    """Schedule: into the heap by time, then by the order in which entries came.

    What is to happen now comes behind all that was to happen now already: a ring keeps that order, and costs no heap.
    """
    if at_ns == counters[_NOW]:
        end = counters[_RING_END]
        ring[end] = payload
        end += 1
        counters[_RING_END] = 0 if end == ring.shape[0] else end
        return
    place = counters[_HEAP]
    counters[_HEAP] += 1
    number = counters[_SEQ]
    counters[_SEQ] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if time[parent] <= at_ns:  # it came earlier
            break
        time[place], seq[place], what[place] = time[parent], seq[parent], what[parent]
        place = parent
    time[place], seq[place], what[place] = at_ns, number, payload


@njit(cache=True)
def _drop_first(time: Any, seq: Any, what: Any, counters: Any) -> None:
    counters[_HEAP] -= 1
    size = counters[_HEAP]
    at_ns, number, payload = time[size], seq[size], what[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (time[other] < time[child] or (time[other] == time[child] and seq[other] < seq[child])):
            child = other
        if at_ns < time[child] or (at_ns == time[child] and number < seq[child]):
            break
        time[place], seq[place], what[place] = time[child], seq[child], what[child]
        place = child
    time[place], seq[place], what[place] = at_ns, number, payload


@njit(cache=True)
def _message(node: Any, free: Any, counters: Any, kind: int, rank: int, count: int, version: int) -> int:
    """A message from the pool: kind, sender's or server's number, count, version."""
    counters[_FREE] -= 1
    taken = free[counters[_FREE]]
    node[taken, 0] = kind
    node[taken, 1] = rank
    node[taken, 2] = count
    node[taken, 3] = version
    return taken  # type: ignore[no-any-return]


@njit(cache=True)
def _count(load: Any, more: int, now_ns: int) -> None:
    """As ``Load.count``."""
    passed_ns = now_ns - load[L_UNTIL]
    load[L_LENGTH_NS] += load[L_LENGTH] * passed_ns
    if load[L_LENGTH]:
        load[L_BUSY] += passed_ns
    load[L_UNTIL] = now_ns
    load[L_LENGTH] += more
    load[L_LONGEST] = max(load[L_LONGEST], load[L_LENGTH])


@njit(cache=True)
def run_loop(settings: Any, think_ns: Any, together: Any, tables: Any, pushes: Any, log: Any, waited: Any, stale: Any) -> Any:  # noqa: C901, PLR0912, PLR0915  # one loop, because calls between compiled functions pass every array
    """Run a job to its end.

    ``think_ns`` (trainers, steps); ``together`` (trainers, servers): on one host; ``tables`` (tables, 4): what
    a look-up takes on its way, its answer takes on its own, a server's work on it, and the look-up's bytes;
    ``pushes`` (3, counts): a push's time on its way, the work on it, and its bytes. ``log`` (rows, 5) takes of
    every push when it is heard, server, rank, count and staleness, until it is full; from the first counted
    step on, ``waited`` (rows, 2) of every message the server and how long it waited, and ``stale`` (servers,
    lags) how many gradients were of which staleness. Returns starts, ends and bytes sent of steps
    ``(trainers, steps)``, ``loads`` (servers, places), and the rows of ``log`` and ``waited`` that are filled.
    """
    num_trainers, num_steps = think_ns.shape
    num_servers = settings[S_SERVERS]
    max_merge, room, in_flight_bound = settings[S_MAX_MERGE], settings[S_QUEUE], settings[S_IN_FLIGHT]
    has_dense, num_tables, latency_ns = settings[S_DENSE], tables.shape[0], settings[S_LATENCY_NS]
    first_server = 2 * num_trainers
    num_actors = first_server + num_servers
    # Of each trainer at most: a message of its own, and for every server pushes, a pull, a look-up, a leave and their answers.
    most = num_trainers * (8 + room + num_servers * (2 * in_flight_bound + 6)) + 16
    timers_most = most + num_trainers * num_steps * (1 if max_merge > 1 else 0)
    time, seq = np.empty(timers_most, np.int64), np.empty(timers_most, np.int64)
    what, ring = np.empty(timers_most, np.int64), np.empty(timers_most, np.int64)
    node = np.zeros((most, 6), np.int64)  # kind, rank, count, oldest version, arrived at, next
    computed_from = np.zeros((most, max_merge), np.int64)  # of a push: of each of its gradients
    free = np.arange(most)
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[_FREE] = most
    head, tail = np.full(num_actors, -1), np.full(num_actors, -1)
    busy = np.zeros(num_actors, np.int64)
    todo_room = 3 * in_flight_bound + 6
    todo = np.zeros((num_actors, todo_room, 3), np.int64)  # operation, count, rank
    todo_at, todo_end = np.zeros(num_actors, np.int64), np.zeros(num_actors, np.int64)

    waits, following = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    queued, answered = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    ends, step = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    looking_up = np.zeros(num_trainers, np.int64)
    versions = np.zeros((num_trainers, num_servers), np.int64)
    computed = np.zeros((num_trainers, num_servers), np.int64)
    look_ups = np.zeros((num_trainers, num_servers), np.int64)
    stamps = np.zeros((num_trainers, room + 1, num_servers), np.int64)
    stamp_first, stamp_end = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)

    holds, pushed = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    acknowledged = np.zeros((num_trainers, num_servers), np.int64)
    unseen, pulling, answers = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    idle = np.zeros(num_trainers, np.int64)
    flushes, owes_pull = np.zeros(num_trainers, np.int64), np.zeros(num_trainers, np.int64)
    timers = np.zeros(num_trainers, np.int64)
    received, staged = np.zeros((num_trainers, num_servers), np.int64), np.zeros((num_trainers, num_servers), np.int64)
    staged_from = np.zeros((num_trainers, num_servers, max_merge), np.int64)

    version, left = np.zeros(num_servers, np.int64), np.zeros(num_servers, np.int64)
    in_work = np.zeros(num_servers, np.int64)
    loads = np.zeros((num_servers, NUM_LOADS), np.int64)
    line_free = np.zeros((4, num_trainers, num_servers), np.int64)  # trainer and sender to server, server to each
    starts, finished = np.zeros((num_trainers, num_steps), np.int64), np.zeros((num_trainers, num_steps), np.int64)
    sent_bytes, step_bytes = np.zeros(num_trainers, np.int64), np.zeros((num_trainers, num_steps), np.int64)

    beginning = 0
    while counters[_HEAP] > 0 or counters[_RING] != counters[_RING_END] or beginning < num_trainers:
        if beginning < num_trainers:  # every trainer begins its first step before the clock moves
            now_ns, kind, actor, given = 0, HEAR, beginning, -1
            beginning += 1
        else:
            if counters[_HEAP] > 0 and (time[0] == counters[_NOW] or counters[_RING] == counters[_RING_END]):
                payload = what[0]
                counters[_NOW] = time[0]
                _drop_first(time, seq, what, counters)
            else:
                place = counters[_RING]
                payload = ring[place]
                counters[_RING] = 0 if place + 1 == ring.shape[0] else place + 1
            now_ns = counters[_NOW]
            kind, actor, given = payload & 7, (payload >> 3) & 0x1FFFFFFF, payload >> 32

        if actor < num_trainers and kind != TIMER:
            rank = actor
            event, count, number, told = -1, 0, 0, 0
            reads = kind == READ_END
            if reads:
                pass
            elif kind == THINK_END:
                event = BACKWARD
                following[rank] = TO_FLUSH if settings[S_WAITS] else TO_END
            elif given < 0:
                event = -2
            else:
                event, number, count, told = node[given, 0], node[given, 1], node[given, 2], node[given, 3]
                free[counters[_FREE]] = given
                counters[_FREE] += 1
            begins_step = event == -2
            while True:
                if begins_step:
                    begins_step = False
                    starts[rank, step[rank]] = now_ns
                    if step[rank] + settings[S_FIRST_STEP] >= 1 and not counters[_COUNTS]:
                        counters[_COUNTS] = 1
                        counters[_WAITED] = 0
                        stale[:] = 0
                        for server in range(num_servers):
                            load = loads[server]
                            load[L_SINCE] = load[L_UNTIL] = now_ns
                            load[L_BUSY] = load[L_LENGTH_NS] = load[L_WAIT_NS] = load[L_HEARD] = 0
                            load[L_GRADIENTS] = load[L_STALE] = 0
                            load[L_LONGEST] = load[L_LENGTH]
                    event = STEP
                    following[rank] = TO_READ
                looks_up = False
                if reads:
                    reads = False
                    looks_up = True
                    looking_up[rank] = 0
                    for server in range(num_servers):
                        computed[rank, server] = versions[rank, server] if has_dense or not num_tables else 2**62
                elif event == TO_LOOK_UP_AGAIN:
                    looks_up = True
                if looks_up and looking_up[rank] < num_tables:
                    looking_up[rank] += 1
                    event = LOOK_UP_BEGINS
                    following[rank] = TO_LOOK_UP
                elif looks_up:
                    _later(time, seq, what, ring, counters, now_ns + think_ns[rank, step[rank]], (rank << 3) | THINK_END)
                    break
                hands_on = False
                if event == LOOK_UP_BEGINS:
                    waits[rank] = FOR_ROWS
                    answered[rank] = 0
                    sent_bytes[rank] += num_servers * tables[looking_up[rank] - 1, T_ASKED_BYTES]
                    for server in range(num_servers):
                        sent = _message(node, free, counters, LOOK_UP, rank, 0, 0)
                        at_ns = now_ns
                        if not together[rank, server]:
                            asked_ns = tables[looking_up[rank] - 1, T_ASKED_NS]
                            line_free[0, rank, server] = max(now_ns, line_free[0, rank, server]) + asked_ns
                            at_ns = line_free[0, rank, server] + latency_ns
                        _later(time, seq, what, ring, counters, at_ns, (sent << 32) | ((first_server + server) << 3) | HEAR)
                elif event == BACKWARD:
                    if queued[rank] == room:
                        waits[rank] = FOR_ROOM
                    else:
                        hands_on = True
                elif event in (FLUSH_BEGINS, DATA_END):
                    sent = _message(node, free, counters, FLUSH, rank, 0, 0)
                    _later(time, seq, what, ring, counters, now_ns, (sent << 32) | ((num_trainers + rank) << 3) | HEAR)
                    waits[rank] = FOR_DRAINED
                    ends[rank] = event == DATA_END
                elif event == TAKEN:
                    queued[rank] -= count
                    if waits[rank] == FOR_ROOM:
                        waits[rank] = FREE
                        hands_on = True
                elif event == ROWS:
                    computed[rank, number] = min(computed[rank, number], told)
                    if waits[rank] == FOR_ROWS:
                        answered[rank] += 1
                        if answered[rank] == num_servers:
                            waits[rank] = FREE
                elif event == DRAINED and waits[rank] == FOR_DRAINED:
                    waits[rank] = FREE
                    if ends[rank]:
                        sent_bytes[rank] += num_servers * settings[S_HEADER_BYTES]
                        for server in range(num_servers):
                            sent = _message(node, free, counters, LEAVE, rank, 0, 0)
                            at_ns = now_ns
                            if not together[rank, server]:
                                line_free[0, rank, server] = max(now_ns, line_free[0, rank, server]) + settings[S_HEADER_NS]
                                at_ns = line_free[0, rank, server] + latency_ns
                            _later(time, seq, what, ring, counters, at_ns, (sent << 32) | ((first_server + server) << 3) | HEAR)
                if hands_on:
                    queued[rank] += 1
                    for server in range(num_servers):
                        stamps[rank, stamp_end[rank], server] = computed[rank, server]
                    stamp_end[rank] = (stamp_end[rank] + 1) % (room + 1)
                    sent = _message(node, free, counters, GRADIENT, rank, 1, 0)
                    _later(time, seq, what, ring, counters, now_ns, (sent << 32) | ((num_trainers + rank) << 3) | HEAR)
                then = following[rank]
                if then == NOTHING or waits[rank] != FREE:
                    break
                following[rank] = NOTHING
                if then == TO_READ:
                    if settings[S_READ_NS]:
                        _later(time, seq, what, ring, counters, now_ns + settings[S_READ_NS], (rank << 3) | READ_END)
                        break
                    reads = True
                elif then == TO_LOOK_UP:
                    event = TO_LOOK_UP_AGAIN
                elif then == TO_FLUSH:
                    event = FLUSH_BEGINS
                    following[rank] = TO_END
                elif then == TO_END and step[rank] + 1 == num_steps:
                    event = DATA_END
                    following[rank] = TO_FINISH
                else:
                    finished[rank, step[rank]] = now_ns
                    step_bytes[rank, step[rank]] = sent_bytes[rank]
                    sent_bytes[rank] = 0
                    step[rank] += 1
                    if then == TO_FINISH:
                        break
                    begins_step = True
            continue

        if kind == TIMER:
            if given != timers[actor]:
                continue
            given = _message(node, free, counters, TIMER_FIRED, actor, 0, 0)
            actor += num_trainers
            kind = HEAR
        if kind == HEAR:
            node[given, 4] = now_ns
            node[given, 5] = -1
            if head[actor] < 0:
                head[actor] = given
            else:
                node[tail[actor], 5] = given
            tail[actor] = given
            if actor >= first_server:
                _count(loads[actor - first_server], 1, now_ns)
            if busy[actor]:
                continue
            busy[actor] = 1
        goes_on = kind == GO_ON
        while True:
            while todo_at[actor] < todo_end[actor]:
                place = todo_at[actor]
                operation, count, about = todo[actor, place, 0], todo[actor, place, 1], todo[actor, place, 2]
                if not goes_on:
                    took_ns = 0
                    if operation == UPDATE:
                        took_ns = pushes[P_TOOK_NS, count]
                    elif operation == SEND_PARAMETERS:
                        took_ns = settings[S_ANSWER_PULL_NS]
                    elif operation == SEND_ROWS:
                        took_ns = tables[look_ups[about, actor - first_server] % num_tables, T_ANSWER_NS]
                    elif operation == MERGE:
                        took_ns = settings[S_MERGE_NS]
                    elif operation == INSTALL:
                        took_ns = settings[S_INSTALL_NS]
                    if took_ns:
                        _later(time, seq, what, ring, counters, now_ns + took_ns, (actor << 3) | GO_ON)
                        break
                goes_on = False
                todo_at[actor] += 1
                rank = actor - num_trainers
                if operation == SET_TIMER:
                    timers[rank] += 1
                    _later(time, seq, what, ring, counters, now_ns + settings[S_IDLE_NS], (timers[rank] << 32) | (rank << 3) | TIMER)
                elif operation == MERGE:
                    for taken in range(count):
                        for server in range(num_servers):
                            stamp = stamps[rank, stamp_first[rank], server]
                            staged[rank, server] = stamp if taken == 0 else min(staged[rank, server], stamp)
                            staged_from[rank, server, taken] = stamp
                        stamp_first[rank] = (stamp_first[rank] + 1) % (room + 1)
                elif operation in (SEND_GRADIENT, SEND_PULL):
                    sent_bytes[rank] += num_servers * (pushes[P_BYTES, count] if operation == SEND_GRADIENT else settings[S_HEADER_BYTES])
                    for server in range(num_servers):
                        if operation == SEND_GRADIENT:
                            sent = _message(node, free, counters, PUSH, rank, count, staged[rank, server])
                            for taken in range(count):
                                computed_from[sent, taken] = staged_from[rank, server, taken]
                            wire_ns = pushes[P_WIRE_NS, count]
                        else:
                            sent = _message(node, free, counters, PULL, rank, 0, 0)
                            wire_ns = settings[S_HEADER_NS]
                        at_ns = now_ns
                        if not together[rank, server]:
                            line_free[1, rank, server] = max(now_ns, line_free[1, rank, server]) + wire_ns
                            at_ns = line_free[1, rank, server] + latency_ns
                        _later(time, seq, what, ring, counters, at_ns, (sent << 32) | ((first_server + server) << 3) | HEAR)
                elif operation in (SEND_TAKEN, SEND_DRAINED):
                    answer = TAKEN if operation == SEND_TAKEN else DRAINED
                    sent = _message(node, free, counters, answer, rank, count, 0)
                    _later(time, seq, what, ring, counters, now_ns, (sent << 32) | (rank << 3) | HEAR)
                elif operation == INSTALL:
                    for server in range(num_servers):
                        versions[rank, server] = received[rank, server]
                elif operation != UPDATE:
                    server = actor - first_server
                    if operation == SEND_ROWS:
                        line, answer, to = 2, ROWS, about
                        wire_ns = tables[look_ups[about, server] % num_tables, T_ROWS_NS]
                        look_ups[about, server] += 1
                    elif operation == SEND_PARAMETERS:
                        line, answer, to, wire_ns = 3, PARAMETERS, num_trainers + about, settings[S_PULLED_NS]
                    else:
                        line, answer, to, wire_ns = 3, APPLIED, num_trainers + about, settings[S_HEADER_NS]
                    sent = _message(node, free, counters, answer, server, count, version[server])
                    at_ns = now_ns
                    if not together[about, server]:
                        line_free[line, about, server] = max(now_ns, line_free[line, about, server]) + wire_ns
                        at_ns = line_free[line, about, server] + latency_ns
                    _later(time, seq, what, ring, counters, at_ns, (sent << 32) | (to << 3) | HEAR)
            if todo_at[actor] < todo_end[actor]:
                break  # an operation takes its time
            todo_at[actor] = todo_end[actor] = 0
            if actor >= first_server and in_work[actor - first_server]:
                _count(loads[actor - first_server], -1, now_ns)
                in_work[actor - first_server] = 0
            given = head[actor]
            if given < 0:
                busy[actor] = 0
                break
            head[actor] = node[given, 5]
            event, number, count, told, since_ns = node[given, 0], node[given, 1], node[given, 2], node[given, 3], node[given, 4]
            free[counters[_FREE]] = given
            counters[_FREE] += 1
            end = 0
            if actor >= first_server:
                server = actor - first_server
                in_work[server] = 1
                load = loads[server]
                load[L_WAIT_NS] += now_ns - since_ns
                load[L_HEARD] += 1
                place = counters[_WAITED]
                waited[place, 0], waited[place, 1] = server, now_ns - since_ns
                counters[_WAITED] += 1
                if event == PUSH:
                    load[L_GRADIENTS] += count
                    for taken in range(count):
                        lag = version[server] - computed_from[given, taken]
                        load[L_STALE] += lag
                        stale[server, lag] += 1
                    place = counters[_LOGGED]
                    if place < log.shape[0]:
                        log[place, 0], log[place, 1], log[place, 2] = now_ns, server, number
                        log[place, 3], log[place, 4] = count, version[server] - told
                        counters[_LOGGED] += 1
                    version[server] += 1
                    todo[actor, 0, 0], todo[actor, 0, 1], todo[actor, 0, 2] = UPDATE, count, number
                    todo[actor, 1, 0], todo[actor, 1, 1], todo[actor, 1, 2] = SEND_APPLIED, count, number
                    end = 2
                elif event == LEAVE:
                    left[server] += 1
                else:
                    operation = SEND_PARAMETERS if event == PULL else SEND_ROWS
                    todo[actor, 0, 0], todo[actor, 0, 1], todo[actor, 0, 2] = operation, 0, number
                    end = 1
                todo_end[actor] = end
                continue
            rank = actor - num_trainers
            if event == TIMER_FIRED:
                idle[rank] = holds[rank] > 0
            elif event == GRADIENT:
                holds[rank] += 1
                idle[rank] = 0
                if max_merge > 1:
                    todo[actor, end, 0] = SET_TIMER
                    end += 1
            elif event == APPLIED:
                acknowledged[rank, number] += 1
            elif event == PARAMETERS:
                received[rank, number] = told
                answers[rank] += 1
                if answers[rank] == num_servers:
                    todo[actor, end, 0] = INSTALL
                    end += 1
                    answers[rank] = 0
                    pulling[rank] = 0
            elif event == FLUSH:
                flushes[rank] = 1
                owes_pull[rank] = has_dense
            while True:
                in_flight = pushed[rank] - acknowledged[rank].min()
                owes = has_dense and (unseen[rank] >= settings[S_BEFORE_PULL] or (owes_pull[rank] and holds[rank] == 0))
                is_due = holds[rank] >= max_merge or ((idle[rank] or flushes[rank]) and holds[rank] > 0)
                may_push = settings[S_INDEPENDENT] or not (pulling[rank] or owes)
                if is_due and may_push and in_flight < in_flight_bound:
                    count = min(holds[rank], max_merge)
                    for operation in (MERGE, SEND_GRADIENT, SEND_TAKEN):
                        todo[actor, end, 0], todo[actor, end, 1] = operation, count
                        end += 1
                    holds[rank] -= count
                    pushed[rank] += 1
                    if holds[rank] == 0:
                        idle[rank] = 0
                    unseen[rank] += count
                elif owes and not pulling[rank] and (in_flight == 0 or (settings[S_INDEPENDENT] and not flushes[rank])):
                    todo[actor, end, 0] = SEND_PULL
                    end += 1
                    pulling[rank] = 1
                    answers[rank] = 0
                    unseen[rank] = 0
                    owes_pull[rank] = 0
                else:
                    break
            in_flight = pushed[rank] - acknowledged[rank].min()
            if flushes[rank] and not (holds[rank] or in_flight or pulling[rank] or owes_pull[rank]):
                todo[actor, end, 0], todo[actor, end, 1] = SEND_DRAINED, 0
                end += 1
                flushes[rank] = 0
            todo_end[actor] = end
    return starts, finished, step_bytes, loads, counters[_LOGGED], counters[_WAITED]
