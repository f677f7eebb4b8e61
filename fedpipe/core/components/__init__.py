"""Components: the algorithms, models, data sets and partition schemes that params.yaml names.

``component`` has their base class, ``registry`` finds them by name, and ``code_digest`` computes the digests of their
code, which are part of the keys of runs.
"""
