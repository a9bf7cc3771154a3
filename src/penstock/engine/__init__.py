"""What plans, proves, simulates and runs schedules, over arrays alone: it knows no op, stage, tensor or clock."""
