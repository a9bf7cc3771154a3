"""Plans in Megatron-Core: its own 1F1B with planned warm-ups, or any order of forwards and backwards.

    from penstock.integrations.megatron import PlannedCommunicator, follow

    comm = PlannedCommunicator(pp_group, config, warmup=[7, 5, 3, 1])       # Megatron's own function, other warm-ups
    forward_backward_func(..., p2p_communicator=comm, pg_collection=groups)

    from megatron.core.pipeline_parallel import schedules               # a function of ours in place of Megatron's
    schedules.forward_backward_pipelining_without_interleaving = follow(plan)
    schedules.forward_backward_pipelining_with_interleaving = follow(plan)      # if ranks have several stages

Megatron waits until a send is received. So a rank that runs far ahead of the next one hangs:

    warmup [8, 4, 2, 1]    rank 0 | F0 F1 F2 F3 F4 F5 F6 F7 B0 ...    waits until rank 1 takes what F5 sent
                           rank 1 | F0 F1 F2 F3 B0 F4 B1 F5 ...       waits until rank 0 takes what B0 sent

Here no send waits, and each direction of a link has a process group, so that a message never stands behind one that
goes the other way. With NCCL these are the streams of channel "nccl-edge", see `schedule.messages`.

Losses and gradients are Megatron's to the bit. Names were read in megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.integrations.torch import as_schedule
from penstock.library import build
from penstock.library.options import warmup_counts
from penstock.passes import add_communication
from penstock.planning import Plan
from penstock.schedule import Op, Schedule, ScheduleError, check, circular, one_to_one, peak_in_flight
from penstock.schedule.messages import GLOO, NCCL_EDGE, has_communication, other_end
from penstock.schedule.op import BACKWARD, COMMUNICATION, FORWARD

try:
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
except ImportError:  # plans can be checked for Megatron where it is not installed
    P2PCommunicator = object

__all__ = ["PlannedCommunicator", "follow", "planned_1f1b"]

MOST_POSTED = 8
"""Receives from a neighbour that wait for their messages; as in `ps.passes.add_communication`."""


def planned_1f1b(warmup: Sequence[int], num_microbatches: int) -> Schedule:
    """The order in which Megatron's 1F1B runs with a `PlannedCommunicator`, for `ps.simulate`.

    Args:
        warmup: forwards before the first backward, one count per rank, never rising.
        num_microbatches: of a step.

    Raises:
        ScheduleError: a count is below 1, or above that of the rank before.

    Examples:
        >>> print(planned_1f1b([3, 1], 4))
        schedule 1f1b: 2 ranks, 2 stages, 4 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 F2 B0 F3 B1 .  B2 .  B3
        rank 1 | .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    counts = warmup_counts("1f1b", warmup, max(1, len(warmup)), num_microbatches)
    rows = []
    for rank, ahead in enumerate(counts):
        forwards = [Op(FORWARD, rank, m) for m in range(num_microbatches)]
        later = ((Op(BACKWARD, rank, m), *forwards[ahead + m : ahead + m + 1]) for m in range(num_microbatches))
        rows.append((*forwards[:ahead], *chain.from_iterable(later)))
    schedule = Schedule("1f1b", one_to_one(len(counts)), tuple(rows), (0,) * num_microbatches)
    check(schedule)
    return schedule


@dataclass
class _Incoming:
    """A message of one or several tensors that is on its way. Without `works` it is not posted yet."""

    shapes: Sequence[Sequence[int]]
    source: int
    tensors: list[Tensor]
    works: list[Any]


