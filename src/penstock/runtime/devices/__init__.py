"""What runs ops: torch, or nothing at all."""
