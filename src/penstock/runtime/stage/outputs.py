"""What forwards made, as ops of the user's kinds read it, and what these say of the loss.

    rank 1 | F0 F1 GATHER0 B0 B1        GATHER0 reads the outputs of F0 and F1, of all its ranks, and adds a loss of
    rank 3 | F0 F1 GATHER0 B0 B1        them; B0 and B1 start from its gradient

So towers that end in no common stage may be trained by a loss that compares what all of them say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.stage.stage import Copy
from penstock.schedule.updates import OWNER

Forward = tuple[int, int]
"""(stage, microbatch)."""
Values = dict[Forward, Tensor]


class Outputs:
    """Of the stages in this process, in one step.

    Args:
        runners: of the copies of stages here.
        end: the stage whose rank tells the losses that ops add; None where a stage with the loss does.
    """

    def __init__(self, runners: Mapping[Copy, StageRunner], end: int | None) -> None:
        self._runners, self._end = runners, end

    def values(self, forwards: Sequence[Forward], stages: Sequence[int]) -> Values:
        """The outputs of those of some forwards that ran on some stages here: leaves, which may have a gradient."""
        return {(s, m): self._leaf(s, m) for s, m in forwards if s in stages}

    def _leaf(self, stage: int, microbatch: int) -> Tensor:
        leaves = self._runners[OWNER, stage].leaves(microbatch)
        if len(leaves) != 1:
            raise RuntimeFailure(
                f"stage {stage} returned {len(leaves)} tensors to an op that reads its output; an op reads that of a "
                "stage that returns one tensor, or one alone that wants a gradient"
            )
        return leaves[0]

    def add_loss(self, loss: Tensor, forwards: Sequence[Forward], stages: Sequence[int]) -> None:
        """Adds a loss of forwards, a mean over their samples; their backwards on `stages` start from its gradient.

        Raises:
            RuntimeFailure: the loss is not one number, the stage with the loss is there already, or none of the
                forwards belongs to the stage that tells losses.
        """
        if self._end is None:
            raise RuntimeFailure("one stage has the loss, by loss_fn; an op may add one where no stage does")
        if loss.numel() != 1:
            raise RuntimeFailure(f"a loss is one number, not a tensor of shape {tuple(loss.shape)}")
        told = sorted({m for s, m in forwards if s == self._end})
        if not told:
            raise RuntimeFailure(
                f"a loss that comes after no forward of stage {self._end} has no samples to weigh it by"
            )
        runner = next(iter(self._runners.values()))
        scales = [runner.settings.microbatches.scales[m] for m in told]
        weighed = loss * sum(scales)
        places = [(s, m) for s, m in forwards if s in stages]
        leaves = [self._leaf(s, m) for s, m in places]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(weighed, wanted, allow_unused=True) if wanted else ()
        gradients = dict(zip(map(id, wanted), found, strict=True))
        for (stage, m), leaf in zip(places, leaves, strict=True):
            self._runners[OWNER, stage].start_from(m, gradients.get(id(leaf)))
        if (end := self._runners.get((OWNER, self._end))) is not None and self._end in stages:
            for m in told:
                share = weighed.detach() / len(told)
                end.losses[m] = end.losses[m] + share if m in end.losses else share


class OutputGathering:
    """Brings the outputs of all ranks of an op together, on each of them. It begins when it is waited for.

    Attributes:
        result: by (stage, microbatch), once it was waited for. A rank's own are leaves, which may have a gradient.
    """

    def __init__(self, own: Values, group: WeakGroup | None, rank: int, timeout: float) -> None:
        self.result: Values | None = None
        self._own, self._group, self._rank, self._timeout = own, group, rank, timeout

    def wait(self) -> bool:
        """Raises DeadlineExceeded, PeerLost."""
        if self.result is None:
            self.result = self._own if self._group is None else self._gathered(self._group())
        return True

    def _gathered(self, group: dist.ProcessGroup) -> Values:
        try:
            shapes: list[Any] = [None] * dist.get_world_size(group)
            mine = {place: (tuple(value.shape), value.dtype) for place, value in self._own.items()}
            dist.all_gather_object(shapes, mine, group=group)
            found: Values = {}
            for source, theirs in enumerate(shapes):
                for place, (shape, dtype) in sorted(theirs.items()):
                    own = self._own.get(place)
                    buffer = torch.empty(shape, dtype=dtype) if own is None else own.detach().cpu().contiguous()
                    work = dist.broadcast(buffer, group=group, group_src=source, async_op=True)
                    work.wait(timedelta(seconds=self._timeout))
                    found[place] = buffer if own is None else own
            return found
        except RuntimeError as error:
            raise explain(error, self._rank, None, "what they gather", self._timeout) from None
