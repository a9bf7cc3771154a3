"""What a rank takes for a forward and a backward that it runs as one: the model of DualPipe's overlapped chunk.

    alone      F |compute|== all-to-all ==|compute|          B |compute|=== all-to-all ===|compute|
    as a pair    |compute|compute|compute|compute|           C ms of compute, both ops' together
                 |~~~~ all-to-all ~~~~~~~~~~~~|              M ms of communication, both ops' together

    time of the pair = max(C, M) + (1 - hidden) * min(C, M)

Nothing is hidden with 0, which is as long as one op after the other; with 1 the shorter of the two is hidden whole.
DeepSeek published a chunk of C = 118 ms and M = 115 ms that took 128.5 ms: `hidden` is 0.909 for it (128.5 = 118 +
0.0913 * 115). That is one number read off one chunk, not a fit: no profile is at hand to test the model with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real

from penstock.cost.errors import CostError


@dataclass(frozen=True)
class Overlap:
    """How much of a forward and a backward is hidden where a rank runs the two as one (see `Schedule.pairs`).

    Attributes:
        f, b: of each stage, the ms of its forward and of its full backward that are communication (all-to-all, or
            collectives of a tensor-parallel group); they are part of what the costs say that the op takes.
        hidden: the share, 0 to 1, of the shorter of compute and communication that runs beside the longer.
        measured: ms of pairs that were measured, by (stage of the forward, stage of the backward); they go before the
            model.

    Raises:
        CostError: `f` and `b` of different lengths, a share outside 0 to 1, times below 0, or measured stages that
            are not there.

    Examples:
        >>> import penstock as ps
        >>> hiding = ps.cost.Overlap(f=[4.0] * 4, b=[6.0] * 4, hidden=0.9)
        >>> costs = ps.Costs(f=[10] * 4, i=[10] * 4, w=[10] * 4, overlap=hiding)
        >>> s = ps.build("dualpipe-v", 2, 4, overlap=True)
        >>> ps.simulate(s, costs).makespan < ps.simulate(ps.passes.separate_pairs(s), costs).makespan
        True
    """

    f: Sequence[float]
    b: Sequence[float]
    hidden: float = 1.0
    measured: Mapping[tuple[int, int], float] | Sequence[tuple[tuple[int, int], float]] = ()

    def __post_init__(self) -> None:
        for name in ("f", "b"):
            row = tuple(getattr(self, name))
            for stage, ms in enumerate(row):
                _require_time(f"overlap.{name}[{stage}]", ms)
            object.__setattr__(self, name, tuple(map(float, row)))
        if len(self.f) != len(self.b):
            raise CostError(
                f"overlap.f has {len(self.f)} stages and overlap.b {len(self.b)}; give one entry per stage in both"
            )
        if not isinstance(self.hidden, Real) or not 0 <= float(self.hidden) <= 1:
            raise CostError(f"overlap.hidden is {self.hidden!r}: give a share from 0 to 1")
        found = []
        for stages, ms in self.measured.items() if isinstance(self.measured, Mapping) else self.measured:
            if len(stages) != 2 or not all(isinstance(s, Integral) and 0 <= s < len(self.f) for s in stages):
                raise CostError(
                    f"overlap.measured names the stages {stages!r}: give those of the forward and the backward, "
                    f"each from 0 to {len(self.f) - 1}"
                )
            _require_time(f"overlap.measured[{tuple(stages)}]", ms)
            found.append(((int(stages[0]), int(stages[1])), float(ms)))
        object.__setattr__(self, "measured", tuple(sorted(found)))

    @cached_property
    def times(self) -> dict[tuple[int, int], float]:
        """What was measured, by the stages of the two."""
        return dict(self.measured)

    def check(self, f: Sequence[float], b: Sequence[float]) -> None:
        """Raises CostError where it is for other stages, or where more of an op is communication than it takes."""
        if len(self.f) != len(f):
            raise CostError(f"the overlap is for {len(self.f)} stages, the costs for {len(f)}")
        for name, part, whole in (("f", self.f, f), ("b", self.b, b)):
            for stage, (each, ms) in enumerate(zip(part, whole, strict=True)):
                if each > ms * (1 + 1e-9):
                    raise CostError(
                        f"overlap.{name}[{stage}] is {each:g} ms of communication, but {name}[{stage}] takes "
                        f"{ms:g} ms with its communication; raise the one or lower the other"
                    )

    def time(
        self, forward: int, backward: int, f: float, b: float, f_scale: float = 1.0, b_scale: float = 1.0
    ) -> float:
        """Milliseconds of a pair.

        Args:
            forward, backward: the stages of the two. f, b: ms of each by itself, scales included.
            f_scale, b_scale: by how much longer than usual each of the two takes, which its communication does, too.
        """
        if (ms := self.times.get((forward, backward))) is not None:
            usual = f / f_scale + b / b_scale if f_scale and b_scale else 0.0
            return ms * (f + b) / usual if usual and (f_scale, b_scale) != (1.0, 1.0) else ms
        communication = min(self.f[forward] * f_scale + self.b[backward] * b_scale, f + b)
        compute = f + b - communication
        return max(compute, communication) + (1 - self.hidden) * min(compute, communication)


def _require_time(name: str, ms: object) -> None:
    if not isinstance(ms, Real) or isinstance(ms, bool) or not 0 <= float(ms) < float("inf"):
        raise CostError(f"{name} is {ms!r}: give milliseconds of at least 0")
