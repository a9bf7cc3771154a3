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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import lcm
from typing import Any

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.stage.batch_rules import PLAIN, BatchRules, Cut, Signature, Uncut, rules_at, uncut
from penstock.runtime.stage.branches import loss_stage, starts_of
from penstock.runtime.stage.loss import LossFn, adds_up, counts_of, counts_targets, shares_of, sizes_of, weights_of
from penstock.runtime.tensors.digest import batch_digest
from penstock.runtime.tensors.pytree import flatten
from penstock.schedule import Schedule

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
        counts: returns by replica how many targets or samples the loss of each microbatch is a mean over.
        adds_up: whether the losses are shares of the batch's loss, which are added up as they are.
        signatures: per microbatch.
        digest: a number that tells this batch from others with as good as certainty; 0 where nobody asks.
        windows: the microbatches that each update gathers; all are one window where updates are no ops.
        replica: whose part of a larger batch this is. Each window of the whole is dealt to the replicas, in as many
            microbatches for each, one replica's after those of the one before.
    """

    inputs: Mapping[int, Sequence[Any]]
    targets: Sequence[Any]
    counts: Callable[[], Sequence[Sequence[float]]]
    adds_up: bool
    signatures: list[Signature]
    digest: int
    windows: tuple[range, ...]
    replica: int = 0

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def scales(self) -> list[float]:
        """The weight of each microbatch's loss; they sum to 1 (0 where nothing has weight).

        Where several processes have the batch, the one with the loss alone works them out.
        """
        return [1.0] * len(self) if self.adds_up else shares_of(self.counts(), self.windows)[self.replica]

    @property
    def weight(self) -> float:
        """How many targets or samples the loss of the whole batch, over all replicas, is a mean over. A mean over
        several batches weighs it by that. Losses that are added up weigh 1 each.
        """
        return 1.0 if self.adds_up else sum(chain(*self.counts()))

    def signature(self, microbatch: int) -> Signature:
        """Of a microbatch of any stage. Some stage may have more of them than the batch is cut into at first; all of
        a stage's are of one shape then.
        """
        return self.signatures[min(microbatch, len(self.signatures) - 1)]

    def of_replica(self, replica: int, num_replicas: int) -> Microbatches:
        """One replica's part: as many microbatches as the others', with the weights they have in the whole batch."""
        if num_replicas == 1:
            return self

        def part(values: Sequence[Any], of: int = replica) -> list[Any]:
            spans = self.windows if len(self.windows) > 1 else (range(len(values)),)
            return [values[k] for w in spans for k in w[len(w) * of // num_replicas :][: len(w) // num_replicas]]

        inputs = {stage: part(values) for stage, values in self.inputs.items()}
        windows = tuple(range(w.start // num_replicas, w.stop // num_replicas) for w in self.windows)
        counts = lambda: [part(self.counts()[0], each) for each in range(num_replicas)]  # noqa: E731
        targets, signatures = part(self.targets), part(self.signatures)
        return Microbatches(inputs, targets, counts, self.adds_up, signatures, self.digest, windows, replica)


def num_for(
    inputs: Uncut, targets: Any, schedule: Schedule, num_replicas: int, trains: bool, why_never_fewer: str | None
) -> int:
    """The microbatches of each replica, fewer than the schedule's for a small batch.

    Args:
        why_never_fewer: why a step can't run fewer; None if it can.

    Raises:
        RuntimeFailure: a small batch of which no fewer microbatches can be made.
    """
    most, num = inputs.most, schedule.num_microbatches
    if not 0 < most < num * num_replicas:
        return num
    fits = targets is None or (isinstance(targets, list) and len(targets) == most)
    if trains and inputs.is_listed and not fits:
        return num  # a list of another length is rather a mistake than a small batch
    why = f"{num_replicas} replicas need a sample each" if most < num_replicas else why_never_fewer
    if why is not None:
        raise RuntimeFailure(
            f"a batch of {most} samples can't be cut into {num * num_replicas} microbatches, nor into fewer: {why}; "
            f"give at least {num * num_replicas} samples, leave the batch out (DataLoader(drop_last=True)), or build "
            "a schedule with fewer microbatches"
        )
    return most // num_replicas


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
    rules: BatchRules = PLAIN,
) -> Microbatches:
    """A batch, cut for the stages that it goes into and for the one with the loss; see `cut_batch`.

    Args:
        num: microbatches; the schedule's where not given.
        replica, num_replicas: the batch is cut for so many pipelines, and this one's part returned.
        digested: whether other processes are to have the same batch.
        rules: how each tensor is cut.
    """
    graph, num = schedule.graph, num or schedule.num_microbatches
    starts = {stage: graph.microbatches_of(stage, num) * num_replicas for stage in starts_of(graph)}
    count = graph.microbatches_of(loss_stage(graph), num) * num_replicas
    counts = [each * num_replicas for each in graph.num_microbatches]
    windows = [range(w.start * num_replicas, w.stop * num_replicas) for w in windows]
    whole = cut_batch(inputs, targets, count, loss_fn, windows, starts, counts, digested, rules)
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
    rules: BatchRules = PLAIN,
) -> Microbatches:
    """Cuts inputs and targets and weighs the microbatches.

    Args:
        inputs: by stage, where the batch goes into several.
        num_microbatches: of the stage with the loss.
        windows: the microbatches that each update gathers; all of them in one where not given.
        starts: of the stages that the batch goes into the number of microbatches; stage 0 where not given.
        counts: of all stages, where they differ.
        rules: how each tensor is cut.

    Raises:
        RuntimeFailure: inputs that cannot be cut, or not for all stages at the same samples, or not given for just
            these stages; targets for other samples than the inputs'.
    """
    windows = tuple(windows) or (range(num_microbatches),)
    starts = starts or {0: num_microbatches}
    sources = _sources(inputs, list(starts), rules)
    cut = {stage: source.cut(starts[stage]) for stage, source in sources.items()}
    if len(sources) > 1 or counts:
        _require_alike(sources, counts)
    (first, source), *_ = sources.items()
    cut_inputs = cut[first] if starts[first] == num_microbatches else source.cut(num_microbatches)
    weighed_by = cut_inputs
    cut_targets: Sequence[Any] = [None] * num_microbatches
    values = [each.value for each in sources.values()]
    if targets is not None:
        target = uncut(targets, "targets", rules.targets)
        values.append(target.value)
        cut_targets = by_target = target.cut(num_microbatches)
        _require_matching(cut_inputs, by_target)
        if cut_inputs.sizes is None and not cut_inputs.is_listed and by_target.sizes is not None:
            weighed_by = by_target
    elif counts_targets(loss_fn):
        raise RuntimeFailure(
            "loss_fn.weight(targets) counts what the loss is a mean over, and no targets were given; call "
            "step(inputs, targets), also if the model computes the loss and loss_fn(output, targets) ignores them"
        )
    digest = batch_digest(*values) if digested else 0
    counted = cache(lambda: [counts_of(weighed_by, cut_targets, loss_fn)])
    signatures = _signatures(list(cut.values()))
    batch = Microbatches(cut, cut_targets, counted, adds_up(loss_fn), signatures, digest, windows)
    if not digested or len(windows) > 1:
        _ = batch.scales  # before the step, on every rank: some window may weigh nothing
    return batch


def _sources(inputs: Any, starts: Sequence[int], rules: BatchRules) -> dict[int, Uncut]:
    """By stage, what goes into each of the stages that no other feeds."""
    if len(starts) == 1:
        return {starts[0]: uncut(inputs, "inputs", rules.inputs)}
    if not isinstance(inputs, Mapping) or set(inputs) != set(starts):
        got = f"entries {', '.join(map(repr, inputs))}" if isinstance(inputs, Mapping) else type(inputs).__name__
        raise RuntimeFailure(
            f"the batch goes into stages {_listed(starts)}; give the inputs as a dict with one entry for "
            f"each, {{{starts[0]}: ..., {starts[1]}: ...}}, not {got}"
        )
    return {stage: uncut(inputs[stage], "inputs", rules_at(rules.inputs, stage), (stage,)) for stage in starts}


def _signatures(cut: Sequence[Sequence[Any]]) -> list[Signature]:
    leaves = [[flatten(value)[0] for value in values] for values in cut]
    return [
        tuple((tuple(t.shape), t.dtype) for each in leaves if m < len(each) for t in each[m])
        for m in range(max(map(len, leaves)))
    ]


def _require_matching(cut_inputs: Cut, cut_targets: Cut) -> None:
    """Raises RuntimeFailure where samples have no target, or targets no sample. Where both are lists, or a function
    cut either, that is up to their user.
    """
    both = cut_inputs, cut_targets
    if any(cut.sizes is None and not cut.is_listed for cut in both) or all(cut.is_listed for cut in both):
        return
    sizes, sizes_of_targets = map(_sizes, both)
    if cut_targets.sizes is not None:
        num_targets, num = int(sum(cut_targets.sizes)), sum(max(size, default=0) for size in sizes)
        if num_targets != num:
            raise RuntimeFailure(
                f"the targets have {num_targets} samples and the inputs {num}; give as many, lists with one entry "
                "of each per microbatch, or the rules by which each is cut: batch=ps.BatchRules(inputs=, targets=)"
            )
    for m, (size, target) in enumerate(zip(sizes, sizes_of_targets, strict=True)):
        if other := sorted(target - size):
            raise RuntimeFailure(
                f"microbatch {m} has {max(size, default=0)} samples and {other[0]} targets; cut both at the same "
                "samples, or give tensors, which are"
            )


def _sizes(cut: Cut) -> list[set[int]]:
    """By microbatch, its samples; of what was cut already the extents of tensors in dimension 0."""
    if cut.sizes is not None:
        return [{int(size)} for size in cut.sizes]
    return [{leaf.shape[0] for leaf in flatten(value)[0] if leaf.dim()} for value in cut]


def _require_alike(sources: Mapping[int, Uncut], counts: Sequence[int]) -> None:
    """Raises RuntimeFailure where stages would cut the batch at different samples, and join what does not match."""
    sizes = {stage: source.num_samples for stage, source in sources.items()}
    known = {size for size in sizes.values() if size is not None}
    if len(known) > 1 or (len(set(counts)) > 1 and len(known) < len(set(sizes.values()))):
        given = ", ".join("unknown (cut already)" if size is None else str(size) for size in sizes.values())
        raise RuntimeFailure(
            f"the inputs of stages {_listed(sizes)} have {given} samples; give all the same number, as tensors, "
            "which are cut for every stage"
        )
    least = lcm(*counts)
    for size in known:
        if size % least and len(set(counts)) > 1:
            raise RuntimeFailure(
                f"a batch of {size} samples, and stages that work on {_listed(sorted(set(counts)))} microbatches; "
                f"give a multiple of {least} samples, so that every stage cuts it at the same places"
            )


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


Facts = dict[str, Any]
"""What a process says of what it was given."""
IN_PLACE = (
    ". If the first stage changes its inputs in place, as nn.ReLU(inplace=True) does, give each step tensors of its "
    "own: x.clone()"
)
"""What an error adds where processes were given different batches."""
BY_SAMPLES, BY_LIST, BY_FUNCTIONS = "samples", "list", "functions"
"""How a process's batch was cut."""


