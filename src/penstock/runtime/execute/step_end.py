"""The end of a step: every rank learns the losses, that all ranks had the same batch, and what to run next.

Each process fills in what it knows of one row, and zeros elsewhere. The rows are summed over the ranks of a pipeline
(in their memory, if they share it), then over its replicas, then over its shards.

    | loss of each microbatch of each replica | type of the losses
    | number of new notices | processes that failed | processes whose replicas differ | processes that lost a link
    | ranks that update | last stages whose losses have a gradient | those whose losses have none
    | digest of each process's batch | what the caller tells | votes of all processes |

Doubles carry any loss type, digest and number without rounding. Every process learns of a difference before any
process raises, so that no process waits for one that has raised. Votes are in the row too: all replicas and shards
switch to a new plan at the same step, or none does.

A process that can't do its part of a step goes on without computing, so that nobody waits for it in vain:

    rank 0    F0 F1 F2 F3      B0 ...        B0 is told by what comes in: rank 0 computes nothing from here on
                             .'
    rank 1       F0 F1 !  B0'                F1 fails: rank 1 computes nothing from here on, and sends that it failed
    the end                                  the row counts who failed: rank 1 raises its error, and rank 0
                                             PeerFailed, which has that error's words

All messages of the step have been sent and taken then, so the pipeline can run another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.adapt import Agent, MeasuredStep, Vote
from penstock.runtime.errors import DeadlineExceeded, LinkLost, PeerLost, RuntimeFailure
from penstock.runtime.execute.plan import ActivePlan
from penstock.runtime.mesh.peers import MeshPeers, Peers, require_same
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.checksum import HolderChecksums
from penstock.runtime.stage.microbatches import IN_PLACE, Microbatches
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.rank_memory import ROW
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.schedule.short_repr import short_repr

FAILED = Payload([], ["failed"])
"""The message of an op that has computed nothing."""
_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepFailure:
    """Whether this process can go on to compute in a step, and the error that keeps it from computing.

    Args:
        is_shared: whether the step goes on for the sake of the others; where not, an error ends it here at once.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self.error: Exception | None = None
        self.has_failed = False
        self.has_lost_link = False
        """Whether this process has given up the attempt at the step, which all then begin anew."""

    def keeps(self, error: Exception) -> bool:
        """Takes note of an error, the first one of a step. Returns whether the step goes on."""
        if not self._is_shared or isinstance(error, DeadlineExceeded | PeerLost):
            return False
        if not self.has_failed:
            self.note(error)
        return True

    def note(self, error: Exception) -> None:
        """Takes note of an error at the end of a step, where every process is about to hear who failed."""
        if self.error is None:
            self.error, self.has_failed = error, True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around work during which no other process waits for this one: an error ends that work alone."""
        try:
            yield
        except Exception as error:
            if not self.keeps(error):
                raise

    def has_come(self, inputs: Sequence[Payload]) -> bool:
        """Whether ops are not to compute from here on: this rank has failed, or one whose results came in has."""
        if self.has_failed:
            return True
        for one in inputs:
            if type(one.skeleton) is list and one.skeleton == FAILED.skeleton:
                self.has_failed = True
        return self.has_failed

    def conclude(self, everyone: Peers) -> None:
        """At the end of a step in which a process failed. Every process must call it. Where none has an error of its
        own, holders of a parameter did not begin the step alike.

        Raises:
            PeerFailed: on those that have no error of their own; the others raise theirs.
        """

        def raise_own() -> None:
            if self.error is not None:
                raise self.error

        everyone.together(raise_own, "do its part of the step")


class Notices:
    """Messages for the user about a run, from all processes. Each of them has the same list, with each message once.

    At the end of a step processes tell each other what they found by themselves. The number of new notices travels
    with the losses, and processes gather notices only if there are any.

    Args:
        peers: the processes that share them, those of all replicas and shards.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._all: list[str] = []
        self._new: list[str] = []

    def note(self, notices: Iterable[str]) -> None:
        """Takes down the new ones among some messages of this process."""
        self._new += [notice for notice in dict.fromkeys(notices) if notice not in [*self._all, *self._new]]

    def move_to(self, peers: Peers, known: Iterable[str]) -> None:
        """From now on others share them, who have `known` in common."""
        self._peers = peers
        self._all += [notice for notice in known if notice not in self._all]

    @property
    def num_new(self) -> int:
        """Notices of this process that the others do not have yet."""
        return len(self._new)

    def share(self) -> None:
        """Tells all processes. Every one must call it. Raises DeadlineExceeded, PeerLost."""
        for part in self._peers.gather(self._new):
            self._all += [notice for notice in part if notice not in self._all]
        self._new = []

    def known(self) -> list[str]:
        """Those of all processes, and what this one alone has noted since."""
        return [*self._all, *self._new]


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    Attributes:
        loss: the loss of the batch, the weighted mean over its microbatches: a tensor without a graph, in the loss's
            own type. If updates are ops of the schedule, the mean over their windows.
        losses: each microbatch's share of the loss, one number per microbatch. The shares add up to `loss`. If
            updates are ops, they add up to the losses of the windows.
        window_losses: the loss of each update's window, one number per window. If updates are not ops, there is one
            window.
        grad_norm: the gradient norm before clipping. None without clipping, or if the step did not update.
        skipped: True if a gradient was not finite in some process, and all processes therefore left the update out.
            See `scaler` and `skip_not_finite` of `ps.PrecisionOptions`.

    Examples:
        >>> import torch, penstock as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=torch.nn.MSELoss())
        >>> result = pipe.step(torch.ones(8, 4), torch.ones(8, 1), update=False)
        >>> result.losses.shape, bool(torch.isclose(result.losses.sum(), result.loss))
        (torch.Size([4]), True)
    """

    loss: Tensor
    losses: Tensor
    window_losses: Tensor
    grad_norm: Tensor | None = None
    skipped: bool = False

    __repr__ = short_repr


class SummedValues:
    """A process's values that are summed over all processes at the end of each step.

    Args:
        function: gives them.
    """

    def __init__(self, function: Callable[[], list[float]]) -> None:
        self._function = function
        self._num: int | None = None
        """How many there are, the same on all processes. None before the first step."""

    def now(self, everyone: Peers, failure: StepFailure) -> list[float]:
        """The values; zeros where the function fails, so that the others do not wait. Every process must call it."""
        values: list[float] | None = None
        try:
            values = self._function()
            if self._num is not None and len(values) != self._num:
                raise RuntimeFailure(
                    f"it returned {len(values)} numbers, and {self._num} before; return equally many"
                )
        except Exception as error:
            error.add_note("in the function that sum_each_step(values) was given")
            failure.note(error)
            values = None
        if self._num is None:
            of_all = everyone.gather(None if values is None else len(values))
            counts = sorted({count for count in of_all if count is not None})
            if len(counts) > 1:
                failure.note(
                    RuntimeFailure(
                        f"the functions that sum_each_step(values) was given returned {counts[0]} numbers in one "
                        f"process and {counts[-1]} in another; return equally many in every process"
                    )
                )
                return []
            self._num = counts[0] if counts else None
        return [0.0] * (self._num or 0) if values is None else values


class StepEnd:
    """Ends a step on one process.

    Args:
        place: where this process lies in its mesh.
        last: the runners of the last stage's copies in this process.
        updates: whether the step is to update; None in an evaluation.
        memory: the ranks' transport, if it is shared memory, which can sum too.
        tells: values of this process that are summed over all processes.
        agreement: compares the parameters that several processes hold.
        failure: what kept this process from doing its part.
        measured: of the ranks here, for the agent.
    """

    def __init__(
        self,
        place: ProcessMesh,
        last: Sequence[StageRunner],
        updates: bool | None,
        memory: SharedMemoryTransport | None,
        tells: Sequence[float],
        agreement: HolderChecksums,
        failure: StepFailure,
        measured: Sequence[MeasuredStep] = (),
    ) -> None:
        self._place, self._everyone = place, place.everyone
        self._last, self._updates, self._memory, self._tells = last, updates, memory, tells
        self._agreement, self._failure, self._measured = agreement, failure, measured

    def share(
        self, batch: Microbatches, agent: Agent | None, notices: Notices
    ) -> tuple[StepResult, tuple[float, ...], ActivePlan | None]:
        """Shares the results of the step. Returns the result, the sums of `tells`, and the new plan if it changes.

        Args:
            agent: the agent whose vote is included. None if nothing may change.
            notices: new notices, which all processes have afterwards.

        Raises:
            LinkLost, in every process: one has given up the attempt.
            PeerFailed, or the error of this process: a process could not do its part.
            RuntimeFailure: processes that had different batches, disagree on whether to update, or ran different
                plans; holders of a parameter that differ; or a training step in which no microbatch's loss has a
                gradient.
        """
        mine = [
            self._losses(len(batch)),
            [self._loss_type()],
            [notices.num_new, float(self._failure.has_failed), float(not self._agreement.is_alike())],
            [float(self._failure.has_lost_link)],
            self._training_facts(),
            self._in_places([float(batch.digest)]),
            self._tells,
            [] if agent is None else self._in_places(agent.vote(self._measured)),
        ]
        row = self._summed([value for part in mine for value in part])
        losses, (loss_type,), counts, (num_lost,), of_training, digests, tells, votes = split_like(row, mine)
        num_notices, num_failed, num_unlike = counts
        if num_notices:
            notices.share()
        if digests.count(digests[0]) < len(digests):
            given = [{"batch": digest} for digest in self._everyone.gather(batch.digest)]
            require_same(given, f"every rank must give the same inputs and targets{IN_PLACE}", shown=False)
        if num_lost:
            raise LinkLost(f"{num_lost:g} of {self._everyone.num_ranks} processes lost a link in the step")
        if num_failed:
            self._failure.conclude(self._everyone)
        self._agreement.conclude(not num_unlike, self._updates is not None)
        self._require(*of_training)
        following = None
        if agent is not None:
            size = len(Vote._fields)
            rows = [votes[first : first + size] for first in range(0, len(votes), size)]
            following = agent.count_votes([Vote(*map(int, each)) for each in rows])
        result = _result_of(losses, _LOSS_TYPES[int(loss_type)], self._place.num_replicas, batch.windows)
        return result, tuple(tells), None if following is None else following.made

    def _losses(self, num: int) -> list[float]:
        """The losses of all replicas' microbatches, `num` for each. The first shard tells those of its stages."""
        row = [0.0] * num * self._place.num_replicas
        first = num * self._place.replica
        for runner in self._last if self._place.shard == 0 else ():
            for m, value in zip(runner.losses, _values(list(runner.losses.values())), strict=True):
                row[first + m] = value
        return row

    def _loss_type(self) -> float:
        """The place of the losses' type in `_LOSS_TYPES`, as the process tells it that has the batch's first loss."""
        if self._place.replica or self._place.shard:
            return 0.0
        first = next((runner.losses[0] for runner in self._last if 0 in runner.losses), None)
        return 0.0 if first is None else float(_LOSS_TYPES.index(first.dtype))

    def _training_facts(self) -> tuple[float, float, float]:
        """How many ranks here update, how many last stages had a loss with a gradient, and how many one without."""
        if not self._updates:  # the gradients of a model that is frozen as a whole may be asked for: there are none
            return 0.0, 0.0, 0.0
        ran = [runner.has_gradient for runner in self._last if runner.losses]
        return float(len(self._place.pipeline.here)), float(sum(ran)), float(len(ran) - sum(ran))

    def _in_places(self, numbers: Sequence[float]) -> list[float]:
        """The same numbers of all processes, one process's after another's; zeros for those of other processes."""
        here, nothing = self._everyone.here, [0.0] * len(numbers)
        return [n for rank in range(self._everyone.num_ranks) for n in (numbers if rank in here else nothing)]

    def _require(self, num_updating: float, with_gradient: float, without: float) -> None:
        """Raises RuntimeFailure, in every process, if the step would train nothing, or only a part of the model."""
        place = self._place
        ranks = place.pipeline.num_ranks * place.num_replicas * place.num_shards
        if num_updating not in (0, ranks):
            raise RuntimeFailure(
                f"{num_updating:g} of {ranks} ranks called step(update=True), and the others step(update=False); "
                "every rank must give the same"
            )
        if without and not with_gradient:
            raise RuntimeFailure(
                "the loss of no microbatch has a gradient, so this step would train nothing: give a loss_fn that "
                "detaches neither the output nor its result, parameters of which some have requires_grad=True, and "
                "call step outside torch.no_grad()"
            )

    def _summed(self, row: list[float]) -> list[float]:
        """Sums a row over all processes: over the pipeline's ranks, then along the other dimensions of the mesh."""
        if self._memory is not None and len(row) <= ROW:
            row = self._memory.sum(row)
        else:
            row = _summed_over(self._place.pipeline, row)
        for peers in self._everyone.along[1:] if isinstance(self._everyone, MeshPeers) else ():
            row = _summed_over(peers, row)
        return row


