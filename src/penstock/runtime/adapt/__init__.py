"""Adapts a run while it trains: all measurements go to one place, and its decisions run on every rank or on none.

rank: report ------> store -----> rank 0: coordinator --> its controller's process (`penstock.control`)
  ^                                                                     |
  +--- vote: the step's own collective <--- plans <---- store <---------+

agent         each process's part, and the vote by which all run a new plan, or none does
report        what a rank measured in an iteration
coordinator   rank 0's part: the controller's process beside the training, and the records of the run
options       the user's options
store         queues of bytes between ranks: which store, by whose clock, retries, and how long it was silent
"""

from penstock.runtime.adapt.agent import Agent, PreparedPlan, Vote, start_agent
from penstock.runtime.adapt.coordinator import RunSetting
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.report import MeasuredStep

__all__ = ["AdaptOptions", "Agent", "MeasuredStep", "PreparedPlan", "RunSetting", "Vote", "start_agent"]
