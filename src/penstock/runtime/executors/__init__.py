"""What drives workers: all in one process, or one process a rank."""
