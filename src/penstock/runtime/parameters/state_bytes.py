"""What a rank holds between two ops besides activations, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.mesh.peers import Peers
from penstock.runtime.parameters.pipeline_copies import Copies
from penstock.runtime.parameters.updating import Updating
from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.dtensor import local
from penstock.schedule.updates import OWNER


def bytes_of(
    copies: Copies, updating: Updating | None, optimizer: Optimizer | None, rank: int, zero: bool
) -> dict[str, int]:
    """Bytes of a rank's parameters, older versions, gradients and optimizer state.

    Versions and gradients are the most that were held in the last step; of a schedule whose updates are no ops there
    is one version, and a gradient as large as each parameter that wants one.

    Args:
        zero: only the owner's copy of a stage has the optimizer's state.
    """
    mine = copies.of_rank(rank)
    stages = [copies.here[key] for key in mine]
    parameters = [p for stage in stages for p in stage.parameters()]
    if updating is None:
        stepped: list[Tensor] = [p for k, i in mine if k == OWNER or not zero for p in copies.here[k, i].parameters()]
        versions, gradients = 0, _size(p for p in parameters if p.requires_grad)
    else:
        held = [updating.weights[key] for key in mine]
        stepped = [*updating.replicas.owned(master for weights in held for master in weights.masters.values())]
        counted = [weights.bytes() for weights in held]
        versions = sum(each["versions"] for each in counted)
        gradients = sum(each["gradients"] for each in counted)
    state = {} if optimizer is None else optimizer.state
    kept = [
        value for one in dict.fromkeys(stepped) for value in state.get(one, {}).values() if isinstance(value, Tensor)
    ]
    return {
        "parameters": _size(parameters),
        "versions": versions,
        "gradients": gradients,
        "optimizer": _size(kept),
    }


def gradient_bytes(stages: Mapping[int, Stage], peers: Peers, num_stages: int) -> tuple[float, ...]:
    """What the gradients of each stage weigh, of a pipeline's ranks. Every rank must call it.

    Args:
        stages: those here, as this process holds them.
    """
    mine = {index: _size(p for p in stage.parameters() if p.requires_grad) for index, stage in stages.items()}
    found = {index: size for part in peers.gather(mine) for index, size in part.items()}
    return tuple(float(found.get(stage, 0)) for stage in range(num_stages))


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes, a tensor that is there twice counted once."""
    return sum(local(t).numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
