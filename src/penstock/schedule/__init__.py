"""What runs where and in which order: pure data, its text grid, its proof."""

from penstock.schedule.errors import ScheduleError
from penstock.schedule.liveness import needed_channel_depth, peak_in_flight
from penstock.schedule.microbatch_order import MicrobatchOrder, declare_order, declare_shown_order
from penstock.schedule.op import Op, parse_op
from penstock.schedule.pairs import Pair
from penstock.schedule.placement import Placement, circular, one_to_one, v_shape
from penstock.schedule.proof import check
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered, StageGraph
from penstock.schedule.tentative import known_to, with_tentative_updates
from penstock.schedule.text import to_text
from penstock.schedule.text_parser import parse
from penstock.schedule.updates import (
    NEWEST,
    RULES,
    TENTATIVE,
    Updates,
    Windows,
    count_mismatch,
    require_no_updates,
    with_updates,
)
from penstock.schedule.weight_versions import count_versions

__all__ = [
    "NEWEST",
    "RULES",
    "TENTATIVE",
    "MicrobatchOrder",
    "Needs",
    "Op",
    "Pair",
    "Placement",
    "Registered",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "Updates",
    "Windows",
    "check",
    "circular",
    "count_mismatch",
    "count_versions",
    "declare_order",
    "declare_shown_order",
    "known_to",
    "needed_channel_depth",
    "one_to_one",
    "parse",
    "parse_op",
    "peak_in_flight",
    "require_no_updates",
    "to_text",
    "v_shape",
    "with_tentative_updates",
    "with_updates",
]