class ReplicaBatches:
    """Cuts batches of this process's replica.

    Args:
        gather: gives every process of the mesh what all of them say.

    Raises:
        RuntimeFailure: a schedule whose batch goes into several stages.
    """

    def __init__(self, schedule: Schedule, mesh: ProcessMesh, gather: Callable[[Facts], list[Facts]]) -> None:
        starts = starts_of(schedule.graph)
        if len(starts) > 1 or len(set(schedule.graph.num_microbatches)) > 1:
            raise RuntimeFailure(
                f'batches="replica" is for schedules whose batch goes into one stage, and that of {schedule.name} '
                'goes into several or is cut for each stage anew; give every process the whole batch, batches="whole"'
            )
        self._start, self._mesh, self._gather = starts[0], mesh, gather
        here, pipelines = set(mesh.pipeline.here), schedule.placement.pipelines
        shared = dict(schedule.placement.shared)
        takes = {"inputs": self._start, "targets": loss_stage(schedule.graph)}
        self._needs = [
            name
            for name, stage in takes.items()
            if here & {*(ranks[stage] for ranks in pipelines), *shared.get(stage, ())}
        ]

    def cut(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        windows: Sequence[range],
        num: int,
        fewer: bool,
        rules: Callable[[], BatchRules],
    ) -> Microbatches:
        """This replica's microbatches. Every process of the mesh must call it.

        Args:
            num: microbatches of a replica. fewer: whether a small batch may be cut into fewer. Then all replicas
                cut theirs into as few.
            rules: returns how each tensor is cut, or raises why that can't be.

        Raises:
            RuntimeFailure: in every process, what is wrong in any of them.
        """
        given = {"inputs": inputs, "targets": targets}
        mine: Facts = {"process": self._mesh.everyone.here[0], "replica": self._mesh.replica, "needs": self._needs}
        parts: dict[str, Cut] = {}
        try:
            parts = _own_parts(given, num, fewer, rules())
            mine |= {name: _facts(given[name], part) for name, part in parts.items()}
            if "targets" in parts:
                mine["targets"]["weights"] = weights_of(parts["targets"], loss_fn)
        except Exception as error:
            mine["error"] = str(error) if isinstance(error, RuntimeFailure) else f"{type(error).__name__}: {error}"
        everyone = self._gather(mine)
        told = [facts[name] for facts in everyone for name in given if name in facts]
        nums = {len(each["sizes"]) for each in told if each["cut"] == BY_SAMPLES}
        if fewer and len(nums) > 1:  # the batch of a replica is small, and all run as few microbatches
            return self.cut(inputs, targets, loss_fn, windows, min(nums), fewer, rules)
        count = _required_count(everyone, loss_fn)
        counts, signatures = zip(*(_of_replica(everyone, r) for r in range(self._mesh.num_replicas)), strict=True)
        windows, nothing, replica = tuple(windows) or (range(count),), [None] * count, self._mesh.replica
        into, targets = {self._start: parts.get("inputs", nothing)}, parts.get("targets", nothing)
        cut = Microbatches(into, targets, lambda: counts, adds_up(loss_fn), signatures[replica], 0, windows, replica)
        _ = cut.scales  # before the step, on every rank: some window may weigh nothing
        return cut


