"""The weights of one copy of a stage, if updates come between its ops.

    weights = CopyWeights(stage, schedule, 0, rule_of("pipedream"), owns=True)
    optimizer = torch.optim.SGD(weights.masters.values(), lr=0.1)

    before_forward(m) ... before_backward(m) ... done(m)      before_weight(m)
    gradients(n) -> [reduce] -> apply(n, parts) -> look_ahead()         on a copy with the optimizer's state
    gradients(n) -> [reduce] ... [broadcast] -> take_over(n, values)    on one without

The optimizer never steps the module's own parameters. A step in place would count as a change of what forwards in
flight have saved, and their backward would fail. Instead it steps masters, other parameters that use the same memory
or their own. `versioned_parameters.py` gives the module's parameters the values that the rule says an op reads.

A rule predicts from the optimizer's state, when an op asks for the prediction. If another copy has that state, or
several replicas have parts of it, the holder of the state predicts everything that ops will read of a version as soon
as the version is made. The predictions then travel with the version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.given_optimizer import make_step
from penstock.runtime.parameters.gradients import Gradients, WindowGradients, factor_of, norms_of, num_bytes
from penstock.runtime.parameters.muon import marked_like
from penstock.runtime.parameters.version_rules import VersionRule
from penstock.runtime.parameters.versioned_parameters import VersionedParameters
from penstock.runtime.stage.autograd import added
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, laid_like, local, memory, own_shard
from penstock.schedule import Schedule
from penstock.schedule.staleness import Needs

ToStep = Callable[[Sequence[Parameter], Gradients], tuple[Sequence[Parameter], Gradients]]
Write = Callable[[Tensor, Parameter], None]
"""Writes into a tensor where something that the optimizer steps will be."""

Spread = Callable[[Sequence[Parameter], Write], list[Tensor]]
"""Returns where each master will be. The replica that steps a master writes it."""


class CopyWeights:
    """One pipeline's copy of a stage on the rank that hosts it.

    A parameter that two modules of the stage share counts once. Buffers, frozen parameters and parameters that other
    stages own are left alone. Between passes the module's parameters hold the newest version, and anyone may change
    them.

    Args:
        stage: the module whose parameters the ops read.
        schedule: has updates as ops.
        index: the stage's number.
        rule: says which weights ops read.
        owns: whether this copy has the optimizer's state and applies updates. If not, it takes over the owner's.
        elsewhere: names of the stage's parameters that other stages own.
        tied: by the name on its owner's stage the versions of such a parameter that ops of this copy read.
        needs: how many updates ahead this copy must know its weights, for its own ops and for those of others.
        predicts: whether this copy has all of the optimizer's state, so that it predicts weights itself when asked.
            If not, it is given the predictions.

    Attributes:
        versions: of the parameters that updates of this copy change. tied: by name, of the other ones.
        masters: by name, the parameters that the optimizer steps; empty unless `owns`.
        mismatch: by microbatch, the updates of this copy between its forward and its backward in the last pass.
    """

    def __init__(
        self,
        stage: nn.Module,
        schedule: Schedule,
        index: int,
        rule: VersionRule,
        owns: bool,
        elsewhere: Collection[str] = (),
        tied: Mapping[str, VersionedParameters] | None = None,
        needs: Needs | None = None,
        predicts: bool = True,
    ) -> None:
        assert schedule.windows is not None, "the rule has refused a schedule without updates"
        self.stage, self._rule, self._index = stage, rule, index
        self._windows, self._elsewhere = schedule.windows, frozenset(elsewhere)
        self._parameters = {name: p for name, p in self.own() if p.requires_grad}
        # `.data` has a version counter of its own, so that a step leaves the parameter's alone.
        moves = rule.most_steps(schedule, index) > 0
        self.masters = (
            {name: _master_of(p, rule.keeps or moves) for name, p in self._parameters.items()} if owns else {}
        )
        self._owns, self._predicts, self._needs = owns, owns and predicts, needs
        self.mismatch: dict[int, int] = {}
        self._slowed = rule.slowed(schedule, index)
        self._gradients = WindowGradients(list(self._parameters.values()))
        masters = list(self.masters.values())
        predict = self._predict if self._predicts else None
        self.versions = VersionedParameters(self._parameters, masters, rule, schedule, index, moves, predict, needs)
        self.tied = dict(tied or {})
        self._optimizer: Optimizer | None = None
        self._groups: dict[int, Mapping[str, Any]] = {}
        self._rates: Sequence[float] | None = None
        self._clip_norm: float | None = None
        self._open = False

    def own(self) -> Iterator[tuple[str, Parameter]]:
        """The stage's parameters that no other stage owns, by name."""
        return ((name, p) for name, p in self.stage.named_parameters() if name not in self._elsewhere)

    # -- a pass ----------------------------------------------------------------------------------------------

    def begin(
        self,
        optimizer: Optimizer | None,
        rates: Sequence[float] | None,
        clip_norm: float | None,
        open_window: bool = False,
    ) -> None:
        """A pass begins: all ops of the schedule, once.

        Args:
            optimizer: steps the masters; None on a copy that has none.
            rates: the learning rate of each update of the pass; None for the rates of the optimizer's groups.
            clip_norm: the largest norm that this stage's gradient may have at an update.
            open_window: the updates of the last window do nothing. Its gradients stay for the next pass, whose first
                window adds to them.
        """
        self._optimizer, self._rates, self._clip_norm, self._open = optimizer, rates, clip_norm, open_window
        self._groups = {} if optimizer is None else {id(p): g for g in optimizer.param_groups for p in g["params"]}
        self.mismatch = {}
        for each in self._all():
            each.begin()
        self._gradients.begin()

    def before_forward(self, m: int) -> None:
        """Puts into the parameters the weights that the forward of microbatch `m` reads."""
        for each in self._all():
            each.before_forward(m)

    def before_backward(self, m: int) -> None:
        """Does the same before a backward (B or I) or recomputation (R), and selects the gradients of its window."""
        self.mismatch[m] = self.versions.before_backward(m)
        for each in self.tied.values():
            each.before_backward(m)
        self._gradients.select(self._window(m))

    def before_weight(self, m: int) -> None:
        """Selects the gradients of the window of `m`, whose W comes. A W reads no weights."""
        self._gradients.select(self._window(m))

    def done(self, m: int) -> None:
        """The backward of `m` that reads weights (B or I) is over."""
        for each in self._all():
            each.done(m)

    def end(self) -> None:
        """Ends a pass, even a broken one: parameters hold the newest version, and only gradients of an open window
        stay, in `.grad`.
        """
        for each in self._all():
            each.end()
        self._gradients.end(self._windows.num_updates - 1 if self._open else None)
        self._optimizer, self._rates, self._open = None, None, False
        self._groups = {}

    # -- updates ---------------------------------------------------------------------------------------------

    def gradients(self, update: int) -> Gradients:
        """Gives away this copy's sums over an update's window, in the order of parameters. Of shards, its parts."""
        if self._left_open(update):
            return [None] * len(self._parameters)
        found = zip(self._gradients.take(update), self._parameters.values(), strict=True)
        return [None if g is None else local(laid_like(g, parameter)) for g, parameter in found]

    def apply(self, update: int, parts: Sequence[Gradients], to_step: ToStep | None = None) -> None:
        """Applies an update: the sum of `parts`, pipelines in order, clipped, then the optimizer's step.

        Args:
            to_step: gives what the optimizer steps in place of the masters, and its gradients. Default: the masters.
        """
        if self._left_open(update):
            return
        assert self._optimizer is not None, "ops of an update run on a copy with an optimizer"
        total = summed(parts)
        if self._clip_norm is not None:
            total = clipped(total, self._clip_norm, list(self.masters.values()))
        rate = None if self._rates is None else self._rates[update]
        self.versions.advance()
        masters: Sequence[Parameter] = list(self.masters.values())
        if to_step is not None:
            masters, total = to_step(masters, total)
        step_masters(self._optimizer, masters, total, rate, self._slowed)

    def look_ahead(self, spread: Spread) -> None:
        """Predicts all that ops will read of the newest version, if this copy has a part of the optimizer's state.

        It is called as a pass begins and after each update, by all replicas that have the other parts.
        """
        if self._predicts or not self._owns or not self._needs:
            return
        masters = list(self.masters.values())
        ahead = {s: spread(masters, partial(self._predict, num_steps=s)) for s in self.versions.needed()}
        self.versions.give_ahead(ahead)

    def take_over(self, update: int, values: Sequence[Tensor]) -> None:
        """Makes `values` the newest version of a copy without the optimizer's state.

        The predictions for ops of this copy follow the values, as `VersionedParameters.copies` gives them.
        """
        if not self._left_open(update):
            self.versions.take(values)

    # -- between passes --------------------------------------------------------------------------------------

    @property
    def num_updates(self) -> int:
        """Updates of this copy over all passes; may be set on loading."""
        return self.versions.newest

    @num_updates.setter
    def num_updates(self, num: int) -> None:
        self.versions.renumber(num)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Sets the newest weights by name, between passes. Weights without a value keep what the parameters hold.

        Nothing stays of a pass that broke off.
        """
        with torch.no_grad():
            for name, parameter in self.own():
                if name in values and not parameter.requires_grad:
                    parameter.copy_(values[name])
            self.versions.fill([values.get(name, p.detach()) for name, p in self._parameters.items()])

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint needs besides parameters and the optimizer's state.

        "versions/NAME": the version before the newest, where the rule has later forwards read it;
        "gradients/NAME": the sum so far of a window left open.
        """
        older = self.versions.older().items()
        state = {f"versions/{name}": as_shard(tensor, self._parameters[name]) for name, tensor in older}
        for name, gradient in zip(self._parameters, self._gradients.now(), strict=True):
            if gradient is not None:
                state[f"gradients/{name}"] = gradient
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave; entries of other stages are ignored.

        Without an older version the newest stands for it, as when training begins.
        """
        older = {name: state.get(f"versions/{name}") for name in self._parameters}
        self.versions.set_older({name: tensor for name, tensor in older.items() if tensor is not None})
        for name, parameter in self._parameters.items():
            gradient = state.get(f"gradients/{name}")
            parameter.grad = None
            if gradient is not None:
                parameter.grad = torch.empty_like(parameter).copy_(own_shard(gradient, parameter)).detach()

    def bytes(self) -> dict[str, int]:
        """The most bytes held in the pass: of the module's parameters, of versions or predictions, of gradients."""
        tied = sum(num_bytes(each.named.values()) + each.bytes_beside() for each in self.tied.values())
        return {
            "parameters": num_bytes(self.stage.parameters()),
            "versions": self.versions.bytes_beside() + tied,
            "gradients": self._gradients.peak_bytes,
        }

    # -- inside ----------------------------------------------------------------------------------------------

    def _window(self, m: int) -> int:
        return m // self._windows.window

    def _all(self) -> list[VersionedParameters]:
        return [self.versions, *self.tied.values()]

    def _predict(self, out: Tensor, stepped: Parameter, num_steps: int) -> None:
        """Writes where a master, or a replica's part of one, will be after so many more updates."""
        if self._optimizer is None or id(stepped) not in self._groups:
            raise RuntimeFailure(
                f"rule {self._rule.name!r} predicts weights of stage {self._index}, and the optimizer does not have "
                "them; give ps.Pipeline an optimizer over all parameters"
            )
        group = self._groups[id(stepped)]
        rate = group["lr"] if self._rates is None else self._rates[self.versions.num_in_pass]
        state = {key: local(value) for key, value in self._optimizer.state.get(stepped, {}).items()}
        self._rule.predict(out, memory(stepped), num_steps, float(rate) / self._slowed, group, state)

    def _left_open(self, update: int) -> bool:
        return self._open and update == self._windows.num_updates - 1