def split_like(row: Sequence[float], parts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Cuts a row into parts as long as those given."""
    ends = list(accumulate(map(len, parts)))
    return [list(row[end - len(part) : end]) for end, part in zip(ends, parts, strict=True)]


def _summed_over(peers: Peers, row: Sequence[float]) -> list[float]:
    summed: list[float] = peers.sum(torch.tensor(row, dtype=torch.float64, device="cpu")).tolist()
    return summed


def _result_of(
    losses: Sequence[float], dtype: torch.dtype, num_replicas: int, windows: Sequence[range]
) -> StepResult:
    """The result with the losses of all replicas' microbatches, in the order of the whole batch.

    Args:
        losses: one replica's after another's. windows: of one replica.
    """
    of_all = torch.tensor(losses, dtype=dtype, device="cpu")
    if num_replicas > 1:
        rows = of_all.reshape(num_replicas, -1)
        of_all = torch.cat([rows[:, window.start : window.stop].reshape(-1) for window in windows])
    sums = [sum_in_order(of_all[window.start * num_replicas : window.stop * num_replicas]) for window in windows]
    of_windows = torch.stack(sums) if len(sums) > 1 else sums[0].reshape(1)
    total = of_windows.mean() if len(sums) > 1 else sums[0].clone()
    return StepResult(total, of_all, window_losses=of_windows)


def _values(losses: list[Tensor]) -> list[float]:
    """The losses as numbers, which are read together, because each read from a GPU waits for it."""
    values: list[float] = torch.stack(losses).tolist() if losses else []
    return values


def sum_in_order(losses: Tensor) -> Tensor:
    """Sums losses in the order in which a plain loop adds them."""
    if losses.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.add.accumulate(losses.numpy())[-1:])[0]  # one after the other, in their type
    first, *others = losses.unbind()
    total = first.clone()
    for loss in others:
        total += loss
    return total
