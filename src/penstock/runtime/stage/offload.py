"""What runs OFFLOAD and RELOAD: the host memory of the stage, where nobody gives functions of their own for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.host_memory import HostCopy, SavedTensors
from penstock.runtime.stage.registered_ops import OpCall, OpFunction
from penstock.schedule import Schedule
from penstock.schedule.offload import OFFLOAD, RELOAD


def offloads(schedule: Schedule, given: Collection[str]) -> bool:
    """Whether the runtime moves activations for a schedule: it has both kinds of op, and its user runs neither.

    Raises:
        RuntimeFailure: one of the two without the other, or of a stage that several ranks share.
    """
    kinds = {each.kind for each in schedule.stage_graph.registered} if schedule.stage_graph else set()
    if not {OFFLOAD, RELOAD} <= kinds or {OFFLOAD, RELOAD} & set(given):
        return False
    cells = {
        kind: {(op.stage, op.microbatch) for row in schedule.order for op in row if op.kind == kind}
        for kind in (OFFLOAD, RELOAD)
    }
    shared = {stage for stage, _ in schedule.placement.shared}
    for stage, m in sorted(cells[OFFLOAD] | cells[RELOAD]):
        why = ""
        if (stage, m) not in cells[OFFLOAD] & cells[RELOAD]:
            why = f"has one of {OFFLOAD} and {RELOAD} alone"
        elif stage in shared:
            why = "belongs to a stage that several ranks share"
        if why:
            raise RuntimeFailure(
                f"{OFFLOAD} moves what a forward saved to host memory, and microbatch {m} of stage {stage} {why}; "
                "leave the two ops out there, or give functions of your own for both in ops="
            )
    return True


def functions_for(saved: Callable[[int, int], SavedTensors]) -> Mapping[str, OpFunction]:
    """What runs OFFLOAD and RELOAD.

    Args:
        saved: of a stage and microbatch what its forward saved.
    """

    def offload(call: OpCall) -> HostCopy | None:
        return saved(call.stage, call.index).offload()

    def reload(call: OpCall) -> HostCopy | None:
        return saved(call.stage, call.index).reload()

    return {OFFLOAD: offload, RELOAD: reload}
