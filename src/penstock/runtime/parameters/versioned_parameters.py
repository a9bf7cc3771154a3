"""Parameters that one update changes together, and which version of them each op of a copy reads.

    the copy's own                   the optimizer's step makes the next version, or values that come do
    one that another stage owns      the value comes with the first forward that has passed the owner's stage
                                     since the update, so that all stages read one version in the forwards of a
                                     microbatch:

    owner's stage   F2 reads W1 .. U1 makes W2 .. F3 reads W2
                                        '-------------.
    this stage                F2 reads W1 ..           F3 reads W2

What backwards read depends on the rule, everywhere. Between a forward and its backward here, at most as many new
values arrive as updates come between them on the owner's stage.

A version is held until the last op that reads it: where the rule has a backward read what its forward read, until
that backward. Ops find what they read in the parameters, in one of two ways:

    pointed    parameter.data -> one of   version 3 | version 4 | version 5 (newest, the master's own memory)
    copied     what an op reads is written into the parameter's memory; the newest version has memory of its own

Autograd saves some parameters themselves (LayerNorm's weight: its backward reads whatever the parameter holds by
then) and views on the memory of others (the transposed weight of `nn.Linear`). Both find the same version again if
the parameter is pointed at its memory before the backward, as before the forward, and if nobody has written there
since. So an update writes in place only where no op is to read the newest version any more; else the master goes on
in memory of its own, and the old one stays as it is.

Values are copied where the parameter is a shard, which cannot be pointed elsewhere, and where ops read predictions,
which are made when an op asks for them. They are written through `.data`, and the optimizer steps a master, another
parameter on the same memory or on its own: neither counts as a change in place of what a forward has saved. Where the
rule lets a backward read other values than its forward, it is one, and the rule wants it so. Copies that autocast
made in a forward stay in its graph: their backward reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import num_bytes
from penstock.runtime.parameters.version_rules import ReadContext, VersionRule, WeightRead
from penstock.runtime.tensors.dtensor import is_sharded, local, memory, own_shard
from penstock.schedule import Schedule
from penstock.schedule.staleness import Needs, WeightReads

Predict = Callable[[Tensor, Parameter, int], None]
"""Writes into a tensor where a master will be after so many more updates."""

Ahead = Mapping[int, Sequence[Tensor]]
"""By the updates that are predicted on top of the newest version what the parameters will be, in their order."""


class VersionedParameters:
    """Between passes the parameters hold the newest version, and may be changed by anyone.

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
        self.named, self._masters = dict(named), tuple(masters)
        self._parameters = list(self.named.values())
        self._rule, self._stage, self._num_stages = rule, stage, schedule.num_stages
        self._window = 1 if schedule.updates is None else schedule.updates.window
        self._steps_of, self._reads_of, self._needs = rule.ahead(schedule, stage), reads, needs or {}
        if reads is not None:
            self._needs = {newest: reads.needed(newest) for newest in reads.needs}
            moves = bool(self._needs)
        self._moves, self._predict = moves, predict
        self._is_copied = [moves or (rule.keeps and is_sharded(p)) for p in self._parameters]
        self.newest, self._first, self.most = 0, 0, 1
        self._versions: dict[int, list[Tensor]] = {}
        self._users: dict[int, int] = {}
        self._bound = WeightRead(0)
        """The weights that the parameters hold."""
        self._ahead: Ahead = {}
        self._reads: dict[int, tuple[WeightRead, int]] = {}
        self._rest()

    # A pass.

    def begin(self) -> None:
        """Starts a pass: the parameters hold the newest version."""
        self._reads.clear()
        self._rest()
        newest = self._versions[self.newest]
        for place, is_copied in enumerate(self._is_copied):
            if is_copied:
                master = self._masters[place] if self._masters else None
                if master is not None and is_sharded(master):
                    newest[place] = memory(master).copy_(newest[place])
                    continue
                newest[place] = newest[place].clone()
                if master is not None:
                    master.data = newest[place]
        self._first, self.most = self.newest, 0
        self._count()

    def before_forward(self, m: int) -> None:
        """Puts into the parameters the weights that the forward of microbatch `m` reads."""
        read = self._rule.forward(self._context(m, is_forward=True))
        self._bind(read)
        if self._rule.keeps:
            self._users[read.version] = self._users.get(read.version, 0) + 1
        self._reads[m] = read, self.newest

    def before_backward(self, m: int) -> int:
        """Puts into the parameters the weights that its backward reads; returns the updates since its forward."""
        read, since = self._reads[m]
        self._bind(self._rule.backward(self._context(m, is_forward=False), read))
        return self.newest - since

    def done(self, m: int) -> None:
        """Ends the backward of `m` that reads weights. The last backward to read a version frees it."""
        read, _ = self._reads.pop(m)
        if self._rule.keeps:
            self._users[read.version] -= 1
            if not self._users[read.version]:
                del self._users[read.version]
                self._drop(self._rule.oldest(self.newest))

    def advance(self, values: Sequence[Tensor] | None = None) -> None:
        """Adds the next version: `values`, or the memory that the optimizer steps next. Drops all predictions."""
        oldest = self._rule.oldest(self.newest + 1)
        self._drop(oldest)
        stays = self.newest >= oldest or self.newest in self._users
        before = self._versions.pop(self.newest)
        new = list(before)
        if stays:
            self._versions[self.newest] = before
            for place, tensor in enumerate(new):
                other = tensor.clone()
                if self._is_copied[place]:
                    before[place] = other
                else:
                    new[place] = other
                    if self._masters:
                        self._masters[place].data = other
        elif self._bound == WeightRead(self.newest) and not any(self._is_copied):
            self._bound = WeightRead(self.newest + 1)
        for tensor, value in zip(new, values or (), strict=values is not None):
            tensor.copy_(local(value))
        self.newest += 1
        self._versions[self.newest], self._ahead = new, {}
        self._count()

    def take(self, values: Sequence[Tensor]) -> None:
        """Adds the next version with its predictions, as `copies` of another process gave them."""
        num = len(self.named)
        self.advance(values[:num])
        if steps := self.needed():
            ahead = [value.clone() for value in values[num:]]
            self.give_ahead({each: ahead[n * num : (n + 1) * num] for n, each in enumerate(steps)})

    @property
    def num_in_pass(self) -> int:
        """The number of updates of the pass so far."""
        return self.newest - self._first

    def needed(self) -> Sequence[int]:
        """How many updates ahead of the newest version the weights must be known here now."""
        return self._needs.get(self.num_in_pass, ())

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

    def copies(self, steps: Sequence[int] = (), names: Sequence[str] | None = None) -> list[Tensor]:
        """Copies of the newest version, of all parameters or of these names; then of the predictions by `steps`."""
        newest = [value.clone() for name, value in self.newest_values().items() if names is None or name in names]
        return newest + [value for each in steps for value in self.ahead(each, names)]

    def end(self) -> None:
        """Ends a pass, even a broken one: the parameters hold the newest version."""
        self._reads.clear()
        self._users.clear()
        self._bind(WeightRead(self.newest))
        self._drop(self._rule.oldest(self.newest))
        self._rest()

    # Between passes.

    def renumber(self, newest: int) -> None:
        """Sets the number of updates so far."""
        shift = newest - self.newest
        self._versions = {version + shift: tensors for version, tensors in self._versions.items()}
        self.newest, self._bound = newest, WeightRead(newest)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Sets the values of the newest version, even after a broken pass."""
        self._reads.clear()
        self._users.clear()
        for place, (parameter, value) in enumerate(zip(self._parameters, values, strict=True)):
            if not self._is_copied[place] and self._bound != WeightRead(self.newest):
                parameter.data = self._versions[self.newest][place]
            memory(parameter).copy_(local(value))
        self._bound = WeightRead(self.newest)
        self._drop(self._rule.oldest(self.newest))
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

    # What is held.

    def bytes_beside(self) -> int:
        """The most bytes in the pass of versions and predictions, without the parameters' own memory."""
        return sum(
            num_bytes([parameter]) * (self.most - (not is_copied or self._moves))
            for parameter, is_copied in zip(self._parameters, self._is_copied, strict=True)
        )

    # Inside.

    def _rest(self) -> None:
        """Between passes: the parameters hold the newest version, on the masters' memory unless they are shards."""
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            if not is_sharded(parameter):
                master.data = parameter.data
        self._versions[self.newest] = [memory(parameter) for parameter in self._parameters]
        self._bound, self._ahead = WeightRead(self.newest), {}

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
    def _bind(self, read: WeightRead) -> None:
        """Puts into the parameters the weights that an op reads."""
        if read == self._bound:
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
        self._bound = read

    def _write_ahead(self, out: Tensor, place: int, steps: int) -> None:
        if self._predict is not None:
            self._predict(out, self._masters[place], steps)
        elif steps in self._ahead:
            out.copy_(self._ahead[steps][place])
        else:
            raise RuntimeFailure(
                f"an op reads weights {steps} updates ahead of version {self.newest}, and with that version came "
                f"those {', '.join(map(str, self._ahead)) or 0} ahead: the order does not fit the rule"
            )

    def _drop(self, oldest: int) -> None:
        gone = [v for v in self._versions if v < min(oldest, self.newest) and v not in self._users]
        if self._bound.version in gone:
            self._bind(WeightRead(self.newest))
        for version in gone:
            del self._versions[version]
