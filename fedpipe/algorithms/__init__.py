"""Federated algorithms: one a file, found by its name; `base` holds the contract."""
