"""What papers claim, run again: a folder per paper, and what all of them share in `common`.

Every command is a module, run from the repository's root: `python -m experiments.pipemorph.figure15`.
"""
