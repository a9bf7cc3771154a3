"""Cuts a batch into microbatches.

`ReplicaBatches` is for batches of which each replica loads its own part. Only the ranks that need inputs or targets
are given them:

    replica 0    rank 0: inputs    rank 1: nothing    rank 2: targets
    replica 1    rank 0: inputs    rank 1: nothing    rank 2: targets

Before a step all processes exchange what they were given: sizes, shapes, weights for the loss, and a digest. From
that each process knows which messages come and what each microbatch counts in the loss of the whole batch, or finds
an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.stage.branches import loss_stage, starts_of
from penstock.runtime.stage.loss_weights import LossFn, adds_up, shares_of, sizes_of, weigh, weights_of
from penstock.runtime.tensors.aliases import storage_of
from penstock.runtime.tensors.digest import batch_digest
from penstock.runtime.tensors.pytree import DTYPES, flatten, unflatten
from penstock.schedule import Schedule

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and types of what goes into a microbatch: what stage outputs' shapes are expected to follow from."""

NO_LOSS = (
    "this pipeline has no loss_fn; give one to ps.Pipeline to {}, a function of the output and the targets. If the "
    "model returns its loss itself, say where: loss_fn=lambda output, targets: output['loss']"
)
"""The error of a pipeline without a loss, with what it is asked to do."""


