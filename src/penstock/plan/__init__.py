"""The best schedule: lower bounds, warm-up planning, search, exact solving, tuning."""

from penstock.plan.warmup import adapted_warmups, initial_warmups, needed_slack, tolerance, tolerances

__all__ = ["adapted_warmups", "initial_warmups", "needed_slack", "tolerance", "tolerances"]
