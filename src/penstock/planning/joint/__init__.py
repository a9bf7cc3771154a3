"""Orders and forms at once: which forwards run again, which backwards run whole, and when everything runs."""
