"""Components that params.yaml names.

Their base class, how they are found, and the digests of their code, which are part of the keys of runs.
"""
