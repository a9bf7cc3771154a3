"""Translates the engine's plain functions to C, which the package runs, and to JavaScript, for the playground."""
