"""A recorded run that can be run again: as it was, with some ops as they should be, or ideal.

run = ReplayedRun.of(trace)
run.times()                          each step's time as recorded ops make it, nobody late
run.times(run.ideal())               all ops of a kind alike: the study's T_ideal
run.times(run.own.where(...))        anything between
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.analyze.messages import messages_of
from penstock.analyze.step_network import Messages, StepNetwork, networks, own_times
from penstock.analyze.whole import StepTable
from penstock.engine.network import Array


@dataclass(frozen=True, eq=False)
class OwnTimes:
    """What ops (K, M) and messages (K, L) take by themselves, ms."""

    ops: Array
    messages: Array

    def with_others(self, other: OwnTimes, ops: Array | None = None, messages: Array | None = None) -> OwnTimes:
        """The same, but for some ops and messages those of `other`; the choice by op (M,) and message (L,)."""
        changed = self
        if ops is not None:
            changed = replace(changed, ops=np.where(ops, other.ops, changed.ops))
        if messages is not None:
            changed = replace(changed, messages=np.where(messages, other.messages, changed.messages))
        return changed


class ReplayedRun:
    """The steps of a run, each as a network of the engine over the times that its ops took.

    Attributes:
        table: the steps. messages: between ranks.
        own: what each took by itself.
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.messages: Messages = messages_of(table)
        self.own = OwnTimes(own_times(table), self.messages.own)
        self.networks: list[StepNetwork] = networks(table, self.messages)

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
    def ideal(self) -> OwnTimes:
        """All compute ops of a kind as long as their mean, all communication as its median, as in the study."""
        table, ops = self.table, self.own.ops.copy()
        for number, kind in enumerate(table.trace.kinds):
            of_kind = np.flatnonzero(table.kind == number)
            if len(of_kind):
                values = ops[:, of_kind]
                ops[:, of_kind] = np.median(values) if kind.is_communication else values.mean()
        messages = self.own.messages.copy()
        for forward in (True, False):
            way = self.forward == forward
            if way.any():
                messages[:, way] = np.median(messages[:, way])
        return OwnTimes(ops, messages)

    @cached_property
    def ideal_time(self) -> float:
        """Ms of a step whose ops are ideal, the same for all that have the same order: their mean."""
        one = [self._time(net, self.ideal, int(net.steps[0])) * len(net.steps) for net in self.networks]
        return sum(one) / len(self.table.steps)

    @cached_property
    def forward(self) -> Array:
        """Whether each message is an activation; a gradient otherwise (L,)."""
        found: Array = self.table.letters()[self.messages.producer] == "F"
        return found

    def times(self, own: OwnTimes) -> Array:
        """Ms of each step over what ops and messages take (K,)."""
        net_of = {step: net for net in self.networks for step in net.steps.tolist()}
        return np.array([self._time(net_of[step], own, step) for step in range(len(self.table.steps))])

    def mean(self, own: OwnTimes) -> float:
        """The mean over all steps, ms."""
        return float(self.times(own).mean())

    def _time(self, net: StepNetwork, own: OwnTimes, step: int) -> float:
        return net.time(net.durations(own.ops[step], own.messages[step])).makespan
