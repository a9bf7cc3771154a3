"""AMDP's tables and figures."""

from pathlib import Path

RESULTS = Path(__file__).with_name("results")
"""Where its raw results lie."""