class _Messages:
    """The messages of a rank to and from the others of its pipeline. Sends do not wait.

    Between two ranks the k-th message that one sends is the k-th that the other receives. Where shapes vary, a
    tensor of the shape goes before each tensor, and a receive is posted when its message is taken.
    """

    def __init__(self, pp_group: Any, config: Any) -> None:
        self._ranks, self.rank, self.config = dist.get_process_group_ranks(pp_group), pp_group.rank(), config
        backend = dist.get_backend_config(pp_group)
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, tuple(self._ranks))  # all make all groups, as torch wants it
        each = [list(ranks) for ranks in sorted(set(pipelines))]
        self._up, self._down = (dist.new_subgroups_by_enumeration(each, backend=backend)[0] for _ in range(2))
        self._coming: defaultdict[int, deque[_Incoming]] = defaultdict(deque)
        self._sent: defaultdict[int, deque[tuple[int, list[Any], list[Tensor]]]] = defaultdict(deque)
        self._num_sent: defaultdict[int, int] = defaultdict(int)

    @property
    def has_shapes(self) -> bool:
        """Whether shapes go before tensors."""
        return bool(self.config.variable_seq_lengths or getattr(self.config, "mtp_standalone", False))

    def send(self, tensors: Sequence[Tensor], target: int) -> int:
        """Sends a message to a rank of the pipeline, and returns its number among those to this rank."""
        held = [tensor.detach().contiguous() for tensor in tensors]  # Megatron frees a tensor's data, not this view
        if self.has_shapes:
            held = [each for data in held for each in (torch.tensor(data.size(), device=data.device), data)]
        group = self._up if target > self.rank else self._down
        works: list[Any] = [dist.isend(each, self._ranks[target], group) for each in held]
        self._num_sent[target] += 1
        self._sent[target].append((self._num_sent[target], works, held))
        return self._num_sent[target]

    def release(self, target: int, number: float = math.inf) -> None:
        """Waits until a rank has the messages up to this number, by default all, and frees them."""
        sent = self._sent[target]
        while sent and sent[0][0] <= number:
            for work in sent.popleft()[1]:
                work.wait()

    def receive(self, shapes: Sequence[Sequence[int]], source: int) -> _Incoming:
        """Posts the receive of the next message of a rank, or notes that it will come."""
        message = _Incoming(shapes, source, [], [])
        self._coming[source].append(message)
        if not self.has_shapes:
            self._post(message)
        return message

    def take(self, message: _Incoming) -> list[Tensor]:
        """Waits for a message."""
        coming = self._coming[message.source]
        while not message.works:  # those before it come first
            self._post(next(each for each in coming if not each.works))
        coming.remove(message)
        for work in message.works:
            work.wait()
        return message.tensors

    def _post(self, message: _Incoming) -> None:
        source, group = self._ranks[message.source], self._up if message.source < self.rank else self._down
        for shape in message.shapes:
            if self.has_shapes:
                size = torch.empty(3, dtype=torch.int64, device=_device())
                dist.recv(size, source, group)
                shape = size.tolist()
            data = torch.empty(tuple(shape), requires_grad=True, device=_device(), dtype=self.config.pipeline_dtype)
            message.tensors.append(data)
            message.works.append(dist.irecv(data, source, group))


