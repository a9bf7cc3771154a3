"""The closed loop: what every rank measures goes to one place, what is decided there runs everywhere, or nowhere.

rank: reports -----> store -----> rank 0: gathering --> decider (a process of its own, `penstock.control`)
  ^                                                                     |
  +--- offers: the step's own collective <--- plans <---- store <-------+
"""

from penstock.runtime.steering.helm import Helm, Readied
from penstock.runtime.steering.offer import Offer
from penstock.runtime.steering.options import Steering
from penstock.runtime.steering.report import Measured
from penstock.runtime.steering.start import steer

__all__ = ["Helm", "Measured", "Offer", "Readied", "Steering", "steer"]
