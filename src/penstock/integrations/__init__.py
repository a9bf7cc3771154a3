"""Penstock inside other trainers: `penstock.integrations.transformers` has a Trainer that runs a pipeline.

Nothing here is imported until it is asked for by its name, as each needs a package of its own.
"""
