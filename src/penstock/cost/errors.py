"""`CostError`, which is raised for costs and for links."""

from __future__ import annotations


class CostError(ValueError):
    """Costs or links are invalid: negative, not a number, or of the wrong length.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.Costs.uniform(4, f=-1)
        ... except ps.CostError as error:
        ...     print(error)
        f of stage 0 is -1.0: give a number of at least 0
    """
