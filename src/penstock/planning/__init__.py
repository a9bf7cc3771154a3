"""The best schedule: lower bounds, warm-up planning, search, exact solving, tuning."""

from penstock.planning.batches import BatchPlan, PackingError, assign_evenly, plan_batch
from penstock.planning.branch_search import BranchLayout, FoundLayout, rank_branches, search_branches
from penstock.planning.microbatch_order import OrderedMicrobatches, order_microbatches
from penstock.planning.planner import plan
from penstock.planning.programs import Found, Outcome, search_space
from penstock.planning.result import Certificate, Plan, Progress
from penstock.planning.warmup import (
    adapted_warmups,
    initial_warmups,
    needed_slack,
    slow_link_schedule,
    tolerance,
    tolerances,
)

__all__ = [
    "BatchPlan", "BranchLayout", "Certificate", "Found", "FoundLayout", "OrderedMicrobatches", "Outcome",
    "PackingError", "Plan", "Progress", "adapted_warmups", "assign_evenly", "initial_warmups", "needed_slack",
    "order_microbatches", "plan", "plan_batch", "rank_branches", "search_branches", "search_space",
    "slow_link_schedule", "tolerance", "tolerances",
]  # fmt: skip
