"""Buffers are bounded by what is in flight, not by the number of microbatches."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.transport import gloo
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.wire_format import Packet
from processes import run_ranks_to_end

pytestmark = [pytest.mark.multiproc]


class Peaks:
    """Most packets, messages not yet used and microbatches held at once, while patched in."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Packet] = weakref.WeakSet()
        self.peaks = {"packets": 0, "unused": 0, "held": 0}
        watch = self

        class Watched(Packet):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                watch.alive.add(self)

        gloo.Packet = Watched  # type: ignore[misc]
        gloo.AHEAD_BYTES = 0  # these messages stand for large ones
        for cls, method in ((GlooTransport, "_accept"), (GlooTransport, "send"), (StageRunner, "forward")):
            self._watch(cls, method)

    def _watch(self, cls: type, method: str) -> None:
        plain = getattr(cls, method)

        def watched(this: Any, *args: Any) -> Any:
            result = plain(this, *args)
            self.note("packets", len(self.alive))
            if isinstance(this, GlooTransport):
                self.note("unused", len(this._ready))
            else:
                self.note("held", len(this._held))
            return result

        setattr(cls, method, watched)

    def note(self, what: str, count: int) -> None:
        self.peaks[what] = max(self.peaks[what], count)


def slots(pipe: ps.Pipeline) -> int:
    """Pieces of shared memory that a rank has sent from."""
    return sum(len(free) for channel in pipe._local.transport._channels.values() for free in channel.slots.values())


def measure(rank: int) -> dict[str, dict[int, dict[str, int]]]:
    found: dict[str, dict[int, dict[str, int]]] = {}
    watch = Peaks()
    runs = [("1f1b", "frozen"), ("zb-v", "frozen"), ("1f1b", "dynamic")]
    for name, dispatch, transport in [*((*run, "gloo") for run in runs), ("zb-v", "frozen", "host")]:
        for num in (16, 64):
            watch.alive.clear()
            watch.peaks = dict.fromkeys(watch.peaks, 0)
            schedule = ps.build(name, 4, num)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
            pipe = ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch, transport=transport)
            x = torch.randn(2 * num, 4)
            for _ in range(2):
                pipe.step(x, x)
            if transport == "host":
                watch.note("packets", slots(pipe))
            key = f"{name} {dispatch} {transport}"
            found.setdefault(key, {})[num] = dict(watch.peaks)
            pipe.evaluate(x, x)
            if transport == "host":
                watch.note("packets", slots(pipe))
            found[key][num]["evaluation"] = watch.peaks["packets"]
    return found


@pytest.mark.slow
def test_buffers_do_not_grow_with_the_number_of_microbatches() -> None:
    outcomes = run_ranks_to_end(4, measure)
    for outcome in outcomes:
        for name, by_count in outcome.value.items():
            # How many are posted ahead, and when they come back, depends on the clock; their bound does not.
            few, many = by_count[16], by_count[64]
            assert all(many[what] <= few[what] + 32 for what in many), (outcome.rank, name, by_count)