class PlannedCommunicator(P2PCommunicator):  # type: ignore[misc, valid-type, unused-ignore]
    """A `P2PCommunicator` with which Megatron's own non-interleaved 1F1B runs planned warm-ups.

    Sends do not wait. Up to 8 receives from each neighbour are posted ahead, so that a late link delays a message
    once, not twice. All ranks of the job make one, at the same place of the program, and keep it.

    Args:
        pp_group: the ranks of the pipeline.
        config: of the model.
        warmup: forwards before the first backward, one count per rank, never rising. They are `warmup` of
            `ps.build("zb", ...)`: Megatron's own count plus one.
        num_microbatches: of a step. Default: what Megatron's own calculator says when the step begins. Set the
            attribute before a step with another number.

    Raises:
        ScheduleError: the counts are no warm-ups of this pipeline, or the model is in chunks.
    """

    def __init__(
        self, pp_group: Any, config: Any, *, warmup: Sequence[int], num_microbatches: int | None = None
    ) -> None:
        if len(warmup) != pp_group.size() or config.virtual_pipeline_model_parallel_size is not None:
            raise _refused(
                f"warmup has {len(warmup)} counts, the pipeline {pp_group.size()} ranks with "
                f"{config.virtual_pipeline_model_parallel_size or 1} stages each; give one count per rank with one "
                "stage, and use follow(plan) for chunks"
            )
        planned_1f1b(warmup, num_microbatches or max(warmup) + len(warmup))
        super().__init__(pp_group, config)
        self.warmup, self.num_microbatches = tuple(warmup), num_microbatches
        self._messages = _Messages(pp_group, config)
        self._ahead: defaultdict[int, deque[_Incoming]] = defaultdict(deque)
        self._left: defaultdict[tuple[str, int], int] = defaultdict(int)

    @property
    def current_stage(self) -> int:
        """Megatron runs `total_stages - current_stage - 1` forwards first; this makes them the planned ones."""
        return int(self.total_stages) - self.warmup[self.pp_group.rank()]

    def _communicate(self, *, tensor_shape: Any, **asked: Any) -> tuple[Tensor | None, Tensor | None, None]:
        """Sends `tensor_send_next` and `tensor_send_prev`, and receives what `recv_prev` and `recv_next` say."""
        rank = self.pp_group.rank()
        for tensor, peer in ((asked["tensor_send_next"], rank + 1), (asked["tensor_send_prev"], rank - 1)):
            if tensor is None:
                continue
            left, most = self._count("send", peer), self.warmup[min(rank, peer)]
            # A step without backwards ends with a forward, and no gradient is asked for then.
            ends_step = left == 1 and not asked["recv_next"]
            number = self._messages.send([tensor], peer)
            # An answer to the oldest of so many sends has come: no wait, except for the last ones of a step.
            self._messages.release(peer, number - (0 if ends_step else most))
        before = self._receive(rank - 1, tensor_shape) if asked["recv_prev"] else None
        after = self._receive(rank + 1, tensor_shape) if asked["recv_next"] else None
        return before, after, None

    def _receive(self, source: int, shape: Any) -> Tensor:
        left, ahead = self._count("receive", source), self._ahead[source]
        while len(ahead) < min(left, MOST_POSTED):
            ahead.append(self._messages.receive([shape], source))
        (tensor,) = self._messages.take(ahead.popleft())
        if left == 1 and source > self.pp_group.rank():
            self._messages.release(source)  # a gradient came back for each activation
        return tensor

    def _count(self, way: str, peer: int) -> int:
        """How many messages of a step are left on a way, this one included."""
        left = self._left[way, peer] or self._of_a_step()
        self._left[way, peer] = left - 1
        return left

    def _of_a_step(self) -> int:
        try:
            return self.num_microbatches or get_num_microbatches()
        except AttributeError as error:
            raise _refused("Megatron's calculator of microbatches is not set; give num_microbatches") from error


def follow(plan: Schedule | Plan | str | Path, *, most_posted: int = MOST_POSTED) -> Callable[..., list[Any]]:
    """A function like Megatron's `forward_backward_pipelining_without_interleaving` that runs a plan.

    It takes the arguments of that function, and of the interleaved one where the plan has several stages per rank.
    Put it in the place of either before training starts. Evaluation (`forward_only`) runs any number of
    microbatches.

    Args:
        plan: forwards and backwards in any order, stage s on rank s mod P; with or without messages as ops. A
            schedule, a `ps.plan` result or the path of a file.
        most_posted: receives posted ahead, where the plan has no messages as ops.

    Raises:
        ScheduleError: Megatron lacks what the plan needs, or the plan's messages would hang.

    Examples:
        >>> import penstock as ps
        >>> run = follow(ps.build("gpipe", 4, 8))
        >>> try:
        ...     follow(ps.build("zb-h1", 4, 8))
        ... except ps.ScheduleError as error:
        ...     print(str(error).split(";")[0])
        the plan has 0I0, but Megatron runs whole backwards alone
    """
    schedule = as_schedule(plan)
    _check_plan(schedule)
    if not has_communication(schedule):
        schedule = add_communication(schedule, channels=GLOO, most_posted=most_posted)
    check(schedule, channels=NCCL_EDGE)  # on gloo the same orders hang
    return partial(_forward_backward_pipelining, schedule, cache(partial(_forwards, schedule)), {})


