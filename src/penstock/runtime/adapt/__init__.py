"""The closed loop: what every rank measures goes to one place, what is decided there runs everywhere, or nowhere.

rank: report ------> store -----> rank 0: coordinator --> its controller's process (`penstock.control`)
  ^                                                                     |
  +--- vote: the step's own collective <--- plans <---- store <---------+

agent         each process's part                   report   what a rank measured, put together
coordinator   rank 0's part, the controller's process beside the training, and what is kept of the run
vote          all run a new plan, or none           options  what the user says
store         queues of bytes between ranks: which store, by whose clock, retries, and how long it was silent
"""

from penstock.runtime.adapt.agent import Agent, NodeProbes, PreparedPlan, start_agent
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.report import MeasuredStep
from penstock.runtime.adapt.vote import Vote

__all__ = ["Agent", "MeasuredStep", "NodeProbes", "PreparedPlan", "Vote", "AdaptOptions", "start_agent"]
