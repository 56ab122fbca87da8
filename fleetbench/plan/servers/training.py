"""Training with parameter servers: trainer, background sender and server as three roles of one strategy.

Each role is a serialised event loop of its own. Messages between two processes arrive in the order in
which they were sent; which rank or server comes first is the network's business. The modes:

- *Synchronous*: a gradient of every trainer makes one update, by their mean; each waits for it.
- *Asynchronous*: a trainer hands its gradient on and computes the next. Its sender sums up to
  ``max_merge`` of them and pushes; the server updates by each push as it comes.
- *GeoSGD*: a trainer trains a full copy, ``latest``. Its sender keeps another, ``old``. After ``k_steps``
  steps, or fewer when the trainer falls idle, for the rows touched since: delta = (latest - old) /
  trainers; old += delta; the server adds the delta. Then it pulls the rows that others changed: latest
  += server - old; old = server. Dense parameters likewise, whole. ``old += delta`` leaves the rest of
  a change to later exchanges, in which the row was touched again.

Who tells whom what (``send`` with ``message``, heard as ``Message`` with that ``kind``; ``rank`` of a
message is the trainer's, from a server the server's; what is sent to several servers is cut into
their shards):

=========  ========  ==========  =====================================================================
from       to        message     meaning
=========  ========  ==========  =====================================================================
trainer    sender    gradient    one step's gradient, dense and rows
trainer    sender    step        GeoSGD: a step is done, its rows are marked
trainer    sender    flush       push and pull all there is, then say ``drained``
trainer    servers   look_up     rows of embeddings that the next forward reads, or that its script asks for
trainer    servers   leave       this trainer has ended
sender     trainer   taken       ``count`` gradients or steps have left the queue
sender     trainer   fresh       the synchronous update is installed
sender     trainer   drained     after a flush: nothing is queued, in flight or unseen
sender     servers   join *      once, first
sender     servers   initial *   trainer 0, told ``blank``: the parameters to begin with
sender     servers   gradient    a push of ``count`` summed gradients
sender     servers   delta       GeoSGD: a push
sender     servers   pull        asks for dense parameters; GeoSGD: and for the rows others changed
sender     servers   barrier *   this trainer waits for the others
server     sender    ready *     the parameters are there
server     sender    blank *     they are not: trainer 0 is to send them
server     sender    applied     a push is
server     sender    parameters  what was pulled, or what a synchronous update left
server     sender    barrier *   all are there
server     trainer   rows        what was looked up
sender     servers   fetch *     all there is, after ``ready``, where another brought it
server     sender    fetched *   that; its rows are no news to this trainer any more
executor   server    lost *      trainer ``rank`` has been silent for too long, has ended out of order, has not come,
                                 has not come where the others wait for it, or was lost before the server began again
executor   server    join *      trainer ``rank`` is heard again after it was lost, or waits, since the server began
                                 again, at a barrier that the others have passed: it waits there no longer
executor   server    leave *     trainer ``rank`` had ended before the server began again
=========  ========  ==========  =====================================================================

What has a star goes out, or is waited for, on the executor's word alone, because a script asks for it or a
clock says so: no trainer's or sender's role decides it, and their recordings do not hold it. What a server
does about it is decided here. The executor alone also decides that
servers write checkpoints, and that a server without any trainer ends.

Operations of a rank, where servers give them a meaning of their own:

- ``wait``: the trainer goes no further until an event gives it something to do or frees it;
- ``merge`` of ``gradient``: take the ``count`` oldest gradients from the queue and sum them; of ``delta``:
  take the marked rows, delta = (latest - old) / ``divisor``, old += delta;
- ``mark`` on a trainer: the step's rows are touched; on a server: the rows of ``rank``'s delta are changed
  for every other trainer;
- ``install`` of ``parameters``: dense parameters are what servers hold; of ``rows``: so are the looked-up
  rows; of ``delta``: latest += server - old, old = server; on a server: the initial parameters;
- ``update`` on a server: the optimizer's step, by ``rank``'s push, or by the sum of ``count`` trainers' over
  ``divisor``, added in the order of ranks; on a trainer: its own optimizer's;
- ``skip``: the step ends without a local update;
- ``accumulate`` of ``delta``: add it, no optimizer;
- ``drop``: trainer ``rank`` is gone, the others go on, and the server says so;
- ``stop``: the server ends; where a ``rank`` stands with it, because of that trainer.

Rows and bytes are in no operation: which rows are marked is bookkeeping, and the executor's.
"""

from dataclasses import dataclass

from fleetbench.plan.events import Event
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.sender import on_sender
from fleetbench.plan.servers.server import on_server
from fleetbench.plan.servers.states import Role, RoleState, SenderState, ServerState, TrainerState
from fleetbench.plan.servers.trainer import on_trainer


@dataclass(frozen=True, slots=True)
class ServerTraining:
    """Decides for the three roles under one set of rules.

    It follows nothing but messages, so there is no ``whole_step``, and it observes no scalar.
    """

    rules: ServerRules

    def init(self, role: Role, rank: int, first_step: int = 1) -> RoleState:  # noqa: ARG002  # ranks of a role begin alike
        """The state before the first event."""
        if role == "trainer":
            return TrainerState()
        return SenderState(acknowledged=(0,) * self.rules.servers) if role == "sender" else ServerState()

    def on(self, state: RoleState, now_ns: int, event: Event) -> tuple[RoleState, Operations]:  # noqa: ARG002  # time comes as ``TimerFired``
        """What a role starts now."""
        if isinstance(state, TrainerState):
            return on_trainer(self.rules, state, event)
        if isinstance(state, SenderState):
            return on_sender(self.rules, state, event)
        return on_server(self.rules, state, event)