def _forward_backward_pipelining(
    schedule: Schedule, forwards: Callable[[int], Schedule], messages: dict[Any, _Messages], *,
    forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int,
    seq_length: int, micro_batch_size: int, decoder_seq_length: int | None = None, forward_only: bool = False,
    collect_non_loss_data: bool = False, first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None, p2p_communicator: Any = None,
    pg_collection: Any = None, force_all_reduce: bool | None = False,
) -> list[Any]:  # fmt: skip
    """What `follow` returns, once it has the plan.

    Args:
        forwards: from a number of microbatches to a schedule of forwards alone.
        messages: the messages of each process group, kept from step to step.
    """
    from megatron.core.pipeline_parallel import schedules as theirs

    wanted = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    groups, pp_group, config = _groups_and_config(model, p2p_communicator, pg_collection)
    chunks, iterators = (each if isinstance(each, list) else [each] for each in (model, data_iterator))
    rank, several = pp_group.rank(), len(chunks) > 1
    if len(iterators) != len(chunks):
        raise _refused(f"the model has {len(chunks)} chunks, the data {len(iterators)} iterators; give as many")
    have = pp_group.size(), pp_group.size() * len(chunks), wanted[2] if forward_only else num_microbatches
    if have != wanted:
        raise _refused(f"the plan has {wanted} ranks, stages and microbatches, Megatron {have}; plan for these")
    is_last_rank = rank == schedule.num_ranks - 1
    finalizes = config.finalize_model_grads_func is not None and not forward_only
    embedding = theirs.clear_embedding_activation_buffer(config, model, is_last_rank) if finalizes else None
    with _timed(config, "forward-backward", log_level=1, barrier=config.barrier_with_L1_time):
        shape = theirs.get_tensor_shapes(
            seq_length=seq_length, micro_batch_size=micro_batch_size, config=config,
            decoder_seq_length=None if several else decoder_seq_length, tp_group=groups.tp, cp_group=groups.cp,
        )  # fmt: skip
        shapes = shape, list(shape)
        if adjust_tensor_shapes_fn is not None:
            shapes = adjust_tensor_shapes_fn(*shapes)
        carried = messages[pp_group] = messages.get(pp_group) or _Messages(pp_group, config)
        carried.config = config
        placed = forwards(num_microbatches) if forward_only else schedule
        syncs = _Syncs(config, chunks, placed, rank, forward_only)
        num_tokens = torch.zeros([], dtype=torch.int, device=_device())

        def forward(chunk: int, microbatch: int, received: list[Any], checkpointed: bool | None) -> Any:
            outputs, new_tokens = theirs.forward_step(
                forward_step_func, iterators[chunk], chunks[chunk], num_microbatches, received, results, config,
                groups.cp.size(), collect_non_loss_data, checkpointed,
                theirs.check_first_val_step(first_val_step, forward_only, microbatch == 0), microbatch,
                chunk if several else None, is_last_rank and chunk == len(chunks) - 1,
            )  # fmt: skip
            num_tokens.add_(new_tokens)
            return outputs

        results: list[Any] = []
        functions = forward, theirs.backward_step, theirs.deallocate_output_tensor
        _Step(placed, shapes, carried, syncs, forward_only).run(*functions)
        if finalizes:
            theirs.finish_embedding_wgrad_compute(config, embedding, is_last_rank, groups.tp)
            tokens = num_tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, tokens, pg_collection=groups, force_all_reduce=force_all_reduce)
    if getattr(config, "cuda_graph_impl", None) == "local":
        theirs.create_cudagraphs()
    return results


