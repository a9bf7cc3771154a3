"""Holds the versions of the weights of a copy of a stage, and shows each op the version that its rule says.

    U1 makes W1, U2 makes W2, ..: versions         F3 reads the version that the rule says, and so does B3

A version is held until the last op that reads it. The optimizer never steps the module's own parameters: a step in
place would count as a change of what forwards in flight have saved, and their backwards would fail. Instead it steps
masters, other parameters whose memory is that of the newest version.

    module's parameter    what the op that runs reads
    master                the newest version, which the next update steps in place if no op is to read it any more
    older versions        in memory of their own

Ops find what they read in the module's parameters, in one of two ways:

    pointed    parameter.data is one of the versions
    copied     what an op reads is written into the parameter's own memory, and every version lies elsewhere

Autograd saves some parameters themselves (LayerNorm's weight: its backward reads whatever the parameter holds by
then) and views of the memory of others (the transposed weight of `nn.Linear`). Both find the same version again if
the parameter is pointed at its memory before the backward, as it was before the forward, and if nobody has written
there since. So an update that must keep the newest version goes on in new memory, and leaves the old as it is.

Values are copied where the parameter is a shard, which cannot be pointed elsewhere, and where ops read predictions:
there a backward is to find other values than its forward in the views that autograd has saved. Both ways go through
`.data`, which has a version counter of its own, so that autograd does not object. Copies that autocast made in a
forward stay in its graph: their backward reads those.

A rule predicts weights from the optimizer's state. If this copy has that state, an op's prediction is made when the
op runs. If another copy has it, or several replicas have parts of it, the holder of the state predicts everything
that ops will read of a version as soon as the version is made, and sends the predictions with the version. A PREDICT
makes new predictions, from the part of the window's gradient that is known (`optimizer.step_for_now`).

A parameter that another stage owns comes with the first forward that passed the owner's stage since its update, so
that all stages read one version in the forwards of a microbatch:

    owner's stage   F2 reads W1 .. U1 makes W2 .. F3 reads W2
                                        '-------------.
    this stage                F2 reads W1 ..           F3 reads W2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import Gradients, GradientSums, clipped, num_bytes, summed
from penstock.runtime.parameters.optimizer import step_for_now, step_masters
from penstock.runtime.parameters.rules import ReadContext, VersionRule, WeightRead
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, laid_like, local, memory, own_shard, standing_for
from penstock.schedule import Schedule
from penstock.schedule.weight_versions import Needs, WeightReads, moment

Predict = Callable[[Tensor, Parameter, int], None]
"""Writes into a tensor where a master will be after so many more updates."""
Write = Callable[[Tensor, Parameter], None]
"""Writes into a tensor where something that the optimizer steps will be."""
Spread = Callable[[Sequence[Parameter], Write], list[Tensor]]
"""Returns where each master will be. The replica that steps a master writes it."""
ToStep = Callable[[Sequence[Parameter], Gradients], tuple[Sequence[Parameter], Gradients]]
Ahead = Mapping[int, Sequence[Tensor]]
"""By the updates that are predicted on top of the newest version what the parameters will be, in their order."""


class VersionedParameters:
    """Parameters that one update changes together, in one copy of a stage, and the versions of them that are held.

    Between passes the parameters hold the newest version, and anyone may change them.

    Args:
        named: by name, the parameters that ops read.
        masters: the parameters that the optimizer steps in their place, in the same order, or none. A shard's master
            has its own memory if versions or predictions are copied.
        rule: says which version ops read.
        schedule: has updates as ops. stage: the copy's stage.
        moves: whether ops read predictions.
        predict: makes predictions; None if they are given with a version, by the copy with the optimizer's state.
        needs: how many updates ahead of the newest version the weights must be known here.
        reads: the reads of this copy's ops, if another stage owns the parameter and the rule predicts.

    Attributes:
        newest: the number of updates over all passes.
        most: the most sets of weights held in the pass: versions and predictions.
    """

    def __init__(
        self,
        named: Mapping[str, Parameter],
        masters: Sequence[Parameter],
        rule: VersionRule,
        schedule: Schedule,
        stage: int,
        moves: bool = False,
        predict: Predict | None = None,
        needs: Needs | None = None,
        reads: WeightReads | None = None,
    ) -> None:
        self.named = dict(named)
        self._parameters = list(self.named.values())
        self._masters: Sequence[Parameter | None] = list(masters) or [None] * len(self._parameters)
        self._rule, self._stage, self._num_stages = rule, stage, schedule.num_stages
        self._window = 1 if schedule.updates is None else schedule.updates.window
        self._steps_of, self._reads_of, self._needs = rule.ahead(schedule, stage), reads, needs or {}
        if reads is not None:
            self._needs = {when: reads.needed(when) for when in reads.needs}
            moves = bool(self._needs)
        self._moves, self._predict = moves, predict
        self._is_copied = [moves or (rule.keeps and is_sharded(p)) for p in self._parameters]
        self.newest, self._first, self.most = 0, 0, 1
        self._versions: dict[int, list[Tensor]] = {}
        """By version the values of the parameters, in their order."""
        self._num_users: dict[int, int] = {}
        """By version, the backwards that are still to read it."""
        self._shown = WeightRead(0)
        """The weights that the parameters hold."""
        self._ahead: Ahead = {}
        self._reads: dict[int, tuple[WeightRead, int]] = {}
        """By microbatch, what its forward read, and the newest version then."""
        self._rest()

    # Ops of a pass.

    def begin(self) -> None:
        """Starts a pass: the parameters hold the newest version. Copied ones have it elsewhere, too."""
        self._reads.clear()
        self._rest()
        newest = self._versions[self.newest]
        for place, master in enumerate(self._masters):
            if self._is_copied[place]:
                if master is not None and is_sharded(master):
                    newest[place] = memory(master).copy_(newest[place])
                else:
                    self._step_in(newest, place, newest[place].clone())
        self._first, self.most = self.newest, 0
        self._count()

    def before_forward(self, m: int) -> None:
        """Shows the weights that the forward of microbatch `m` reads."""
        read = self._rule.forward(self._context(m, is_forward=True))
        self._show(read)
        if self._rule.keeps:
            self._num_users[read.version] = self._num_users.get(read.version, 0) + 1
        self._reads[m] = read, self.newest

    def before_backward(self, m: int) -> int:
        """Shows the weights that the backward reads. Returns the number of updates since the forward."""
        read, since = self._reads[m]
        self._show(self._rule.backward(self._context(m, is_forward=False), read))
        return self.newest - since

    def done(self, m: int) -> None:
        """Ends the backward of `m` that reads weights. The last backward to read a version frees it."""
        read, _ = self._reads.pop(m)
        if self._rule.keeps:
            self._num_users[read.version] -= 1
            if not self._num_users[read.version]:
                del self._num_users[read.version]
                self._free_before(self._rule.oldest(self.newest))

    def end(self) -> None:
        """Ends a pass, even a broken one: the parameters hold the newest version."""
        self._reads.clear()
        self._num_users.clear()
        self._show(WeightRead(self.newest))
        self._free_before(self._rule.oldest(self.newest))
        self._rest()

    # Updates of a pass.

    def advance(self, values: Sequence[Tensor] | None = None) -> None:
        """Adds the next version: `values`, or the memory that the optimizer steps next. Drops all predictions."""
        oldest = self._rule.oldest(self.newest + 1)
        self._free_before(oldest)
        before = self._versions.pop(self.newest)
        new = list(before)
        if self.newest >= oldest or self.newest in self._num_users:  # the version before stays as it is
            self._versions[self.newest] = before
            for place, tensor in enumerate(before):
                if self._is_copied[place]:  # no op has seen this memory, so that its values may move instead
                    before[place] = tensor.clone()
                else:
                    self._step_in(new, place, tensor.clone())
        elif self._shown == WeightRead(self.newest) and not any(self._is_copied):
            self._shown = WeightRead(self.newest + 1)
        for tensor, value in zip(new, values or (), strict=values is not None):
            tensor.copy_(local(value))
        self.newest += 1
        self._versions[self.newest], self._ahead = new, {}
        self._count()

    def take(self, values: Sequence[Tensor]) -> None:
        """Adds the next version with its predictions, as the copy with the optimizer's state sent them: the
        predictions follow the values, step by step, in the order of parameters.
        """
        num = len(self.named)
        self.advance(values[:num])
        if steps := self.needed():
            ahead = [value.clone() for value in values[num:]]
            self.give_ahead({each: ahead[n * num : (n + 1) * num] for n, each in enumerate(steps)})

    def copies(self, names: Sequence[str] | None = None) -> list[Tensor]:
        """Copies of the newest version, of all parameters or of these names."""
        return [value.clone() for name, value in self.newest_values().items() if names is None or name in names]

    # Predictions.

    @property
    def num_in_pass(self) -> int:
        """The number of updates of the pass so far."""
        return self.newest - self._first

    def needed(self, is_predicted: bool = False) -> Sequence[int]:
        """How far ahead of the newest version, in updates, ops read: before its PREDICT, or after it."""
        return self._needs.get(moment(self.num_in_pass, is_predicted), ())

    def take_predicted(self, values: Sequence[Tensor]) -> None:
        """Takes over the predictions that a PREDICT of another copy has made."""
        num = len(self.named)
        steps = self.needed(is_predicted=True)
        self.give_ahead({each: [v.clone() for v in values[n * num : (n + 1) * num]] for n, each in enumerate(steps)})

    def give_ahead(self, ahead: Ahead) -> None:
        """Sets the predictions from the newest version. They are held until the next version."""
        self._ahead = ahead
        self._count()

    def ahead(self, steps: int, names: Sequence[str] | None = None) -> list[Tensor]:
        """The values of all parameters, or of these names, so many updates after the newest version.

        Raises RuntimeFailure if they are not predicted here, and were not given.
        """
        found = []
        for place, name in enumerate(self.named):
            if names is None or name in names:
                found.append(torch.empty_like(self._versions[self.newest][place]))
                self._write_ahead(found[-1], place, steps)
        return found

    # Between passes.

    def renumber(self, newest: int) -> None:
        """Sets the number of updates so far."""
        shift = newest - self.newest
        self._versions = {version + shift: tensors for version, tensors in self._versions.items()}
        self.newest, self._shown = newest, WeightRead(newest)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Sets the values of the newest version, even after a broken pass. They may be what the parameters hold."""
        self._reads.clear()
        self._num_users.clear()
        for place, (parameter, value) in enumerate(zip(self._parameters, values, strict=True)):
            if not self._is_copied[place] and self._shown != WeightRead(self.newest):
                parameter.data = self._versions[self.newest][place]
            memory(parameter).copy_(local(value))
        self._shown = WeightRead(self.newest)
        self._free_before(self._rule.oldest(self.newest))
        self._rest()

    def newest_values(self) -> dict[str, Tensor]:
        return dict(zip(self.named, self._versions[self.newest], strict=True))

    def older(self) -> dict[str, Tensor]:
        """The version before the newest, of shards the local part; empty if it is not held."""
        return dict(zip(self.named, self._versions.get(self.newest - 1, ()), strict=False))

    def set_older(self, older: Mapping[str, Tensor]) -> None:
        """Sets the version before the newest; holds none if a parameter is missing. Shards may be given whole."""
        newest = self._versions[self.newest]
        self._versions = {self.newest: newest}
        if self._rule.keeps and older and not self.named.keys() - older.keys():
            parts = [(older[name], parameter) for name, parameter in self.named.items()]
            values = [one if is_sharded(one) else own_shard(one, parameter) for one, parameter in parts]
            self._versions[self.newest - 1] = [
                torch.empty_like(tensor).copy_(local(value)) for tensor, value in zip(newest, values, strict=True)
            ]

    def bytes_beside(self) -> int:
        """The most bytes in the pass of versions and predictions, without the parameters' own memory."""
        return sum(
            num_bytes([parameter]) * (self.most - (not is_copied or self._moves))
            for parameter, is_copied in zip(self._parameters, self._is_copied, strict=True)
        )

    # Inside.

    def _rest(self) -> None:
        """Between passes parameters hold the newest version, in memory that masters share unless they are shards."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not None and not is_sharded(parameter):
                master.data = parameter.data
        self._versions[self.newest] = [memory(parameter) for parameter in self._parameters]
        self._shown, self._ahead = WeightRead(self.newest), {}

    def _step_in(self, version: list[Tensor], place: int, tensor: Tensor) -> None:
        """Makes a tensor a parameter's value in a version, and the memory that its master steps."""
        version[place] = tensor
        master = self._masters[place]
        if master is not None:
            master.data = tensor

    def _count(self) -> None:
        # Where ops read predictions, the newest version lies beside what they read.
        self.most = max(self.most, len(self._versions) + self._moves + len(self._ahead))

    def _context(self, m: int, is_forward: bool) -> ReadContext:
        ahead = self._steps_of.get(m, 0)
        if self._reads_of is not None:
            stands_for = (self._reads_of.forward if is_forward else self._reads_of.backward)[m]
            ahead = max(0, self._first + stands_for - self.newest)
        window = self._first + m // self._window
        place = self._stage, self._num_stages, self._window
        return ReadContext(*place, window, self.newest, min(self._versions), ahead)

    @torch.no_grad()
    def _show(self, read: WeightRead) -> None:
        """Has the parameters hold the weights that an op reads."""
        if read == self._shown:
            return
        if read.version not in self._versions:
            raise RuntimeFailure(
                f"an op is to read the weights after {read.version} updates, and this copy of the stage holds those "
                f"after {', '.join(map(str, sorted(self._versions)))}; the order does not fit the rule of its updates"
            )
        for place, (parameter, tensor) in enumerate(zip(self._parameters, self._versions[read.version], strict=True)):
            if read.steps:
                self._write_ahead(memory(parameter), place, read.steps)
            elif self._is_copied[place]:
                memory(parameter).copy_(tensor)
            else:
                parameter.data = tensor
        self._shown = read

    def _write_ahead(self, out: Tensor, place: int, steps: int) -> None:
        """Writes where a parameter will be so many updates after the newest version."""
        master = self._masters[place]
        if steps in self._ahead:
            out.copy_(self._ahead[steps][place])
        elif self._predict is not None and master is not None:
            self._predict(out, master, steps)
        else:
            raise RuntimeFailure(
                f"no prediction {steps} updates ahead of version {self.newest} came: the order does not fit the rule"
            )

    def _free_before(self, oldest: int) -> None:
        """Frees the versions before a given one that no backward is still to read."""
        gone = [v for v in self._versions if v < min(oldest, self.newest) and v not in self._num_users]
        if self._shown.version in gone:
            self._show(WeightRead(self.newest))
        for version in gone:
            del self._versions[version]


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
        self._gradients = GradientSums(list(self._parameters.values()))
        self._sent: tuple[int, Gradients] | None = None
        """The last sum that was given away, and its update, where a GIVE may come after it."""
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
        for name, master in self.masters.items():
            master.requires_grad_(self._parameters[name].requires_grad)
        for each in self._all():
            each.begin()
        self._gradients.begin()
        self._sent = None

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
        sums = self._gradients.take(update)
        self._sent = (update, sums) if self._rule.steps_tentatively else None
        return self._local(sums)

    def gradients_so_far(self, update: int) -> Gradients:
        """Copies of this copy's sums over the part of an update's window that is there. Of shards, its parts."""
        is_sent = self._sent is not None and self._sent[0] == update
        sums = self._sent[1] if self._sent is not None and is_sent else self._gradients.held(update)
        return [None if g is None else g.clone() for g in self._local(sums)]

    def _local(self, sums: Gradients) -> Gradients:
        found = zip(sums, self._parameters.values(), strict=True)
        return [None if g is None else local(laid_like(g, parameter)) for g, parameter in found]

    def apply(self, update: int, parts: Sequence[Gradients], to_step: ToStep | None = None) -> None:
        """Applies an update: the sum of `parts`, pipelines in order, clipped, then the optimizer's step.

        Args:
            to_step: gives what the optimizer steps in place of the masters, and its gradients. Default: the masters.
        """
        optimizer, total = self._with_optimizer(), self._clipped(summed(parts))
        rate = None if self._rates is None else self._rates[update]
        self.versions.advance()
        masters: Sequence[Parameter] = list(self.masters.values())
        if to_step is not None:
            masters, total = to_step(masters, total)
        step_masters(optimizer, masters, total, rate)

    def predict(self, update: int, mean: Gradients, spread: Spread, to_step: ToStep | None = None) -> None:
        """Predicts the weights that ops will read, by the step that the optimizer would make of a gradient.

        Nothing is committed: weights and the optimizer's state stay as they are.

        Args:
            mean: the known part of an update's gradient, divided by the weight of its losses. If no parameter has a
                gradient, the momentum predicts.
            spread, to_step: as in `look_ahead` and `apply`.
        """
        optimizer, masters = self._with_optimizer(), list(self.masters.values())
        stepped: Sequence[Parameter] = masters
        needed = self.versions.needed(is_predicted=True)
        if all(gradient is None for gradient in mean):
            self.versions.give_ahead({s: spread(masters, partial(self._predict, num_steps=s)) for s in needed})
            return
        mean = self._clipped(mean)
        if to_step is not None:
            stepped, mean = to_step(masters, mean)
        rate = None if self._rates is None else self._rates[update]
        with step_for_now(optimizer, stepped):
            step_masters(optimizer, stepped, mean, rate)
            self.versions.give_ahead({s: spread(masters, partial(self._predict, num_steps=s - 1)) for s in needed})

    def _with_optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "ops of an update run on a copy with an optimizer"
        return self._optimizer

    def _clipped(self, total: Gradients) -> Gradients:
        return total if self._clip_norm is None else clipped(total, self._clip_norm, list(self.masters.values()))

    def look_ahead(self, spread: Spread) -> None:
        """Predicts all that ops will read of the newest version, if this copy has a part of the optimizer's state.

        It is called as a pass begins and after each update, by all replicas that have the other parts.
        """
        if self._predicts or not self._owns or not self._needs:
            return
        masters = list(self.masters.values())
        ahead = {s: spread(masters, partial(self._predict, num_steps=s)) for s in self.versions.needed()}
        self.versions.give_ahead(ahead)

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
        assert self._optimizer is not None, "a pass begins with an optimizer where updates are ops"
        group = self._groups.get(id(stepped))
        if group is None and stepped.requires_grad:
            raise RuntimeFailure(
                f"rule {self._rule.name!r} predicts weights of stage {self._index} that the optimizer does not have; "
                "give ps.Pipeline an optimizer over all parameters, or freeze these before (requires_grad_(False))"
            )
        if group is None or not num_steps or not stepped.requires_grad:  # what is frozen stays where it is
            out.copy_(memory(stepped))
            return
        rate = group["lr"] if self._rates is None else self._rates[self.versions.num_in_pass]
        state = {key: local(value) for key, value in self._optimizer.state.get(stepped, {}).items()}
        self._rule.predict(out, memory(stepped), num_steps, float(rate), group, state)


def _master_of(parameter: Parameter, apart: bool) -> Parameter:
    """Makes the parameter that the optimizer steps in its place: on the same memory, unless it is a shard and
    `apart`.
    """
    if not is_sharded(parameter):
        return standing_for(parameter, parameter.data)
    values = memory(parameter)
    return standing_for(parameter, as_shard(values.clone() if apart else values, parameter))
