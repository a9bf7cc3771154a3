"""Parameters that change together, by one update, and which version of them each op of a copy reads.

    the copy's own                   the optimizer's step makes the next version, or values that come do
    one that another stage owns      the value comes with the first forward that has passed the owner's stage
                                     since the update, so that all stages read one version in the forwards of a
                                     microbatch:

    owner's stage   F2 reads W1 .. U1 makes W2 .. F3 reads W2
                                        '-------------.
    this stage                F2 reads W1 ..           F3 reads W2

What backwards read is the rule's, everywhere. Between a forward and its backward here come no more new values than
updates come between them on the owner's stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import num_bytes
from penstock.runtime.parameters.versions.held import HeldVersions, versions_of
from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule
from penstock.runtime.parameters.versions.written import Predict, WrittenVersion
from penstock.runtime.tensors.dtensor import is_sharded, own_shard


class VersionedParameters:
    """Args:
    named: name -> what ops read the parameter from.
    masters: what the optimizer steps in their place, in the same order; none where it steps none here.
    rule: which version ops read.
    stage, num_stages: of the copy. window_size: microbatches that an update gathers.
    predict: where ops read predictions, what makes them.
    """

    def __init__(
        self,
        named: Mapping[str, Parameter],
        masters: Sequence[Parameter],
        rule: VersionRule,
        stage: int,
        num_stages: int,
        window_size: int,
        predict: Predict | None = None,
    ) -> None:
        self.named = dict(named)
        self._rule, self._stage, self._num_stages, self._window_size = rule, stage, num_stages, window_size
        parameters = list(self.named.values())
        self._versions: HeldVersions | WrittenVersion
        if rule.keeps:
            self._versions = versions_of(parameters, masters)
        else:
            self._versions = WrittenVersion(parameters, masters, predict)
        self._reads: dict[int, tuple[Read, int]] = {}

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
        """Has the parameters hold what the forward of microbatch `m` reads; `window`, `ahead` as in `Spot`."""
        read = self._rule.forward(self._spot(window, ahead))
        self._versions.bind(read)
        self._versions.hold(read)
        self._reads[m] = read, self.newest

    def before_backward(self, m: int, window: int, ahead: int) -> int:
        """Has them hold what its backward reads; returns the updates since its forward."""
        read, since = self._read_by(m)
        self._versions.bind(self._rule.backward(self._spot(window, ahead), read))
        return self.newest - since

    def done(self, m: int) -> None:
        """The backward of `m` that reads them is over."""
        read, _ = self._read_by(m)
        del self._reads[m]
        self._versions.release(read, self._rule.oldest(self.newest))

    def advance(self, values: Sequence[Tensor] | None = None) -> None:
        """The next version: `values`, or what the optimizer is about to make of the newest one."""
        self._versions.advance(self._rule.oldest(self.newest + 1), values)

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

    def _spot(self, window: int, ahead: int) -> Spot:
        versions = self._versions
        return Spot(self._stage, self._num_stages, self._window_size, window, versions.newest, versions.oldest, ahead)

    def _read_by(self, m: int) -> tuple[Read, int]:
        if m not in self._reads:
            raise RuntimeFailure(
                f"a backward of microbatch {m} on stage {self._stage}, and no forward of it is in flight there"
            )
        return self._reads[m]
