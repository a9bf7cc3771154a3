"""`ControlError`, the one error of `penstock.control`."""


class ControlError(ValueError):
    """Measurements, settings or logs that make no sense; says what was given, the rule and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.control.Transfers((0, 0), (100,), (1.0,))
        ... except ps.control.ControlError as error:
        ...     print(error)
        link (0, 0): name it by its two ranks, like (0, 1)
    """
