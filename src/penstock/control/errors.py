"""`ControlError`, the one error of `penstock.control`."""


class ControlError(ValueError):
    """Measurements, settings or logs that make no sense; says what was given, the rule and what to do."""
