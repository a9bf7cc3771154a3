"""Benchmarks, each beside a peer measured in the same run."""
