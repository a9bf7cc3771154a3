"""A recorded run that can be run again: as it was, with some ops as they should be, or ideal.

run = ReplayedRun(table)
run.replayed                         each step's time as recorded ops make it, nobody late
run.mean(run.ideal)                  all ops of a kind alike: the study's T_ideal
run.mean(np.where(some, ...))        anything between
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from penstock.analyze.messages import messages_of
from penstock.analyze.step_network import StepNetwork, networks, own_times
from penstock.analyze.whole import StepTable
from penstock.engine.network import Array

FORWARD_MESSAGES, BACKWARD_MESSAGES = "forward-pp-comm", "backward-pp-comm"


class ReplayedRun:
    """The steps of a run, each as a network of the engine over the times that its ops and messages took.

    Ops and messages are parts of a step: its M ops come first, its L messages follow.

    Attributes:
        table: the steps. messages: between ranks.
        own: ms that each part took by itself, (K, M + L).
        kinds: names of the kinds of parts: those of ops, then those of messages.
        kind, replica, rank: of each part; of a message those of its receiver, (M + L,).
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.messages = messages_of(table)
        self.own: Array = np.hstack([own_times(table), self.messages.own])
        self.networks: list[StepNetwork] = networks(table, self.messages)
        self.kinds = (*(kind.name for kind in table.trace.kinds), FORWARD_MESSAGES, BACKWARD_MESSAGES)
        self.kind = np.append(table.kind, len(table.trace.kinds) + ~self.forward)
        self.replica, self.rank = (
            np.append(column, column[self.messages.consumer]) for column in (table.replica, table.rank)
        )

    @cached_property
    def forward(self) -> Array:
        """Whether each message is an activation; a gradient otherwise (L,)."""
        found: Array = self.table.letters[self.messages.producer] == "F"
        return found

    @cached_property
    def is_message(self) -> Array:
        """Whether each part is a message (M + L,)."""
        return np.arange(len(self.kind)) >= self.table.num_ops

    @cached_property
    def measured(self) -> Array:
        """Each step's time as recorded (K,)."""
        found: Array = self.table.end.max(axis=1)
        return found

    @cached_property
    def replayed(self) -> Array:
        """Each step's time as the recorded ops make it, each started as soon as it could (K,)."""
        return self.times(self.own)

    @cached_property
    def ideal(self) -> Array:
        """All compute ops of a kind as long as their mean, all communication as its median, as in the study."""
        own = self.own.copy()
        are_communication = [*(kind.is_communication for kind in self.table.trace.kinds), True, True]
        for number, is_communication in enumerate(are_communication):
            alike = self.kind == number
            if alike.any():
                own[:, alike] = np.median(own[:, alike]) if is_communication else own[:, alike].mean()
        return own

    @cached_property
    def ideal_time(self) -> float:
        """Ms of a step whose ops are ideal, the same for all that have the same order: their mean."""
        one = [self._time(net, self.ideal[net.steps[0]]) * len(net.steps) for net in self.networks]
        return sum(one) / len(self.table.steps)

    def times(self, own: Array) -> Array:
        """Ms of each step over what its parts take (K,)."""
        found = np.zeros(len(own))
        for net in self.networks:
            found[net.steps] = [self._time(net, own[step]) for step in net.steps]
        return found

    def mean(self, own: Array) -> float:
        """The mean over all steps, ms."""
        return float(self.times(own).mean())

    def won(self, own: Array) -> float:
        """By how many ms the mean step would be shorter."""
        return float(self.replayed.mean()) - self.mean(own)

    def _time(self, net: StepNetwork, own: Array) -> float:
        return net.time(net.durations(own)).makespan
