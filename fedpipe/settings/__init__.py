"""The sections of params.yaml, one a module: their keys, defaults and checks."""