def _own_parts(given: Mapping[str, Any], num: int, fewer: bool, rules: BatchRules) -> dict[str, Cut]:
    """What this process was given, cut."""
    read = {name: uncut(value, name, getattr(rules, name)) for name, value in given.items() if value is not None}
    if fewer and read:
        num = min(num, next(iter(read.values())).most or num)
    parts = {name: each.cut(num) for name, each in read.items()}
    if len(parts) == 2:
        _require_matching(parts["inputs"], parts["targets"])
    return parts


def _facts(value: Any, cut: Cut) -> Facts:
    by = BY_SAMPLES if cut.sizes is not None else BY_LIST if cut.is_listed else BY_FUNCTIONS
    return {"digest": batch_digest(value), "signatures": _signatures([cut]), "sizes": sizes_of(cut), "cut": by}


def _required_count(everyone: Sequence[Facts], loss_fn: LossFn) -> int:
    """The microbatches of each replica.

    Raises:
        RuntimeFailure: what a process found wrong, or that it lacks some, or that replicas have different numbers.
    """
    for facts in everyone:
        if "error" in facts:
            raise RuntimeFailure(f"process {facts['process']}: {facts['error']}")
    with_targets = counts_targets(loss_fn) or (loss_fn is not None and any("targets" in facts for facts in everyone))
    counts: dict[int, int] = {}
    for facts in everyone:
        for name in facts["needs"]:
            if name not in facts and (name == "inputs" or with_targets):
                raise RuntimeFailure(
                    f"process {facts['process']} has the {'first' if name == 'inputs' else 'last'} stage of "
                    f"replica {facts['replica']} and was given no {name}; give it that replica's"
                )
        counts |= {len(facts[name]["sizes"]): facts["process"] for name in ("inputs", "targets") if name in facts}
    if len(counts) > 1:
        (few, one), (many, other) = sorted(counts.items())[:2]
        raise RuntimeFailure(
            f"process {one} cut its batch into {few} microbatches and process {other} into {many}; give every "
            "replica a batch of as many"
        )
    return next(iter(counts))


