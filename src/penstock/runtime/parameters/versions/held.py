"""Versions of a copy's weights, each held until the last op that reads it: for rules whose backward reads what its
forward read.

    parameter.data -> one of   version 3 | version 4 | version 5 (newest, the master's own memory)

Autograd saves some parameters themselves (LayerNorm's weight: its backward reads whatever the parameter holds by
then) and views on the memory of others (the transposed weight of `nn.Linear`). Both find the same version again if
the parameter is pointed at its memory before the backward, as before the forward, and if nobody has written there
since. So an update writes in place only where no op is to read the newest version any more; else the master goes on
in memory of its own, and the old one stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.versions.rule import Read
from penstock.runtime.tensors.dtensor import is_sharded, local, memory


class HeldVersions:
    """The versions of one copy.

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
        self.bind(Read(self.newest))
        self._versions[self.newest] = [p.data for p in self._parameters]
        for master, tensor in zip(self._masters, self._versions[self.newest], strict=False):
            master.data = tensor
        self.most = len(self._versions)

    def bind(self, read: Read) -> None:
        """Points the parameters at a version."""
        if read.version == self._bound:
            return
        self._require(read)
        for parameter, tensor in zip(self._parameters, self._versions[read.version], strict=True):
            parameter.data = tensor
        self._bound = read.version

    def _require(self, read: Read) -> None:
        if read.version not in self._versions:
            raise RuntimeFailure(
                f"an op is to read the weights after {read.version} updates, and this copy of the stage holds those "
                f"after {', '.join(map(str, sorted(self._versions)))}; the order does not fit the rule of its updates"
            )

    def hold(self, read: Read) -> None:
        self._users[read.version] = self._users.get(read.version, 0) + 1

    def release(self, read: Read, oldest: int) -> None:
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
        self.bind(Read(self.newest))
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
            self.bind(Read(self.newest))
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
        self.bind(Read(self.newest))
        for tensor, parameter in zip(self._newest, self._parameters, strict=True):
            tensor.copy_(memory(parameter))
        self.most = len(self._versions)

    def bind(self, read: Read) -> None:
        if read.version == self._bound:
            return
        self._require(read)
        for parameter, tensor in zip(self._parameters, self._versions[read.version], strict=True):
            memory(parameter).copy_(tensor)
        self._bound = read.version

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
