"""The closed loop: what every rank measures goes to one place, what is decided there runs everywhere, or nowhere.

rank: report ------> store -----> rank 0: coordinator --> controller_process (`penstock.control`)
  ^                                                                     |
  +--- vote: the step's own collective <--- plans <---- store <---------+

agent            each process's part                report                     what a rank measured, put together
coordinator      rank 0's part                      controller_process         the controller, beside the training
vote             all run a new plan, or none        rendezvous                 which store, and by whose clock
options          what the user says                 run_log                    what is kept of it, in a folder
node_probes      links between nodes of a mesh
store/           queues of bytes between ranks      store_client               retries, and how long it was silent
first_costs      costs read off the first iterations
"""

from penstock.runtime.adapt.agent import Agent, Readied, steer
from penstock.runtime.adapt.node_probes import NodeProbes
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.report import MeasuredStep
from penstock.runtime.adapt.vote import Offer

__all__ = ["Agent", "MeasuredStep", "NodeProbes", "Offer", "Readied", "AdaptOptions", "steer"]
