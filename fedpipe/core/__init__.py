"""Code that all other packages use.

Errors, random streams, named tensors, YAML, callbacks, the files of results, and components found by name.
"""
