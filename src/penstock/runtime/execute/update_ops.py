"""Handlers of a rank whose schedule has updates: ops meet the right weights, and U makes new ones.

    F, B, I, R, W    the copy binds what the op reads, then the plain handler runs it
    U, owner         own gradients + those that came, in the order of pipelines; their sum over all replicas
                     -> optimizer -> parameters go out, with what is predicted of them for who takes them
    U, another copy  takes over what came
    GIVE             the window's gradients so far go out
    PREDICT          as U, with these gradients and a step that commits nothing; predictions go out
    F                takes over tied parameters, too, that updates on their owners' stages have made since

Only such schedules have it, so others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.worker import Handler
from penstock.runtime.parameters.gradients import summed
from penstock.runtime.parameters.updates import ScheduledUpdates
from penstock.runtime.parameters.versions import CopyWeights
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op
from penstock.schedule.op import BACKWARD, FORWARD, GIVE, INPUT, OF_UPDATES, PREDICT, UPDATE, WEIGHT
from penstock.schedule.updates import OWNER
from penstock.schedule.weight_versions import moment


class UpdatingOps:
    """Around the handlers of the other ops.

    Where one copy steps (`updating.one_copy_steps`) the owner sends parameters; otherwise it sends the summed
    gradients, and every copy steps.
    If the last window continues in the next step, nothing is sent for it in this one, and its updates (U) do nothing.

    Args:
        inner: the plain handlers.
        updating: the updates of this process.
        rank: whose handlers they are.
        tied: the edges along which values of tied parameters come, by the forward that takes them.
        gang: where ranks of this process meet for stages that they share, of which the first has the weights.
    """

    def __init__(
        self,
        inner: Mapping[str, Handler],
        updating: ScheduledUpdates,
        rank: int,
        tied: Mapping[Op, Sequence[Edge]] | None = None,
        gang: Gang | None = None,
    ) -> None:
        schedule = updating.schedule
        assert schedule.windows is not None, "a schedule with updates has windows"
        weights = {key: updating.weights[key] for key in updating.copies.of_rank(rank)}
        self._weights, self._here, self._schedule = weights, updating.weights, schedule
        self._tied, self._updating = tied or {}, updating
        self._gang = gang
        self._shared = {} if gang is None else {stage for stage, _ in schedule.placement.shared}
        self._replicas = updating.replicas
        self._select = updating.copies.select
        self._windows, self._one_copy_steps = schedule.windows, updating.one_copy_steps
        self._open = self._windows.num_updates - 1 if updating.leaves_open else None
        self._reduced: dict[int, list[Tensor | None]] = {}
        """By stage, the sum of the last update, where the copies step themselves."""
        self.handlers: dict[str, Handler] = {kind: self._around(handler) for kind, handler in inner.items()}
        self.handlers |= dict.fromkeys(OF_UPDATES, self._run_update)

    def _of(self, pipeline: int, stage: int) -> CopyWeights:
        """A copy's weights, whose turn it is from now on."""
        self._select(pipeline, stage)
        return self._weights[pipeline, stage]

    def _around(self, handler: Handler) -> Handler:
        """A handler that binds what the op reads first."""

        def handle(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
            op = wired.op
            pipeline = self._schedule.pipeline_of(op)
            came: Sequence[Payload] = ()
            if op.kind == FORWARD and (edges := self._tied.get(op)):
                came, inputs = inputs[-len(edges) :], inputs[: -len(edges)]
            if self._shared and (pipeline, op.stage) not in self._weights:
                return handler(wired, inputs)  # it finds what came of the op on the first of the ranks
            weights = self._of(pipeline, op.stage)
            if op.kind == FORWARD:
                if came:
                    self._take_tied(weights, self._tied[op], came)
                weights.before_forward(op.microbatch)
            elif op.kind == WEIGHT:
                weights.before_weight(op.microbatch)
            else:
                weights.before_backward(op.microbatch)
            others = tuple(edge for edge in wired.output_edges if not edge.is_update)
            outputs = iter(handler(wired._replace(output_edges=others), inputs))
            if op.kind in (BACKWARD, INPUT):
                weights.done(op.microbatch)
            return [self._update_payload(edge) if edge.is_update else next(outputs) for edge in wired.output_edges]

        return handle

    def _run_update(self, wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
        op = wired.op
        key = self._schedule.pipeline_of(op), op.stage
        if self._gang is None or op.stage not in self._shared:
            self._update(self._of(*key), op, inputs)
        else:
            self._gang.once(op, key in self._weights, lambda: self._update(self._of(*key), op, inputs))
        return [
            Payload.gradients(self._tied_value(edge)) if edge.is_tied_value else self._update_payload(edge)
            for edge in wired.output_edges
        ]

    def _update_payload(self, edge: Edge) -> Payload:
        """A window's gradients on their way to the owner, or what comes back."""
        stage = edge.consumer.stage
        update, _ = self._windows.update_of(edge.consumer.microbatch)
        if update == self._open:
            return Payload.gradients([])
        if edge.producer.kind not in (UPDATE, PREDICT):
            weights = self._of(self._schedule.pipeline_of(edge.producer), stage)
            given = weights.gradients_so_far if edge.producer.kind == GIVE else weights.gradients
            return Payload.gradients(given(update))
        if self._one_copy_steps:
            _, pipeline = self._windows.update_of(edge.consumer.microbatch)
            steps = self._updating.needed(pipeline, stage, self._moment(edge.producer))
            return Payload.gradients([*self._values(self._of(OWNER, stage), edge.producer, steps)])
        return Payload.gradients(self._reduced[stage])

    def _values(
        self, weights: CopyWeights, op: Op, steps: Sequence[int], names: Sequence[str] | None = None
    ) -> list[Tensor]:
        """The weights that an update has made, and the predictions; after a PREDICT the predictions alone."""
        made = [] if op.kind == PREDICT else weights.versions.copies(names)
        return made + [value for each in steps for value in weights.versions.ahead(each, names)]

    def _moment(self, op: Op) -> int:
        """The moment that an update or a PREDICT brings."""
        update, _ = self._windows.update_of(op.microbatch)
        return moment(update, True) if op.kind == PREDICT else moment(update + 1)

    def _tied_value(self, edge: Edge) -> list[Tensor | None]:
        """What an update has made of a tied parameter; nothing where it did nothing, or leaves it as it is."""
        update, pipeline = self._windows.update_of(edge.producer.microbatch)
        if update == self._open:
            return []
        stage = edge.producer.stage
        self._select(pipeline, stage)
        name = self._updating.tied_name(edge)
        steps = self._updating.tied_needed(name, pipeline, edge.consumer.stage, self._moment(edge.producer))
        return [*self._values(self._here[pipeline, stage], edge.producer, steps, [name])]

    def _take_tied(self, weights: CopyWeights, edges: Sequence[Edge], came: Sequence[Payload]) -> None:
        for edge, payload in zip(edges, came, strict=True):
            if values := [value for value in payload.leaves if value is not None]:
                tied = weights.tied[self._updating.tied_name(edge)]
                tied.take_predicted(values) if edge.producer.kind == PREDICT else tied.take(values)

    def _update(self, weights: CopyWeights, op: Op, received: Sequence[Payload]) -> None:
        update, pipeline = self._windows.update_of(op.microbatch)
        if update == self._open or op.kind == GIVE:
            return
        if op.kind == PREDICT:
            self._predict(weights, op, received)
        elif pipeline == OWNER:
            parts = [weights.gradients(update), *(payload.leaves for payload in received)]
            total = self._replicas.summed(list(weights.masters.values()), summed(parts))
            if not self._one_copy_steps and self._windows.num_pipelines > 1:
                self._reduced[op.stage] = total
            weights.apply(update, [total], self._replicas.sharding.to_step)
            self._replicas.share_stepped(list(weights.masters.values()))
            weights.look_ahead(self._replicas.sharding.predicted)
        elif self._one_copy_steps:
            weights.versions.take([leaf for leaf in received[0].leaves if leaf is not None])
        else:
            weights.apply(update, [list(received[0].leaves)])
            self._replicas.share_stepped(list(weights.masters.values()))

    def _predict(self, weights: CopyWeights, op: Op, received: Sequence[Payload]) -> None:
        update, pipeline = self._windows.update_of(op.microbatch)
        sharding = self._replicas.sharding
        if pipeline == OWNER:
            parts = [weights.gradients_so_far(update), *(payload.leaves for payload in received)]
            total = self._replicas.summed(list(weights.masters.values()), summed(parts))
            weight = self._updating.known_weight(op.stage, update)
            mean = [None if g is None or not weight else g / weight for g in total]
            if not self._one_copy_steps:
                self._reduced[op.stage] = mean
            weights.predict(update, mean, sharding.predicted, sharding.to_step)
        elif self._one_copy_steps:
            weights.versions.take_predicted([leaf for leaf in received[0].leaves if leaf is not None])
        else:
            weights.predict(update, list(received[0].leaves), sharding.predicted)
