"""Moves a running pipeline to other nodes of its mesh, without a restart and without a disk.

    placed = Placed(make, ps.Mesh(pp=4, dp=2))                          make(device_mesh) -> ps.Pipeline
    placed.pipe.step(inputs, targets)
    placed.move(ps.Mesh(pp=4, dp=2, nodes=(0, 2, 1, 3, 4, 5, 6, 7)))    nodes 1 and 2 have changed places
    placed.pipe.step(inputs, targets)                                   with the loss it would have had

    for step, batch in enumerate(batches):
        placed.pipe.step(*batch)
        if step % 20 == 0:
            placed.watch(orchestrator)                                  measures links, and moves where that pays

A move makes the process groups anew. Processes that now run another rank fetch its state from one that held it. Then
training continues with the same losses, to the bit, because a replica's place decides which microbatches it runs, and
not its process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.control import Reranking
from penstock.control.orchestrator import Orchestrator
from penstock.cost import Mesh
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.probe import ProbePace, probe
from penstock.runtime.mesh.process_mesh import Nodes, device_mesh, end_groups, why_sorted
from penstock.runtime.pipeline import Pipeline

Make = Callable[[Any], Pipeline]
"""A function that builds the pipeline over a device mesh with dimensions pp, dp and tp."""


class Placed:
    """A pipeline that can move between the nodes of a mesh. Every process makes the same calls.

    Args:
        make: a function that builds the pipeline. It is called again for each move, and must build new stages each
            time; the state is then copied into them.
        mesh: the sizes of the mesh, and the node at each place.
        device_type: "cpu" or "cuda".

    Attributes:
        pipe: the pipeline. Each move makes a new one, with a new optimizer.
        mesh: where its nodes are.
        received: bytes of state that this process fetched in the last move.

    Raises:
        RuntimeFailure: torch.distributed has another number of processes. Also whatever `make` raises.

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
        """Moves the pipeline to where `then` places the nodes. Call it between two steps.

        Gradients that wait for an update move too.

        Args:
            then: a mesh of the same sizes.
            make: the function that builds the pipeline from now on, perhaps with another schedule. Default: the one
                before.

        Returns:
            The new pipeline. The old one is closed.

        Raises:
            RuntimeFailure: a mesh of other sizes, a pipeline of another model, connections that broke and now use
                another interface, or a torch that can't make groups in the order that `then` needs. Nothing has
                changed then.
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
        """Raises RuntimeFailure, in every process, if any process built the pipeline from stages of the old one."""
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
        """Measures all links, and does what the orchestrator decides. Call it between two steps, once in a while.

        It takes a few round trips to each other node.

        Args:
            orchestrator: this process's own. All processes make theirs in the same way, and its job starts with what
                `make` runs.
            timeout: the longest time that any wait may last (seconds).
            pace: this process's own, made in the same way on all. `pace.after_step()` then says after which step to
                call this again.

        Returns:
            What was done. None if nothing was.

        Raises:
            RuntimeFailure: torch can't make groups in any order, so nodes can't move. The first call raises it.
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
