"""The end of a step: every rank learns the losses, that all ranks had the same batch, and what to run next.

One collective carries all of it; ranks that share memory sum there.

    | loss of each microbatch | type of the losses | number of new notices | processes that failed | ranks that update
    | last stages whose losses have a gradient, and have none | digest of the batch, for each rank
    | what the caller tells | votes of all processes | digests of what several processes hold, in every tenth step |

Each process fills in what it knows and leaves zeros elsewhere, and the collective sums these rows. Doubles carry any
loss type, digest and number without rounding. If the pipeline has replicas, a second collective brings their losses
together; if it has shards, a third compares their batches. What differs anywhere is known everywhere before a process
raises, so that none waits for one that has. Votes are in the row too: all replicas and shards switch to a new plan at
the same step, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from penstock.runtime.adapt import Agent, Vote
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.plan import ActivePlan
from penstock.runtime.execute.step_failure import StepFailure
from penstock.runtime.mesh.peers import MeshPeers, Peers, require_same
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.agreement import HolderAgreement
from penstock.runtime.stage.microbatches import IN_PLACE, Microbatches
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.transport.rank_memory import ROW
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.schedule.short_repr import short_repr

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        """Takes down what this process has to say, as far as it is new."""
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
        agreement: compares what processes have of the parameters that several of them hold.
        failure: what kept this process from doing its part.
    """

    def __init__(
        self,
        place: ProcessMesh,
        last: Sequence[StageRunner],
        updates: bool | None = None,
        memory: SharedMemoryTransport | None = None,
        tells: Sequence[float] = (),
        agreement: HolderAgreement | None = None,
        failure: StepFailure | None = None,
    ) -> None:
        self._peers, self._replicas, self._everyone = place.pipeline, place.replicas, place.everyone
        self._num_ranks = place.pipeline.num_ranks * place.num_replicas * place.num_shards
        self._last, self._updates, self._memory, self._tells = last, updates, memory, tells
        self._agreement = agreement
        self._failure = failure or StepFailure(is_shared=False)

    def share(
        self, batch: Microbatches, agent: Agent | None, notices: Notices
    ) -> tuple[StepResult, tuple[float, ...], ActivePlan | None]:
        """Shares the results of the step. Returns the result, the sums of `tells`, and the new plan if it changes.

        Args:
            agent: the agent whose vote is included. None if nothing may change.
            notices: new notices, which all processes have afterwards.

        Raises:
            PeerFailed, or the error of this process: a process could not do its part.
            RuntimeFailure: processes that had different batches, disagree on whether to update, or ran different
                plans; holders of a parameter that differ; or a training step in which no microbatch's loss has a
                gradient.
        """
        mine = [
            self._losses(len(batch)),
            [self._loss_type()],
            [notices.num_new, float(self._failure.has_failed), *self._facts()],
            [batch.digest if rank in self._peers.here else 0.0 for rank in range(self._peers.num_ranks)],
            self._tells,
            self._votes(agent),
            self._values(),
        ]
        row = self._summed([value for part in mine for value in part])
        losses, (loss_type,), facts, digests, tells, votes, values = split_like(row, mine)
        differ = digests.count(digests[0]) < len(digests)
        others, dtype = [*facts, *tells, *votes, *values], _LOSS_TYPES[int(loss_type)]
        of_all, summed, differ = self._of_all(losses, others, batch.digest, differ, batch.windows, dtype)
        facts, tells, votes, values = split_like(summed, [facts, tells, votes, values])
        num_notices, num_failed, num_unlike, *of_training = facts
        if num_notices:
            notices.share()
        if differ:
            self._refuse(batch)
        if num_failed:
            self._failure.conclude(self._everyone)
        if self._agreement is not None:
            self._agreement.conclude(not num_unlike, values)
        self._require(*of_training)
        following = None
        if agent is not None:
            size = len(Vote._fields)
            rows = [votes[first : first + size] for first in range(0, len(votes), size)]
            following = agent.count_votes([Vote(*map(int, each)) for each in rows])
        replicas = self._replicas.num_ranks
        sums = [sum_in_order(of_all[window.start * replicas : window.stop * replicas]) for window in batch.windows]
        windows = torch.stack(sums) if len(sums) > 1 else sums[0].reshape(1)
        total = windows.mean() if len(sums) > 1 else sums[0].clone()
        result = StepResult(total, of_all, window_losses=windows)
        return result, tuple(tells), None if following is None else following.made

    def _refuse(self, batch: Microbatches) -> None:
        """Raises RuntimeFailure as batches differ. Every process must call it, and raises the same."""
        require_same_batch(self._everyone.gather(batch.digest))

    def _losses(self, num_microbatches: int) -> list[float]:
        """The loss of each microbatch; zeros if another process has them."""
        row = [0.0] * num_microbatches
        for runner in self._last:
            for m, value in zip(runner.losses, _values(list(runner.losses.values())), strict=True):
                row[m] = value
        return row

    def _loss_type(self) -> float:
        """The place of the losses' type in `_LOSS_TYPES`; 0 if another process has them."""
        first = next((runner.losses[0] for runner in self._last if 0 in runner.losses), None)
        return 0.0 if first is None else float(_LOSS_TYPES.index(first.dtype))

    def _votes(self, agent: Agent | None) -> list[float]:
        """The votes of all processes, one after another; zeros for those of other processes."""
        if agent is None:
            return []
        vote = agent.vote()
        nothing = [0.0] * len(vote)
        return [
            n for rank in range(self._everyone.num_ranks) for n in (vote if rank in self._everyone.here else nothing)
        ]

    def _values(self) -> list[float]:
        """Digests of the values of parameters that other processes hold too. Nothing in most steps."""
        return [] if self._agreement is None or self._updates is None else self._agreement.values_row()

    def _facts(self) -> tuple[float, float, float, float]:
        """Whether this process knows of holders that are not alike, how many ranks here update, how many last stages
        had a loss with a gradient, and how many one without.
        """
        unlike = float(self._agreement is not None and not self._agreement.agrees())
        if not self._updates:  # the gradients of a model that is frozen as a whole may be asked for: there are none
            return unlike, 0.0, 0.0, 0.0
        ran = [runner.has_gradient for runner in self._last if runner.losses]
        return unlike, float(len(self._peers.here)), float(sum(ran)), float(len(ran) - sum(ran))

    def _require(self, num_updating: float, with_gradient: float, without: float) -> None:
        """Raises RuntimeFailure, in every process, if the step would train nothing, or only a part of the model."""
        ranks = self._num_ranks
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
        """Sums a row over all ranks."""
        if self._memory is not None and len(row) <= ROW:
            return self._memory.sum(row)
        summed: list[float] = self._peers.sum(torch.tensor(row, dtype=torch.float64, device="cpu")).tolist()
        return summed

    def _of_all(
        self,
        losses: list[float],
        tells: list[float],
        digest: int,
        differ: bool,
        windows: Sequence[range],
        dtype: torch.dtype,
    ) -> tuple[Tensor, list[float], bool]:
        """The losses of all replicas' microbatches, in the order of the whole batch; the sums of `tells` and of votes
        over all processes, computed from the sums over this pipeline; and whether batches differ anywhere.

        Args:
            digest: of this process's batch. differ: whether batches of this pipeline do.
        """
        replicas, size = self._replicas.num_ranks, len(losses)
        if replicas == 1:
            return torch.tensor(losses, dtype=dtype, device="cpu"), *self._of_shards(tells, digest, differ)
        mine = self._replicas.here[0]
        shared = torch.zeros(replicas, size + 2 + len(tells), dtype=torch.float64, device="cpu")
        shared[mine] = torch.tensor([*losses, digest, differ, *tells], dtype=torch.float64, device="cpu")
        shared = self._replicas.sum(shared)
        digests, differing = shared[:, size].tolist(), shared[:, size + 1].tolist()
        differ = any(differing) or digests.count(digests[0]) < replicas
        whole = torch.cat([shared[:, window.start : window.stop].reshape(-1) for window in windows])
        return whole.to(dtype), *self._of_shards(shared[:, size + 2 :].sum(0).tolist(), digest, differ)

    def _of_shards(self, tells: list[float], digest: int, differ: bool) -> tuple[list[float], bool]:
        """Sums `tells` over all shards, if there are any, and tells whether batches differ between them or in one.

        All else is the same on every shard, as their batches are.
        """
        if isinstance(self._everyone, MeshPeers):
            for shards in self._everyone.along[2:]:
                row = torch.zeros(1 + shards.num_ranks + len(tells), dtype=torch.float64, device="cpu")
                row[1 + shards.here[0]] = digest
                row[0], row[1 + shards.num_ranks :] = differ, torch.tensor(tells, dtype=torch.float64, device="cpu")
                differing, *summed = shards.sum(row).tolist()
                digests, tells = summed[: shards.num_ranks], summed[shards.num_ranks :]
                differ = bool(differing) or digests.count(digests[0]) < len(digests)
        return tells, differ


def require_same_batch(digests: Sequence[int]) -> None:
    """Raises RuntimeFailure if the processes' batches have different digests."""
    rule = f"every rank must give the same inputs and targets{IN_PLACE}"
    require_same([{"batch": digest} for digest in digests], rule, shown=False)


def split_like(row: Sequence[float], parts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Cuts a row into parts as long as those given."""
    ends = list(accumulate(map(len, parts)))
    return [list(row[end - len(part) : end]) for end, part in zip(ends, parts, strict=True)]


def _values(losses: Sequence[Tensor]) -> list[float]:
    """The losses as numbers. Those of a GPU are read together, because each read waits for the GPU."""
    if not losses or not losses[0].is_cuda:
        return [loss.item() for loss in losses]
    values: list[float] = torch.stack([loss.double() for loss in losses]).tolist()
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
