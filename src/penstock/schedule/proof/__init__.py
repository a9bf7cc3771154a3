"""Proves that a schedule's order is right: every op once, none before what it needs, an end, and no cap exceeded."""

from penstock.schedule.proof.rules import check

__all__ = ["check"]
