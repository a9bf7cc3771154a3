"""The loop around a pipeline that trains a GPT: settings, progress, metrics, checkpoints, the end report."""
