"""The loop around a pipeline that trains a model: settings, progress, metrics, checkpoints, the end report."""