@dataclass(frozen=True)
class Microbatches:
    """A batch, cut.

    Attributes:
        inputs: by the stage that they go into, one entry per microbatch of it.
        targets: one entry per microbatch of the stage with the loss, whose microbatches scales and windows count too;
            all None without a loss.
        weighed: gives the weight of each microbatch's loss, see `scales`.
        signatures: per microbatch.
        digest: a number that tells this batch from others with as good as certainty; 0 where nobody asks.
        windows: the microbatches that each update gathers; all are one window where updates are no ops.
        replica: whose part of a larger batch this is. Each window of the whole is dealt to the replicas, in as many
            microbatches for each, one replica's after those of the one before.
        overlap: gives the memory that several parts of the batch lie in, see `shared_memory`.
    """

    inputs: Mapping[int, Sequence[Any]]
    targets: Sequence[Any]
    weighed: Callable[[], list[float]]
    signatures: list[Signature]
    digest: int
    windows: tuple[range, ...]
    replica: int = 0
    overlap: Callable[[], frozenset[int]] = frozenset

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def shared_memory(self) -> frozenset[int]:
        """The addresses of memory in which inputs of several stages lie, or inputs and targets."""
        return self.overlap()

    @cached_property
    def scales(self) -> list[float]:
        """The weight of each microbatch's loss; they sum to 1 (0 where nothing has weight).

        Where several processes have the batch, the one with the loss alone works them out.
        """
        return self.weighed()

    def into(self, stage: int) -> Sequence[Any]:
        """What goes into a stage that no other feeds."""
        return self.inputs[stage]

    def signature(self, microbatch: int) -> Signature:
        """Of a microbatch of any stage. Some stage may have more of them than the batch is cut into at first; all of
        a stage's are of one shape then.
        """
        return self.signatures[min(microbatch, len(self.signatures) - 1)]

    def of_replica(self, replica: int, num_replicas: int) -> Microbatches:
        """One replica's part: as many microbatches as the others', with the weights they have in the whole batch."""
        if num_replicas == 1:
            return self

        def part(values: Sequence[Any]) -> list[Any]:
            if len(self.windows) == 1:
                return _dealt(values, replica, num_replicas)
            return [value for w in self.windows for value in _dealt(values[w.start : w.stop], replica, num_replicas)]

        inputs = {stage: part(values) for stage, values in self.inputs.items()}
        windows = tuple(range(w.start // num_replicas, w.stop // num_replicas) for w in self.windows)
        targets, signatures = part(self.targets), part(self.signatures)
        return Microbatches(
            inputs, targets, lambda: part(self.scales), signatures, self.digest, windows, replica, self.overlap
        )


def _dealt(values: Sequence[Any], replica: int, num_replicas: int) -> list[Any]:
    size = len(values) // num_replicas
    return list(values[replica * size : (replica + 1) * size])


class CutTensor(Sequence[Tensor]):
    """A tensor's microbatches, as even as possible, the larger ones first; cut where one is first asked for, as most
    ranks of a pipeline ask for none.
    """

    def __init__(self, tensor: Tensor, num: int) -> None:
        self._tensor, self._num = tensor, num
        self._parts: Sequence[Tensor] | None = None

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, place: Any) -> Any:
        if self._parts is None:
            self._parts = self._tensor.tensor_split(self._num)
        return self._parts[place]

    @property
    def signatures(self) -> list[Signature]:
        """Of each part."""
        (size, *rest), dtype = self._tensor.shape, self._tensor.dtype
        least, larger = divmod(size, self._num)
        if not larger:
            return [(((least, *rest), dtype),)] * self._num
        return [(((least + (m < larger), *rest), dtype),) for m in range(self._num)]


def _num_samples(leaves: Sequence[Tensor], what: str) -> int:
    for leaf in leaves:
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.").strip("_")
            raise RuntimeFailure(
                f"the {what} hold a tensor of layout {kind}, which torch can't cut along dimension 0; give a list "
                f"with one entry per microbatch{', each with layout=torch.jagged' * leaf.is_nested}"
            )
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        raise RuntimeFailure(
            f"the {what} have {sorted(sizes)} samples in dimension 0; every tensor needs the same number, above 0"
        )
    return sizes.pop()


def split(value: Any, num_microbatches: int, what: str) -> Sequence[Any]:
    """Cuts a batch along dimension 0, as evenly as possible, the larger microbatches first.

    A list is taken as cut already, one entry per microbatch.

    Raises:
        RuntimeFailure: fewer samples than microbatches, a list of another length, or tensors that disagree.
    """
    if isinstance(value, list):
        if len(value) != num_microbatches:
            raise RuntimeFailure(
                f"{len(value)} {what} given as a list, the schedule runs {num_microbatches} microbatches; "
                "give one entry per microbatch, or what is to be cut: a tensor, a tuple of positional arguments or a "
                "dict of keyword arguments"
            )
        return value
    leaves, skeleton = flatten(value)
    if not leaves:
        raise RuntimeFailure(f"the {what} hold no tensor; give tensors with the samples in dimension 0")
    num_samples = _num_samples(leaves, what)
    if num_samples < num_microbatches:
        raise RuntimeFailure(
            f"a batch of {num_samples} samples can't be cut into {num_microbatches} microbatches; "
            f"give at least {num_microbatches} samples or build a schedule with fewer microbatches"
        )
    if skeleton == 0 and type(value) is Tensor:
        return CutTensor(value, num_microbatches)
    parts = [leaf.tensor_split(num_microbatches) for leaf in leaves]
    return [unflatten([p[m] for p in parts], skeleton) for m in range(num_microbatches)]


def num_entries(value: Any) -> int:
    """Into how many microbatches a batch can be cut at most: its samples, or the entries of a list."""
    if isinstance(value, list):
        return len(value)
    leaves, _ = flatten(value)
    return max(1, _num_samples(leaves, "inputs")) if leaves else 1


def cut_for(
    schedule: Schedule,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    windows: Sequence[range],
    num: int | None = None,
    replica: int = 0,
    num_replicas: int = 1,
    digested: bool = False,
) -> Microbatches:
    """A batch, cut for the stages that it goes into and for the one with the loss; see `cut_batch`.

    Args:
        num: microbatches; the schedule's where not given.
        replica, num_replicas: the batch is cut for so many pipelines, and this one's part returned.
        digested: whether other processes are to have the same batch.
    """
    graph, num = schedule.graph, num or schedule.num_microbatches
    starts = {stage: graph.microbatches_of(stage, num) * num_replicas for stage in starts_of(graph)}
    count = graph.microbatches_of(loss_stage(graph), num) * num_replicas
    counts = [each * num_replicas for each in graph.num_microbatches]
    windows = [range(w.start * num_replicas, w.stop * num_replicas) for w in windows]
    whole = cut_batch(inputs, targets, count, loss_fn, windows, starts, counts, digested)
    return whole.of_replica(replica, num_replicas)


def cut_batch(
    inputs: Any,
    targets: Any,
    num_microbatches: int,
    loss_fn: LossFn,
    windows: Sequence[range] = (),
    starts: Mapping[int, int] | None = None,
    counts: Sequence[int] = (),
    digested: bool = False,
) -> Microbatches:
    """Cuts inputs and targets and weighs the microbatches.

    Args:
        inputs: by stage, where the batch goes into several.
        num_microbatches: of the stage with the loss.
        windows: the microbatches that each update gathers; all of them in one where not given.
        starts: of the stages that the batch goes into the number of microbatches; stage 0 where not given.
        counts: of all stages, where they differ.

    Raises:
        RuntimeFailure: inputs that cannot be cut, or not for all stages at the same samples, or not given for just
            these stages; targets for other samples than the inputs'.
    """
    windows = tuple(windows) or (range(num_microbatches),)
    starts = starts or {0: num_microbatches}
    given = inputs_by_stage(inputs, list(starts))
    cut = {stage: split(value, starts[stage], "inputs") for stage, value in given.items()}
    if len(given) > 1 or counts:
        _require_alike(given, counts)
    first = next(iter(given))
    cut_inputs = cut[first]
    if starts[first] != num_microbatches:
        cut_inputs = split(given[first], num_microbatches, "inputs")
    if isinstance(given[first], list):
        _require_samples(cut_inputs, loss_fn)
    cut_targets = [None] * num_microbatches if targets is None else split(targets, num_microbatches, "targets")
    if targets is not None:
        _require_matching(given[first], cut_inputs, targets, cut_targets)
    digest = batch_digest(*given.values(), targets) if digested else 0
    weighed = partial(weigh, cut_inputs, cut_targets, loss_fn if targets is not None else None, windows)
    overlap = partial(_overlap, [*given.values(), *([] if targets is None else [targets])])
    signatures = _signatures(list(cut.values()))
    batch = Microbatches(cut, cut_targets, weighed, signatures, digest, windows, overlap=overlap)
    if not digested or len(windows) > 1:
        _ = batch.scales  # before the step, on every rank: some window may weigh nothing
    return batch


def _overlap(parts: Sequence[Any]) -> frozenset[int]:
    """The addresses of memory in which tensors of several parts lie."""
    found = Counter(address for part in parts for address in {storage_of(leaf) for leaf in flatten(part)[0]})
    return frozenset(address for address, num in found.items() if num > 1 and address)


def _require_samples(cut: Sequence[Any], loss_fn: LossFn) -> None:
    """Raises RuntimeFailure for a microbatch without samples, of which a loss that is a mean makes no number, and
    where tensors of other sizes than the first would give microbatches other weights.
    """
    if loss_fn is None or adds_up(loss_fn) or callable(getattr(loss_fn, "weight", None)):
        return
    for m, size in enumerate(sizes_of(cut)):
        if not size:
            raise RuntimeFailure(
                f"microbatch {m} of the inputs has no samples, and the mean of no loss is no number; give each at "
                'least one sample, or a loss that adds up (reduction="sum")'
            )
    by_tensor = [[leaf.shape[0] if leaf.dim() else 1 for leaf in flatten(value)[0]] for value in cut]
    if len({len(sizes) for sizes in by_tensor}) > 1:
        return
    first, *others = zip(*by_tensor, strict=True) if by_tensor[0] else [()]
    for other in others:
        # One that is as large everywhere may be a table that each microbatch is given.
        if len({*other}) > 1 and any(a * first[0] != b * other[0] for a, b in zip(other, first, strict=True)):
            raise RuntimeFailure(
                f"the first tensor of each microbatch of the inputs has {_listed(first)} entries in dimension 0, and "
                f"another {_listed(other)}, so that nobody knows which of them are the samples by which microbatches "
                "weigh in the loss; give loss_fn a method weight(targets) that says what its mean is over"
            )


def _signatures(cut: Sequence[Sequence[Any]]) -> list[Signature]:
    if len(cut) == 1 and isinstance(cut[0], CutTensor):
        return cut[0].signatures
    leaves = [[flatten(value)[0] for value in values] for values in cut]
    return [
        tuple((tuple(t.shape), t.dtype) for each in leaves if m < len(each) for t in each[m])
        for m in range(max(map(len, leaves)))
    ]


def _require_matching(inputs: Any, cut_inputs: Sequence[Any], targets: Any, cut_targets: Sequence[Any]) -> None:
    """Raises RuntimeFailure where samples have no target, or targets no sample; what was cut already on both sides is
    its user's.
    """
    if isinstance(inputs, list) and isinstance(targets, list):
        return
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and targets.dim() and len(inputs) == len(targets):
        return  # cut at the same samples
    sizes = [_sizes(value) for value in cut_inputs]
    if not isinstance(targets, list):
        num_targets, num = _num_samples(flatten(targets)[0], "targets"), sum(max(size, default=0) for size in sizes)
        if num_targets != num:
            raise RuntimeFailure(
                f"the targets have {num_targets} samples and the inputs {num}; give as many, or lists with one "
                "entry of each per microbatch"
            )
    for m, (size, value) in enumerate(zip(sizes, cut_targets, strict=True)):
        if other := sorted(_sizes(value) - size):
            raise RuntimeFailure(
                f"microbatch {m} has {max(size, default=0)} samples and {other[0]} targets; cut both at the same "
                "samples, or give tensors, which are"
            )


def _sizes(value: Any) -> set[int]:
    """The extents of tensors in dimension 0; of numbers none."""
    return {leaf.shape[0] for leaf in flatten(value)[0] if leaf.dim()}


def _require_alike(given: Mapping[int, Any], counts: Sequence[int]) -> None:
    """Raises RuntimeFailure where stages would cut the batch at different samples, and join what does not match."""
    differ = len(set(counts)) > 1
    sizes = {}
    for stage, value in given.items():
        if not isinstance(value, list):
            sizes[stage] = _num_samples(flatten(value)[0], "inputs")
        elif differ:
            raise RuntimeFailure(
                f"stages work on {_listed(sorted(set(counts)))} microbatches, and the inputs of stage {stage} are a "
                "list, cut already; give tensors, which are cut for every stage"
            )
    if len(set(sizes.values())) > 1:
        raise RuntimeFailure(
            f"the inputs of stages {_listed(sizes)} have {_listed(sizes.values())} samples; give all the same number"
        )
    least = lcm(*counts)
    for size in sizes.values():
        if differ and size % least:
            raise RuntimeFailure(
                f"a batch of {size} samples, and stages that work on {_listed(sorted(set(counts)))} microbatches; "
                f"give a multiple of {least} samples, so that every stage cuts it at the same places"
            )


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def inputs_by_stage(inputs: Any, starts: Sequence[int]) -> dict[int, Any]:
    """What goes into each of the stages that no other feeds.

    Raises:
        RuntimeFailure: several such stages, and not an entry for each.
    """
    if len(starts) == 1:
        return {starts[0]: inputs}
    if not isinstance(inputs, Mapping) or set(inputs) != set(starts):
        got = f"entries {', '.join(map(repr, inputs))}" if isinstance(inputs, Mapping) else type(inputs).__name__
        raise RuntimeFailure(
            f"the batch goes into stages {', '.join(map(str, starts))}; give the inputs as a dict with one entry for "
            f"each, {{{starts[0]}: ..., {starts[1]}: ...}}, not {got}"
        )
    return {stage: inputs[stage] for stage in starts}


Facts = dict[str, Any]
"""What a process says of what it was given."""


class ReplicaBatches:
    """Cuts batches of this process's replica.

    Args:
        gather: gives every process of the mesh what all of them say.
        changing: gives the stages here that change their part of a batch in place.

    Raises:
        RuntimeFailure: a schedule whose batch goes into several stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        mesh: ProcessMesh,
        gather: Callable[[Facts], list[Facts]],
        changing: Callable[[], list[int]],
    ) -> None:
        starts = starts_of(schedule.graph)
        if len(starts) > 1 or len(set(schedule.graph.num_microbatches)) > 1:
            raise RuntimeFailure(
                f'batches="replica" is for schedules whose batch goes into one stage, and that of {schedule.name} '
                'goes into several or is cut for each stage anew; give every process the whole batch, batches="whole"'
            )
        self._start, self._mesh, self._gather, self._changing = starts[0], mesh, gather, changing
        here, pipelines = set(mesh.pipeline.here), schedule.placement.pipelines
        shared = dict(schedule.placement.shared)

        def hosts(stage: int) -> bool:
            return bool(here & {*(ranks[stage] for ranks in pipelines), *shared.get(stage, ())})

        self._needs = {"inputs": hosts(self._start), "targets": hosts(loss_stage(schedule.graph))}

    def cut(
        self, inputs: Any, targets: Any, loss_fn: LossFn, windows: Sequence[range], num: int, fewer: bool = False
    ) -> Microbatches:
        """This replica's microbatches. Every process of the mesh must call it.

        Args:
            num: microbatches of a replica. fewer: whether a small batch may be cut into fewer.

        Raises:
            RuntimeFailure: in every process, what is wrong in any of them.
        """
        batch: Microbatches | None = None
        mine: Facts = {"process": self._mesh.everyone.here[0], "replica": self._mesh.replica}
        if changing := self._changing():
            mine["changing"] = changing
        try:
            batch = self._own(inputs, targets, num, fewer)
            mine |= self._facts(batch, inputs, targets, loss_fn)
        except Exception as error:
            mine["error"] = str(error) if isinstance(error, RuntimeFailure) else f"{type(error).__name__}: {error}"
        everyone = self._gather(mine)
        for facts in everyone:
            if "error" in facts:
                raise RuntimeFailure(f"process {facts['process']}: {facts['error']}")
        count = self._require_complete(everyone, loss_fn is not None)
        parts = [self._of_replica(everyone, replica) for replica in range(self._mesh.num_replicas)]
        windows = tuple(windows) or (range(count),)
        own = parts[self._mesh.replica]
        scales = [1.0] * count
        if not adds_up(loss_fn):
            scales = shares_of([part["weights"] for part in parts], windows)[self._mesh.replica]
        signatures: list[Signature] = [
            tuple((tuple(shape), DTYPES[name]) for shape, name in each) for each in own["signatures"]
        ]
        nothing = [None] * count
        cut_inputs = nothing if batch is None or inputs is None else batch.inputs[0]
        cut_targets = nothing if batch is None or targets is None else batch.targets
        into: Mapping[int, Sequence[Any]] = {self._start: cut_inputs}
        return Microbatches(into, cut_targets, lambda: scales, signatures, 0, windows, self._mesh.replica)

    def _own(self, inputs: Any, targets: Any, num: int, fewer: bool) -> Microbatches | None:
        """What this process was given, cut; None where that is nothing."""
        given = inputs if inputs is not None else targets
        if given is None:
            return None
        num = max(1, min(num, num_entries(given))) if fewer else num
        if inputs is None:  # targets are cut as inputs would be
            cut = cut_batch(targets, None, num, None)
            return Microbatches({}, cut.inputs[0], list, [], 0, (range(num),))
        return cut_batch(inputs, targets, num, None)

    def _facts(self, batch: Microbatches | None, inputs: Any, targets: Any, loss_fn: LossFn) -> Facts:
        facts: Facts = {"needs": [name for name, needed in self._needs.items() if needed]}
        if batch is None:
            return facts
        facts["num"] = len(batch)
        if inputs is not None:
            if isinstance(inputs, list):
                _require_samples(batch.inputs[0], loss_fn)
            signatures = [
                [(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype in batch.signature(m)]
                for m in range(len(batch))
            ]
            facts["inputs"] = {
                "digest": batch_digest(inputs),
                "sizes": sizes_of(batch.inputs[0]),
                "signatures": signatures,
                "cut": isinstance(inputs, list),
            }
        if targets is not None:
            facts["targets"] = {
                "digest": batch_digest(targets),
                "sizes": sizes_of(batch.targets),
                "weights": weights_of(batch.targets, loss_fn),
                "cut": isinstance(targets, list),
            }
        return facts

    def _require_complete(self, everyone: Sequence[Facts], scored: bool) -> int:
        """The microbatches of each replica. Raises RuntimeFailure where a process lacks some or replicas differ."""
        with_targets = any("targets" in facts for facts in everyone)
        for facts in everyone:
            for name in facts["needs"]:
                if name not in facts and (name == "inputs" or (with_targets and scored)):
                    raise RuntimeFailure(
                        f"process {facts['process']} has the {'first' if name == 'inputs' else 'last'} stage of "
                        f"replica {facts['replica']} and was given no {name}; give it that replica's"
                    )
        counts = {facts["num"]: facts for facts in everyone if "num" in facts}
        if len(counts) > 1:
            (few, one), (many, other) = sorted(counts.items())[:2]
            raise RuntimeFailure(
                f"process {one['process']} cut its batch into {few} microbatches and process {other['process']} into "
                f"{many}; give every replica a batch of as many"
            )
        return int(next(iter(counts)))

    def _of_replica(self, everyone: Sequence[Facts], replica: int) -> Facts:
        """What one replica's microbatches weigh and look like. Raises RuntimeFailure where processes disagree."""
        of_replica = [each for each in everyone if each["replica"] == replica]
        found: Facts = {}
        for name in ("inputs", "targets"):
            given = [each for each in of_replica if name in each]
            if len({each[name]["digest"] for each in given}) > 1:
                numbers = " and ".join(str(each["process"]) for each in given[:2])
                why = why_inputs_differ({stage for each in of_replica for stage in each.get("changing", ())})
                raise RuntimeFailure(
                    f"processes {numbers} of replica {replica} were given different {name}; {why}give the same"
                )
            if given:
                found[name] = given[0][name]
        inputs, targets = found["inputs"], found.get("targets")
        if targets is not None and not (inputs["cut"] and targets["cut"]) and inputs["sizes"] != targets["sizes"]:
            raise RuntimeFailure(
                f"replica {replica} was given microbatches of {_listed_sizes(inputs['sizes'])} samples and of "
                f"{_listed_sizes(targets['sizes'])} targets; give as many of both"
            )
        weights = None if targets is None else targets["weights"]
        return {"weights": inputs["sizes"] if weights is None else weights, "signatures": inputs["signatures"]}


def why_inputs_differ(changing: Collection[int]) -> str:
    """For an error: what may have made one batch another one in some processes, and what to do. Nothing where no
    stage has been seen to change its part of a batch.
    """
    if not changing:
        return ""
    which = f"stage {min(changing)} changes" if len(changing) == 1 else f"stages {_listed(sorted(changing))} change"
    return (
        f"{which} inputs in place, so that tensors which are given again hold other values where that runs: give "
        "each step tensors of its own (x.clone()), or let the stage change a copy (nn.ReLU() without inplace=True). "
        "If it is not that, "
    )


def _listed_sizes(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size:g}" for size in sizes)