def _groups_and_config(model: Any, p2p_communicator: Any, pg_collection: Any) -> tuple[Any, Any, Any]:
    """Megatron's process groups, that of the pipeline, and the model's config. Raises ScheduleError."""
    from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    is_whole = (p2p_communicator is None) == (pg_collection is None)
    if not is_whole or not isinstance(pg_collection, ProcessGroupCollection | None):
        raise _refused("give both a p2p_communicator and a ProcessGroupCollection as pg_collection, or neither")
    groups = _build_default_pg_collection() if pg_collection is None else pg_collection
    config = get_model_config(model[0] if isinstance(model, list) else model)
    for name in ("overlap_moe_expert_parallel_comm", "moe_paged_stash", "fine_grained_activation_offloading"):
        if getattr(config, name, False):
            raise _refused(f"{name} counts on Megatron's own order of ops; unset it, or use no plan")
    return groups, groups.pp if p2p_communicator is None else p2p_communicator.pp_group, config


@dataclass
class _Step:
    """One step of one rank: its row, op by op."""

    schedule: Schedule
    shapes: tuple[Any, Any]  # of activations that are received, and of those that are sent
    messages: _Messages
    syncs: _Syncs
    forward_only: bool

    def run(self, forward: Callable[..., Any], backward: Callable[..., Any], free: Callable[..., None]) -> None:
        """Runs the row with Megatron's functions for a forward, a backward, and freeing the data of what was sent."""
        coming: dict[Op, _Incoming] = {}
        going: dict[Op, list[Tensor]] = {}
        held: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}  # inputs and outputs until the backward
        sent: dict[tuple[int, int], tuple[int, int]] = {}  # the target and number of each activation
        config, rank = self.messages.config, self.messages.rank
        most = config.num_microbatches_with_partial_activation_checkpoints
        window = peak_in_flight(self.schedule)[rank]
        counts = {FORWARD: count(), BACKWARD: count()}
        for op in self.schedule.order[rank]:
            key = op.stage, op.microbatch
            if op.kind in COMMUNICATION:
                peer = self.schedule.rank_of(other_end(op).stage, op.microbatch)
                if op.kind.startswith("RECV"):
                    coming[op] = self.messages.receive(self.shapes[op.kind == "RECV_B"], peer)
                    continue
                tensors = going.pop(op)
                number = self.messages.send(tensors, peer)
                if op.kind == "SEND_F" and not self.forward_only:
                    sent[key] = peer, number
                    free(tensors, config.deallocate_pipeline_outputs)
                continue
            number = next(counts[op.kind])
            if op.kind == FORWARD:
                self.syncs.before_forward(number)
                inputs = self._take(coming.pop(Op("RECV_F", *key), None), "forward-recv")
                checkpointed = None if most is None else number % window >= most
                outputs = forward(op.stage // self.schedule.num_ranks, op.microbatch, inputs, checkpointed)
                going[Op("SEND_F", *key)] = outputs
                if not self.forward_only:
                    held[key] = inputs, outputs
                continue
            grads = self._take(coming.pop(Op("RECV_B", *key), None), "backward-recv")
            if key in sent:  # a gradient came back, so the activation has arrived
                self.messages.release(*sent.pop(key))
            self.syncs.before_backward(number)
            going.pop(Op("SEND_F", *key), None)  # the loss goes nowhere
            going[Op("SEND_B", *key)] = backward(*held.pop(key), grads, config)
            self.syncs.after_backward(number)
        self.syncs.finish()
        for peer in range(self.schedule.num_ranks):
            self.messages.release(peer)

    def _take(self, message: _Incoming | None, timer: str) -> list[Any]:
        """The tensors of a message; a None where a first or last stage receives nothing."""
        if message is None:
            return [None]
        with _timed(self.messages.config, timer):
            return self.messages.take(message)


class _Syncs:
    """When gradients and parameters travel between replicas: where Megatron's own functions have it.

    With one chunk a rank reduces gradients in its last backward; by `grad_sync_func` after it, except on the first
    rank. With several, each chunk does in its last backward; by `grad_sync_func` as many backwards later as the
    rank's number, so that all ranks of the pipeline reduce at about the same time.
    """

    def __init__(self, config: Any, chunks: list[Any], schedule: Schedule, rank: int, forward_only: bool) -> None:
        self._several, by_hooks = len(chunks) > 1, forward_only or config.grad_sync_func is None
        self._reduce = _each(None if by_hooks else config.grad_sync_func, chunks)
        self._gather = _each(config.param_sync_func if self._several and not forward_only else None, chunks)
        no_sync = config.no_sync_func or contextlib.nullcontext
        self._no_sync: list[Any] = no_sync if isinstance(no_sync, list) else [no_sync]
        self._entered: contextlib.ExitStack | None = None
        ops = schedule.order[rank]
        forwards, backwards = ([op.stage // schedule.num_ranks for op in ops if op.kind == kind] for kind in "FB")
        last = {chunk: number for number, chunk in enumerate(backwards)}
        self._after = {last[chunk] + rank: chunk for chunk in last if self._several and not by_hooks}
        by_hooks = by_hooks or (rank == 0 and not self._several)
        self._in_backward = {number: chunk for chunk, number in last.items()} if by_hooks else {}
        self._before = {chunk: max(0, forwards.index(chunk - 1) - rank) for chunk in range(2, len(chunks))}
        self._left = set(range(len(chunks)))
        self._disable()
        for gather in self._gather[:2]:
            gather()

    def before_forward(self, number: int) -> None:
        """Gathers the parameters of a chunk while the chunk before it runs."""
        for chunk, start in self._before.items():
            if start == number:
                self._gather[chunk]()

    def before_backward(self, number: int) -> None:
        """Lets the last backward of a chunk reduce gradients."""
        if number in self._in_backward:
            self._enable()
            self._left.discard(self._in_backward[number])

    def after_backward(self, number: int) -> None:
        """Reduces the gradients of a chunk that has ended, and keeps others from being reduced."""
        if number in self._after:
            self._enable()
            self._reduce[self._after[number]]()
            self._left.discard(self._after[number])
        if self._several:
            self._disable()

    def finish(self) -> None:
        """Reduces what is left."""
        self._enable()
        for chunk in sorted(self._left):
            self._reduce[chunk]()

    def _disable(self) -> None:
        if self._entered is None:
            self._entered = contextlib.ExitStack()
            for each in self._no_sync:
                self._entered.enter_context(each())

    def _enable(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


def _each(functions: Any, chunks: list[Any]) -> list[Callable[[], None]]:
    """Of each chunk, the function to call once with its parameters; one that does nothing where there is none."""
    each = functions if isinstance(functions, list) else [functions or (lambda _: None)] * len(chunks)
    return [partial(function, chunk.parameters()) for function, chunk in zip(each, chunks, strict=True)]


def _forwards(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Rows of forwards alone, for evaluation."""
    whole = build("looped-bfs", schedule.num_ranks, num_microbatches, num_stages=schedule.num_stages)
    placed = add_communication(whole, channels=GLOO)
    rows = tuple(tuple(op for op in row if op.kind.endswith(FORWARD)) for row in placed.order)
    return Schedule("forwards", schedule.placement, rows, placed.microbatch_pipeline)


@contextlib.contextmanager
def _timed(config: Any, name: str, log_level: int = 2, **options: Any) -> Iterator[None]:
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=log_level).start(**options)
    yield
    config.timers(name).stop()


def _device() -> Any:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _refused(message: str) -> ScheduleError:
    return ScheduleError(message, rule="megatron")


def _check_plan(schedule: Schedule) -> None:
    """Refuses plans that need more than Megatron's forwards, backwards and placement of stages."""
    if schedule.num_ranks < 2 or schedule.placement != circular(schedule.num_ranks, schedule.num_stages):
        raise _refused(f"{schedule.name} lacks Megatron's placement, stage s on rank s mod P with P > 1; plan for it")
    for op in chain.from_iterable(schedule.order):
        if op.kind not in (FORWARD, BACKWARD, *COMMUNICATION):
            raise _refused(f"the plan has {op}, but Megatron runs whole backwards alone; plan with F and B")
    if any(each.kind == FORWARD for each in schedule.microbatch_orders):
        raise _refused(
            "the plan's forwards are not in ascending order, but Megatron's data are; plan with that order"
        )