def _of_replica(everyone: Sequence[Facts], replica: int) -> tuple[list[float], list[Signature]]:
    """What one replica's microbatches weigh and look like. Raises RuntimeFailure where processes disagree."""
    found: dict[str, Facts] = {}
    for name in ("inputs", "targets"):
        given = [each for each in everyone if each["replica"] == replica and name in each]
        if len({each[name]["digest"] for each in given}) > 1:
            numbers = " and ".join(str(each["process"]) for each in given[:2])
            raise RuntimeFailure(
                f"processes {numbers} of replica {replica} were given different {name}; give the same{IN_PLACE}"
            )
        if given:
            found[name] = given[0][name]
    inputs, targets = found["inputs"], found.get("targets", found["inputs"])
    by = {inputs["cut"], targets["cut"]}
    if BY_FUNCTIONS not in by and by != {BY_LIST} and inputs["sizes"] != targets["sizes"]:
        sizes, others = (", ".join(f"{size:g}" for size in each["sizes"]) for each in (inputs, targets))
        raise RuntimeFailure(
            f"replica {replica} was given microbatches of {sizes} samples and of {others} targets; give as many of "
            "both"
        )
    sizes = targets["sizes"] if inputs["cut"] == BY_FUNCTIONS != targets["cut"] else inputs["sizes"]
    weights = targets.get("weights")
    return (sizes if weights is None else weights), inputs["signatures"]
