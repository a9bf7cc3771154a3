"""Plans, proves, draws and runs pipeline-parallel training schedules for PyTorch.

    import penstock as ps

    s = ps.build("1f1b", num_ranks=4, num_microbatches=12)
    ps.check(s)
    print(ps.simulate(s, ps.Costs.uniform(num_stages=4, f=10, i=10, w=10)).makespan)

`ps.Pipeline` runs a schedule; it, `DelegateOptions`, `device_mesh`, `EmulatedMesh`, `EmulatedPipeline`, `emulate`,
`OpCall`, `Placed`, `split`, `Split`, `Steering` and `StepResult` import torch, when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cost import CostError, Costs, Links, Mesh, Ring, Uneven, costs_preset
from penstock.formats import load, save
from penstock.library import SCHEDULES, build
from penstock.passes import repeat_windows
from penstock.planning import Expected, Plan, order_microbatches, plan
from penstock.program import (
    Branch,
    NewOp,
    Program,
    Rules,
    Step,
    Stepper,
    View,
    breadth_first,
    by_microbatch,
    depth_first,
    earliest_first,
    placements,
)
from penstock.renamed import missing
from penstock.schedule import (
    MicrobatchOrder,
    Needs,
    Op,
    Placement,
    Registered,
    Schedule,
    ScheduleError,
    StageGraph,
    Updates,
    check,
    count_mismatch,
    count_versions,
    declare_order,
    parse,
    with_updates,
)
from penstock.simulation import (
    Blocking,
    Decoupled,
    Footprint,
    MeshTimeline,
    Timeline,
    footprint,
    simulate,
    simulate_mesh,
)

if TYPE_CHECKING:
    from penstock.runtime import (
        DelegateOptions,
        EmulatedMesh,
        EmulatedPipeline,
        OpCall,
        Pipeline,
        Placed,
        Steering,
        StepResult,
        device_mesh,
        emulate,
    )
    from penstock.runtime.stage.partitioning import Split, split

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Blocking",
    "Branch",
    "CostError",
    "Costs",
    "Expected",
    "Decoupled",
    "DelegateOptions",
    "EmulatedMesh",
    "EmulatedPipeline",
    "Footprint",
    "Links",
    "Mesh",
    "MeshTimeline",
    "MicrobatchOrder",
    "Needs",
    "NewOp",
    "Op",
    "OpCall",
    "Pipeline",
    "Placed",
    "Placement",
    "Plan",
    "Program",
    "Registered",
    "Ring",
    "Rules",
    "Schedule",
    "ScheduleError",
    "Split",
    "StageGraph",
    "Steering",
    "Step",
    "StepResult",
    "Stepper",
    "Timeline",
    "Uneven",
    "Updates",
    "View",
    "breadth_first",
    "build",
    "by_microbatch",
    "check",
    "costs_preset",
    "count_mismatch",
    "count_versions",
    "declare_order",
    "depth_first",
    "device_mesh",
    "earliest_first",
    "emulate",
    "footprint",
    "load",
    "order_microbatches",
    "parse",
    "placements",
    "plan",
    "repeat_windows",
    "save",
    "simulate",
    "simulate_mesh",
    "split",
    "with_updates",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # all that is not imported above is the runtime's
        if name in ("Split", "split"):  # `runtime.split` is the split backward
            import penstock.runtime.stage.partitioning

            return getattr(penstock.runtime.stage.partitioning, name)
        import penstock.runtime

        return getattr(penstock.runtime, name)
    raise missing(name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
