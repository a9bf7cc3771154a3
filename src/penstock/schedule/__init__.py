"""What runs where and in which order: pure data, its text grid, its proof."""

from penstock.schedule.check import check
from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import Op, parse_op
from penstock.schedule.placement import Placement, circular, one_to_one, v_shape
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered, StageGraph
from penstock.schedule.text import parse, to_text
from penstock.schedule.untimed import needed_channel_depth, peak_in_flight

__all__ = [
    "Needs",
    "Op",
    "Placement",
    "Registered",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "check",
    "circular",
    "needed_channel_depth",
    "one_to_one",
    "parse",
    "parse_op",
    "peak_in_flight",
    "to_text",
    "v_shape",
]
