"""Batches of which each replica loads its own part. Only the ranks that need inputs or targets are given them.

    replica 0    rank 0: inputs    rank 1: nothing    rank 2: targets
    replica 1    rank 0: inputs    rank 1: nothing    rank 2: targets

Before a step all processes exchange what they were given: sizes, shapes, weights for the loss, and a digest. From
that each process knows which messages come and what each microbatch counts in the loss of the whole batch, or finds
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.stage.branches import end_of, starts_of
from penstock.runtime.stage.microbatches import (
    LossFn,
    Microbatches,
    Signature,
    adds_up,
    cut_batch,
    num_entries,
    shares_of,
    sizes_of,
    weights_of,
)
from penstock.runtime.tensors.digest import batch_digest
from penstock.runtime.tensors.pytree import DTYPES
from penstock.schedule import Schedule

Facts = dict[str, Any]
"""What a process says of what it was given."""


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

        def hosts(stage: int) -> bool:
            return bool(here & {*(ranks[stage] for ranks in pipelines), *shared.get(stage, ())})

        self._needs = {"inputs": hosts(self._start), "targets": hosts(end_of(schedule.graph))}

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
        try:
            batch = self._own(inputs, targets, num, fewer)
            mine |= self._facts(batch, inputs, targets, loss_fn)
        except Exception as error:
            mine["error"] = str(error) if isinstance(error, RuntimeFailure) else f"{type(error).__name__}: {error}"
        everyone = self._gather(mine)
        for told in everyone:
            if "error" in told:
                raise RuntimeFailure(f"process {told['process']}: {told['error']}")
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
        with_targets = any("targets" in told for told in everyone)
        for told in everyone:
            for name in told["needs"]:
                if name not in told and (name == "inputs" or (with_targets and scored)):
                    raise RuntimeFailure(
                        f"process {told['process']} has the {'first' if name == 'inputs' else 'last'} stage of "
                        f"replica {told['replica']} and was given no {name}; give it that replica's"
                    )
        counts = {told["num"]: told for told in everyone if "num" in told}
        if len(counts) > 1:
            (few, one), (many, other) = sorted(counts.items())[:2]
            raise RuntimeFailure(
                f"process {one['process']} cut its batch into {few} microbatches and process {other['process']} into "
                f"{many}; give every replica a batch of as many"
            )
        return int(next(iter(counts)))

    def _of_replica(self, everyone: Sequence[Facts], replica: int) -> Facts:
        """What one replica's microbatches weigh and look like. Raises RuntimeFailure where processes disagree."""
        told = [each for each in everyone if each["replica"] == replica]
        found: Facts = {}
        for name in ("inputs", "targets"):
            given = [each for each in told if name in each]
            if len({each[name]["digest"] for each in given}) > 1:
                numbers = " and ".join(str(each["process"]) for each in given[:2])
                raise RuntimeFailure(
                    f"processes {numbers} of replica {replica} were given different {name}; give the same"
                )
            if given:
                found[name] = given[0][name]
        inputs, targets = found["inputs"], found.get("targets")
        if targets is not None and not (inputs["cut"] and targets["cut"]) and inputs["sizes"] != targets["sizes"]:
            raise RuntimeFailure(
                f"replica {replica} was given microbatches of {_listed(inputs['sizes'])} samples and of "
                f"{_listed(targets['sizes'])} targets; give as many of both"
            )
        weights = None if targets is None else targets["weights"]
        return {"weights": inputs["sizes"] if weights is None else weights, "signatures": inputs["signatures"]}


def _listed(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size:g}" for size in sizes)
