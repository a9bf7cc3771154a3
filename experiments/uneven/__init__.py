"""Microbatches of unequal length."""

from pathlib import Path

RESULTS = Path(__file__).with_name("results")
"""Where its cells lie."""
