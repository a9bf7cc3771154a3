"""A running pipeline moved to other nodes of its mesh, without a restart and without a disk.

    placed = Placed(make, ps.Mesh(pp=4, dp=2))                          make(device_mesh) -> ps.Pipeline
    placed.pipe.step(inputs, targets)
    placed.move(ps.Mesh(pp=4, dp=2, nodes=(0, 2, 1, 3, 4, 5, 6, 7)))    nodes 1 and 2 have changed places
    placed.pipe.step(inputs, targets)                                   with the loss it would have had

    for step, batch in enumerate(batches):
        placed.pipe.step(*batch)
        if step % 20 == 0:
            placed.watch(orchestrator)                                  measures links, and moves where that pays

Groups are made anew, processes that run another rank fetch its state from one that held it, and training goes on:
the same losses, to the bit, since a replica's place and not its process says which microbatches it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.control import Reranking
from penstock.control.orchestrator import Orchestrator
from penstock.cost import Mesh
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.nodes import Nodes, device_mesh, end_groups, why_sorted
from penstock.runtime.mesh.probe import ProbePace, probe
from penstock.runtime.pipeline import Pipeline

Make = Callable[[Any], Pipeline]
"""Builds the pipeline over a device mesh with dimensions pp, dp and tp."""


class Placed:
    """A pipeline on the nodes of a mesh. Every process makes the same calls.

    Args:
        make: builds the pipeline. It is called again for each move, and must build new stages each time; their
            contents are then replaced.
        mesh: sizes, and the node at each place.
        device_type: cpu or cuda.

    Attributes:
        pipe: to step; another one after each move, and so is its optimizer. mesh: where its nodes lie.
        received: bytes of state that this process fetched in the last move.

    Raises:
        RuntimeFailure: torch.distributed has another number of processes; what `make` raises.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> import torch.distributed as dist
        >>> def make(device_mesh):
        ...     stages, s = [torch.nn.Linear(8, 1)], ps.build("1f1b", num_ranks=1, num_microbatches=2)
        ...     optimizer = torch.optim.SGD
        ...     return ps.Pipeline(stages, s, loss_fn=torch.nn.MSELoss(), optimizer=optimizer, mesh=device_mesh)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> placed = ps.runtime.Placed(make, ps.Mesh(pp=1))
        >>> placed.pipe.step(torch.randn(4, 8), torch.randn(4, 1)).loss.shape
        torch.Size([])
        >>> placed.pipe.close()
        >>> dist.destroy_process_group()
    """

    def __init__(self, make: Make, mesh: Mesh, device_type: str = "cpu") -> None:
        self._make, self._device_type = make, device_type
        self.mesh, self.received = mesh, 0
        self._groups = device_mesh(mesh, device_type)
        self.pipe = make(self._groups)

    def move(self, then: Mesh, make: Make | None = None) -> Pipeline:
        """Goes on where `then` says. Between two steps; gradients that wait for an update move too.

        Args:
            make: builds the pipeline from now on, with another schedule perhaps; as before where not given.

        Returns:
            The new pipeline; the old one is closed.

        Raises:
            RuntimeFailure: a mesh of other sizes, a pipeline of another model, connections that have broken and go
                by another interface since, or a torch that can't make groups in the order that `then` needs. Nothing
                has changed then.
        """
        if (then.pp, then.dp, then.tp) != (self.mesh.pp, self.mesh.dp, self.mesh.tp):
            raise RuntimeFailure(
                f"from a mesh of {_sizes(self.mesh)} to one of {_sizes(then)}: nodes can change places, not sizes"
            )
        self.pipe._local.require_new_groups()
        make, groups = make or self._make, device_mesh(then, self._device_type)
        pipe = None
        try:
            pipe = make(groups)
            self._require_fresh(pipe)
            received = self.pipe.hand_over(pipe)
        except BaseException:  # the pipeline before goes on
            if pipe is not None:
                pipe.close()
            end_groups(groups)
            raise
        self.pipe.close()
        end_groups(self._groups)
        self.pipe, self.mesh, self.received, self._make, self._groups = pipe, then, received, make, groups
        return pipe

    def _require_fresh(self, pipe: Pipeline) -> None:
        """Raises RuntimeFailure, in every process, where one made a pipeline of the stages that are there already."""
        known = {id(parameter) for parameter in self.pipe.parameters()}
        (num_known,) = self.pipe.agree([sum(id(parameter) in known for parameter in pipe.parameters())])
        if num_known:
            raise RuntimeFailure(
                "the pipeline to move to has parameters of the one before: build fresh stages in `make`, into which "
                "state is then put"
            )

    def watch(
        self, orchestrator: Orchestrator, timeout: float = 60.0, pace: ProbePace | None = None
    ) -> Reranking | None:
        """Measures all links, and does what the orchestrator says of them. Between two steps, once in a while: it
        takes a few round trips for each other node.

        Args:
            orchestrator: each process has one of its own, made alike; its job starts with what `make` runs.
            timeout: seconds that any wait may last.
            pace: of each process, made alike; `pace.after_step()` then says after which step to call this again.

        Returns:
            What was done; None where nothing was.

        Raises:
            RuntimeFailure: in the first call, where torch can't make groups in any order: nodes couldn't move.
        """
        if (why := why_sorted()) is not None:
            raise RuntimeFailure(f"watching would move nodes, which can't lie in any order here: {why}")
        found = orchestrator.feed(probe(Nodes.of(self._groups).processes, timeout, pace))
        if found is None:
            return None
        runs = orchestrator.now
        if found.mesh != self.mesh:
            self.move(found.mesh)
            runs = orchestrator.job.start
        if found.configuration != runs:
            self.pipe.reconfigure(found.configuration)
        orchestrator.switched(found.mesh, found.configuration)
        return found


def _sizes(mesh: Mesh) -> str:
    return f"{mesh.pp} x {mesh.dp} x {mesh.tp}"
