"""What a step trains on, from lengths alone: sequences -> bins -> replicas -> order.

lengths   900 40 300 80 500 120 ...
packing   [900] [500 40] [300 120 80] ...        bins of whole sequences: microbatches
replicas  each with as many bins, the busiest hardly busier than the mean
order     short at both ends, or what else is fastest by simulation
"""

from penstock.planning.batches.assignment import assign_evenly
from penstock.planning.batches.batch_plan import BatchPlan, Lengths, plan_batch
from penstock.planning.batches.packing import PackingError, pack_in_turn, pack_to_shares

__all__ = ["BatchPlan", "Lengths", "PackingError", "assign_evenly", "pack_in_turn", "pack_to_shares", "plan_batch"]
