"""Plans for stages that branch and join, and for stages that several ranks run together."""
