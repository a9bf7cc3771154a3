"""Periodic schedules: one steady state, planned once and repeated, with its warm-up and cool-down."""
