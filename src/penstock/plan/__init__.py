"""The best schedule: lower bounds, warm-up planning, search, exact solving, tuning."""

from penstock.plan.flushed import Flushed, flushed_schedules
from penstock.plan.objective import Expected
from penstock.plan.plan import Certificate, Plan, plan
from penstock.plan.progress import Progress
from penstock.plan.slow_links import slow_link_schedule
from penstock.plan.space import Found, Outcome, search_space
from penstock.plan.warmup import adapted_warmups, initial_warmups, needed_slack, tolerance, tolerances

__all__ = [
    "Certificate",
    "Expected",
    "Flushed",
    "Found",
    "Outcome",
    "Plan",
    "Progress",
    "adapted_warmups",
    "flushed_schedules",
    "initial_warmups",
    "needed_slack",
    "plan",
    "search_space",
    "slow_link_schedule",
    "tolerance",
    "tolerances",
]
