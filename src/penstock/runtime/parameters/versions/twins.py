"""What a copy of a stage reads of tied parameters that other stages own, while updates come between its ops.

    owner's stage   F2 reads W1 .. U1 makes W2 .. F3 reads W2
                                        '-------------.
    this stage                F2 reads W1 ..           F3 reads W2

The value comes with the first forward that has passed the owner's stage since the update, so that all stages read one
version in the forwards of a microbatch. What backwards read is the rule's, as everywhere; between a forward and its
backward here come no more new values than updates come between them on the owner's stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.parameters.gradients import num_bytes
from penstock.runtime.parameters.versions.held import HeldVersions, versions_of
from penstock.runtime.parameters.versions.read import Read, Spot
from penstock.runtime.parameters.versions.rule import VersionRule
from penstock.runtime.parameters.versions.written import WrittenVersion
from penstock.runtime.tensors.dtensor import is_sharded, own_shard


class TwinVersions:
    """The tied parameters of one copy that other stages own. None of them is stepped here.

    Args:
        leaves: name of a tied parameter on its owner's stage -> what ops of this copy read it from.
    """

    def __init__(self, leaves: Mapping[str, Parameter], rule: VersionRule) -> None:
        self._rule, self._leaves = rule, dict(leaves)
        self._held: dict[str, HeldVersions | WrittenVersion] = {
            name: versions_of([leaf], []) if rule.keeps else WrittenVersion([leaf], [])
            for name, leaf in leaves.items()
        }
        self._reads: dict[int, dict[str, Read]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    # A pass.

    def begin(self) -> None:
        """A pass begins."""
        self._reads.clear()
        for held in self._held.values():
            held.begin()

    def before_forward(self, m: int, spot: Spot) -> None:
        """Has the leaves hold what the forward of microbatch `m` reads; `spot` is that of the copy's own weights."""
        if not self._held:
            return
        reads = {name: self._rule.forward(self._seen(held, spot)) for name, held in self._held.items()}
        for name, held in self._held.items():
            held.bind(reads[name])
            held.hold(reads[name])
        self._reads[m] = reads

    def before_backward(self, m: int, spot: Spot) -> None:
        """Has them hold what its backward reads."""
        for name, read in self._reads.get(m, {}).items():
            held = self._held[name]
            held.bind(self._rule.backward(self._seen(held, spot), read))

    def done(self, m: int) -> None:
        """The backward of `m` is over."""
        for name, read in self._reads.pop(m, {}).items():
            held = self._held[name]
            held.release(read, self._rule.oldest(held.newest))

    def take_over(self, name: str, value: Tensor) -> None:
        """Makes `value`, which an update has made on the owner's stage, the newest version."""
        held = self._held[name]
        held.advance(self._rule.oldest(held.newest + 1), [value])

    def end(self) -> None:
        """A pass ended, however it went."""
        self._reads.clear()
        for held in self._held.values():
            held.end(self._rule.oldest(held.newest))

    # Between passes.

    def stand_at(self, name: str, newest: int, older: Tensor | None) -> None:
        """The owner's stage has made `newest` updates; `older` is what the last one stepped, where that is held.

        Of a shard it is the part here, or the whole.
        """
        held = self._held[name]
        held.renumber(newest)
        if older is not None and not is_sharded(older):
            older = own_shard(older, self._leaves[name])
        held.set_older(None if older is None else [older])

    def fill(self, name: str, value: Tensor) -> None:
        """The newest version has this value."""
        held = self._held[name]
        held.fill([value], self._rule.oldest(held.newest))

    def num_bytes(self) -> int:
        """Bytes held at most in the pass."""
        return sum(num_bytes([self._leaves[name]]) * held.most for name, held in self._held.items())

    @staticmethod
    def _seen(held: HeldVersions | WrittenVersion, spot: Spot) -> Spot:
        return replace(spot, newest=held.newest, oldest=held.oldest)
