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


class HeldVersions:
    """The versions of one copy.

    Versions of a copy's weights, each held until the last op that reads it: for rules whose backward reads what its
    forward read.

        parameter.data -> one of   version 3 | version 4 | version 5 (newest, the master's own memory)

    Autograd saves some parameters themselves (LayerNorm's weight: its backward reads whatever the parameter holds by
    then) and views on the memory of others (the transposed weight of `nn.Linear`). Both find the same version again
    if the parameter is pointed at its memory before the backward, as before the forward, and if nobody has written
    there since. So an update writes in place only where no op is to read the newest version any more; else the master
    goes on in memory of its own, and the old one stays as it is.

    Args:
        parameters: the module's, those with gradients.
        masters: what the optimizer steps, in the same order; none on a copy without its state.
    """

    def __init__(self, parameters: Sequence[Parameter], masters: Sequence[Parameter]) -> None:
        self.newest = 0
        self.most = 1
        """Versions held at most since `begin`."""
        self._parameters = parameters
        self._masters = masters
        self._versions: dict[int, list[Tensor]] = {0: [p.data for p in parameters]}
        self._users: dict[int, int] = {}
        self._bound = 0

    @property
    def oldest(self) -> int:
        return min(self._versions)

    @property
    def num_beside(self) -> int:
        """Sets of weights at most held beside the parameters' own."""
        return self.most - 1

    def begin(self) -> None:
        """A pass begins: what the parameters hold by now is the newest version."""
        self._users.clear()
        self.bind(WeightRead(self.newest))
        self._versions[self.newest] = [p.data for p in self._parameters]
        for master, tensor in zip(self._masters, self._versions[self.newest], strict=False):
            master.data = tensor
        self.most = len(self._versions)

    def bind(self, read: WeightRead) -> None:
        """Gives the parameters a version."""
        if read.version == self._bound:
            return
        self._require(read)
        for parameter, tensor in zip(self._parameters, self._versions[read.version], strict=True):
            self._place(parameter, tensor)
        self._bound = read.version

    def _place(self, parameter: Parameter, tensor: Tensor) -> None:
        parameter.data = tensor

    def _require(self, read: WeightRead) -> None:
        if read.version not in self._versions:
            raise RuntimeFailure(
                f"an op is to read the weights after {read.version} updates, and this copy of the stage holds those "
                f"after {', '.join(map(str, sorted(self._versions)))}; the order does not fit the rule of its updates"
            )

    def hold(self, read: WeightRead) -> None:
        self._users[read.version] = self._users.get(read.version, 0) + 1

    def release(self, read: WeightRead, oldest: int) -> None:
        """A microbatch is done with its version; the last one to be frees it, unless it is `oldest` or later."""
        self._users[read.version] -= 1
        if not self._users[read.version]:
            del self._users[read.version]
            self._drop(oldest)

    def advance(self, oldest: int, values: Sequence[Tensor] | None = None) -> None:
        """Makes the next version: of `values`, or of the newest one, for the optimizer to step.

        Args:
            oldest: the oldest version that later forwards may read.
        """
        self._drop(oldest)
        last = self._versions[self.newest]
        in_place = self.newest < oldest and self.newest not in self._users
        if in_place:
            del self._versions[self.newest]
        with torch.no_grad():
            new = last if in_place else [torch.empty_like(t) for t in last]
            if values is not None or not in_place:
                for tensor, value in zip(new, last if values is None else values, strict=True):
                    tensor.copy_(value)
        if not in_place:
            for master, tensor in zip(self._masters, new, strict=False):
                master.data = tensor
        elif self._bound == self.newest:
            self._bound += 1
        self.newest += 1
        self._versions[self.newest] = new
        self.most = max(self.most, len(self._versions))

    def newest_values(self) -> list[Tensor]:
        return self._versions[self.newest]

    def end(self, oldest: int) -> None:
        """A pass ended: the parameters hold the newest version, and versions before `oldest` are gone."""
        self._users.clear()
        self.bind(WeightRead(self.newest))
        self._drop(oldest)

    def fill(self, values: Sequence[Tensor], oldest: int) -> None:
        """Between passes, even after one that broke off: the newest version has these values."""
        self.end(oldest)
        for tensor, value in zip(self.newest_values(), values, strict=True):
            tensor.copy_(local(value))

    def older(self) -> list[Tensor] | None:
        """The version before the newest, where it is held."""
        return self._versions.get(self.newest - 1)

    def set_older(self, values: Sequence[Tensor] | None) -> None:
        self._versions = {self.newest: self._versions[self.newest]}
        if values is not None:
            self._versions[self.newest - 1] = [
                torch.empty_like(t).copy_(local(v)) for t, v in zip(self.newest_values(), values, strict=True)
            ]

    def renumber(self, newest: int) -> None:
        """Between passes: counts on from `newest` updates."""
        shift = newest - self.newest
        self._versions = {version + shift: tensors for version, tensors in self._versions.items()}
        self.newest, self._bound = newest, self._bound + shift

    def _drop(self, oldest: int) -> None:
        gone = [v for v in self._versions if v < min(oldest, self.newest) and v not in self._users]
        if self._bound in gone:
            self.bind(WeightRead(self.newest))
        for version in gone:
            del self._versions[version]