def _master_of(parameter: Parameter, apart: bool) -> Parameter:
    """Makes the parameter that the optimizer steps in its place: on the same memory, unless it is a shard and
    `apart`.
    """
    if not is_sharded(parameter):
        return marked_like(parameter, Parameter(parameter.data))
    values = memory(parameter)
    return marked_like(parameter, Parameter(as_shard(values.clone() if apart else values, parameter)))


def summed(parts: Sequence[Gradients]) -> Gradients:
    """((g0 + g1) + g2) ..., parameter by parameter; none of the parts is changed."""
    return [reduce(added, gradients, None) for gradients in zip(*parts, strict=True)]


def clipped(gradients: Gradients, max_norm: float, masters: Sequence[Parameter]) -> Gradients:
    """Scales gradients to a norm of at most `max_norm` over all of them, as `torch.nn.utils.clip_grad_norm_` does.

    If masters are shards, all processes that hold them compute the norm together.
    """
    present = [as_shard(g, master) for g, master in zip(gradients, masters, strict=True) if g is not None]
    if not present:
        return gradients
    factor = factor_of(max_norm, torch.linalg.vector_norm(torch.stack(norms_of(present))))
    return [None if g is None else g * factor for g in gradients]


def step_masters(
    optimizer: Optimizer, masters: Sequence[Parameter], gradients: Gradients, rate: float | None, slowed: int = 1
) -> None:
    """Steps only these masters: an optimizer skips parameters without a gradient.

    Args:
        rate: learning rate of this step; that of the optimizer's groups where None.
        slowed: what the rate is divided by.
    """
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = None if gradient is None else as_shard(gradient, master)
    try:
        if any(gradient is not None for gradient in gradients):
            with learning_rate(optimizer, rate, slowed):
                make_step(optimizer)
    finally:
        for master in masters:
            master.grad = None


@contextmanager
def learning_rate(optimizer: Optimizer, rate: float | None, slowed: int = 1) -> Iterator[None]:
    """Gives all groups this learning rate, or their own, divided by `slowed`, within the `with` statement."""
    if rate is None and slowed == 1:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        if rate is None:
            group["lr"] = own / slowed
        else:
            group["lr"] = torch.full_like(own, rate / slowed) if isinstance(own, Tensor) else rate / slowed
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = own