def versions_of(parameters: Sequence[Parameter], masters: Sequence[Parameter]) -> HeldVersions:
    """The versions of one copy; masters of shards have memory of their own."""
    kind = CopiedVersions if any(map(is_sharded, parameters)) else HeldVersions
    return kind(parameters, masters)


class CopiedVersions(HeldVersions):
    """The same where parameters are shards, which cannot be pointed elsewhere: what an op reads is copied to them.

    Before a backward its version is copied back to where the forward found it. The newest has memory of its own, the
    masters' where there are some, so that there is one set more than versions.
    """

    def __init__(self, parameters: Sequence[Parameter], masters: Sequence[Parameter]) -> None:
        super().__init__(parameters, masters)
        self._newest = [memory(each) for each in masters] or [memory(p).clone() for p in parameters]
        self._versions = {0: self._newest}

    @property
    def num_beside(self) -> int:
        return self.most

    def begin(self) -> None:
        self._users.clear()
        self.bind(WeightRead(self.newest))
        for tensor, parameter in zip(self._newest, self._parameters, strict=True):
            tensor.copy_(memory(parameter))
        self.most = len(self._versions)

    def _place(self, parameter: Parameter, tensor: Tensor) -> None:
        memory(parameter).copy_(tensor)

    def advance(self, oldest: int, values: Sequence[Tensor] | None = None) -> None:
        self._drop(oldest)
        stays = self.newest >= oldest or self.newest in self._users
        del self._versions[self.newest]
        if stays:
            self._versions[self.newest] = [tensor.clone() for tensor in self._newest]
        for tensor, value in zip(self._newest, values or (), strict=values is not None):
            tensor.copy_(value)
        self.newest += 1
        self._versions[self.newest] = self._newest
        self.most = max(self.most, len(self._versions))

    def fill(self, values: Sequence[Tensor], oldest: int) -> None:
        super().fill(values, oldest)
        for parameter, tensor in zip(self._parameters, self._newest, strict=True):
            memory(parameter).copy_(tensor)


Predict = Callable[[Tensor, Parameter, int], None]
"""Writes into a tensor where a master will be after so many more updates."""

Ahead = Mapping[int, Sequence[Tensor]]
"""By the updates that are predicted on top of the newest version what the parameters will be, in their order."""


class WrittenVersion:
    """The newest version of one copy, and what its parameters hold.

    One memory for a copy's weights, into which is written what ops read: for rules whose backward may read other
    values than its forward.

    Autograd saves some parameters themselves and views on the memory of others. The memory never changes, so both
    show a backward what was written last. It is written through `.data`, and the optimizer steps a master, another
    parameter on the same memory or on its own: neither counts as a change in place of what a forward has saved,
    though it is one, and the rule wants it so. Copies that autocast made in a forward stay in its graph: their
    backward reads those.

    Where ops read predictions, the newest version has memory of its own while a pass runs. What they read is made
    when an op asks for it, or it is given with the version, by whoever has the optimizer's state.

    Args:
        parameters: the module's, those with gradients.
        masters: what the optimizer steps, in the same order; none on a copy without its state.
        moves: whether ops read predictions.
        predict: what makes them; None where they are given.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        masters: Sequence[Parameter],
        moves: bool = False,
        predict: Predict | None = None,
    ) -> None:
        self.newest = 0
        self._parameters, self._masters = parameters, masters
        self._moves, self._predict = moves, predict
        self._holds = WeightRead(0)
        self._apart: list[Tensor] = []
        """The newest version of a copy without masters, while a pass runs."""
        self._ahead: Ahead = {}
        self._most_ahead = 0

    @property
    def oldest(self) -> int:
        return self.newest

    @property
    def most(self) -> int:
        """Sets of weights held at most."""
        return 1 + self.num_beside

    @property
    def num_beside(self) -> int:
        return self._moves + self._most_ahead

    def begin(self) -> None:
        """A pass begins: what the parameters hold by now is the newest version."""
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            if not is_sharded(parameter):
                master.data = parameter.data.clone() if self._moves else parameter.data
            elif self._moves:  # a shard's memory never moves: it has its own from the start
                memory(master).copy_(memory(parameter))
        if self._moves and not self._masters:
            self._apart = [memory(parameter).clone() for parameter in self._parameters]
        self._holds = WeightRead(self.newest)
        self._ahead, self._most_ahead = {}, 0

    def bind(self, read: WeightRead) -> None:
        """Writes what an op reads, unless it is there."""
        if not self._moves or read == self._holds:
            return
        with torch.no_grad():
            for place, (parameter, newest) in enumerate(zip(self._parameters, self.newest_values(), strict=True)):
                if not read.steps:
                    memory(parameter).copy_(newest)
                elif self._predict is not None:
                    self._predict(memory(parameter), self._masters[place], read.steps)
                else:
                    memory(parameter).copy_(self.ahead(read.steps)[place])
        self._holds = read

    def hold(self, read: WeightRead) -> None:
        """Nothing is held for a microbatch."""

    def release(self, read: WeightRead, oldest: int) -> None:
        """Nothing was held."""

    def advance(self, oldest: int, values: Sequence[Tensor] | None = None) -> None:
        """The next version: `values`, or what the optimizer makes of the newest one. What was given of the one before
        is gone.
        """
        self.newest += 1
        self._ahead = {}
        if values is not None:
            for tensor, value in zip(self.newest_values(), values, strict=True):
                tensor.copy_(local(value))

    def give_ahead(self, ahead: Ahead) -> None:
        """What is predicted on top of the newest version, which is held until there is another."""
        self._ahead = ahead
        self._most_ahead = max(self._most_ahead, len(ahead))

    def ahead(self, steps: int) -> Sequence[Tensor]:
        """What was given for so many more updates. Raises RuntimeFailure where it was not."""
        if steps not in self._ahead:
            raise RuntimeFailure(
                f"an op reads weights {steps} updates ahead of version {self.newest}, and with that version came "
                f"those {', '.join(map(str, self._ahead)) or 0} ahead: the order does not fit the rule"
            )
        return self._ahead[steps]

    def newest_values(self) -> list[Tensor]:
        return self._apart or [memory(each) for each in (self._masters or self._parameters)]

    def end(self, oldest: int) -> None:
        """A pass ended: the parameters hold the newest version, and nothing else is held."""
        self.bind(WeightRead(self.newest))
        self._let_go()

    def fill(self, values: Sequence[Tensor], oldest: int) -> None:
        """Between passes, even after one that broke off: the newest version has these values."""
        self._let_go()
        for each in (self._parameters, self._masters):
            for parameter, value in zip(each, values, strict=False):
                memory(parameter).copy_(local(value))
        self._holds = WeightRead(self.newest)

    def _let_go(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            if not is_sharded(parameter):
                master.data = parameter.data
        self._apart, self._ahead = [], {}

    def older(self) -> list[Tensor] | None:
        return None

    def set_older(self, values: Sequence[Tensor] | None) -> None:
        """There is none."""

    def renumber(self, newest: int) -> None:
        """Between passes: counts on from `newest` updates."""
        self.newest, self._holds = newest, WeightRead(newest)


class VersionedParameters:
    """Args:
    named: name -> what ops read the parameter from.
    masters: what the optimizer steps in their place, in the same order; none where it steps none here.
    rule: which version ops read.
    stage, num_stages: of the copy. window_size: microbatches that an update gathers.
    moves: whether ops read predictions. predict: what makes them; None where they are given.
    """

    def __init__(
        self,
        named: Mapping[str, Parameter],
        masters: Sequence[Parameter],
        rule: VersionRule,
        stage: int,
        num_stages: int,
        window_size: int,
        moves: bool = False,
        predict: Predict | None = None,
    ) -> None:
        self.named = dict(named)
        self._rule, self._stage, self._num_stages, self._window_size = rule, stage, num_stages, window_size
        parameters = list(self.named.values())
        self._versions: HeldVersions | WrittenVersion
        if rule.keeps:
            self._versions = versions_of(parameters, masters)
        else:
            self._versions = WrittenVersion(parameters, masters, moves, predict)
        self._reads: dict[int, tuple[WeightRead, int]] = {}

    @property
    def newest(self) -> int:
        """Updates over all passes."""
        return self._versions.newest

    # A pass.

    def begin(self) -> None:
        """A pass begins: what the parameters hold by now is the newest version."""
        self._reads.clear()
        self._versions.begin()

    def before_forward(self, m: int, window: int, ahead: int) -> None:
        """Has the parameters hold what the forward of microbatch `m` reads; `window`, `ahead` as in `ReadContext`."""
        read = self._rule.forward(self._read_context(window, ahead))
        self._versions.bind(read)
        self._versions.hold(read)
        self._reads[m] = read, self.newest

    def before_backward(self, m: int, window: int, ahead: int) -> int:
        """Has them hold what its backward reads; returns the updates since its forward."""
        read, since = self._read_by(m)
        self._versions.bind(self._rule.backward(self._read_context(window, ahead), read))
        return self.newest - since

    def done(self, m: int) -> None:
        """The backward of `m` that reads them is over."""
        read, _ = self._read_by(m)
        del self._reads[m]
        self._versions.release(read, self._rule.oldest(self.newest))

    def advance(self, values: Sequence[Tensor] | None = None) -> None:
        """The next version: `values`, or what the optimizer is about to make of the newest one."""
        self._versions.advance(self._rule.oldest(self.newest + 1), values)

    def give_ahead(self, ahead: Ahead) -> None:
        """What is predicted on top of the newest version, which this copy could not predict itself."""
        assert isinstance(self._versions, WrittenVersion), "a rule that predicts keeps no versions"
        self._versions.give_ahead(ahead)

    def ahead(self, steps: int) -> Sequence[Tensor]:
        """What was given for so many more updates than the newest version has, in the order of the names."""
        assert isinstance(self._versions, WrittenVersion), "a rule that predicts keeps no versions"
        return self._versions.ahead(steps)

    def end(self) -> None:
        """A pass ended, however it went: the parameters hold the newest version."""
        self._reads.clear()
        self._versions.end(self._rule.oldest(self.newest))

    # Between passes.

    def renumber(self, newest: int) -> None:
        """Counts on from so many updates."""
        self._versions.renumber(newest)

    def fill(self, values: Sequence[Tensor]) -> None:
        """The newest version has these values, even after a pass that broke off."""
        self._versions.fill(values, self._rule.oldest(self.newest))

    def newest_values(self) -> dict[str, Tensor]:
        return dict(zip(self.named, self._versions.newest_values(), strict=True))

    def older(self) -> dict[str, Tensor]:
        """The version before the newest, of shards what lies here; nothing where it is not held."""
        return dict(zip(self.named, self._versions.older() or (), strict=False))

    def set_older(self, older: Mapping[str, Tensor]) -> None:
        """Holds this version before the newest; none where a parameter is not in it. Of shards the whole will do."""
        if not older or self.named.keys() - older.keys():
            self._versions.set_older(None)
            return
        parts = [(older[name], parameter) for name, parameter in self.named.items()]
        self._versions.set_older([one if is_sharded(one) else own_shard(one, p) for one, p in parts])

    # What is held.

    def num_bytes(self) -> int:
        """Bytes of one version."""
        return num_bytes(self.named.values())

    @property
    def most(self) -> int:
        """Versions, or predictions, held at most in the pass, the parameters' own included."""
        return self._versions.most

    @property
    def num_beside(self) -> int:
        """Those beside the parameters' own."""
        return self._versions.num_beside

    # Inside.

    def _read_context(self, window: int, ahead: int) -> ReadContext:
        versions = self._versions
        return ReadContext(
            self._stage, self._num_stages, self._window_size, window, versions.newest, versions.oldest, ahead
        )

    def _read_by(self, m: int) -> tuple[WeightRead, int]:
        if m not in self._reads:
            raise RuntimeFailure(
                f"a backward of microbatch {m} on stage {self._stage}, and no forward of it is in flight there"
            )
        return self._reads[m]
