"""Samples and their owners: data sets, partition schemes, the assignment to clients, and stored tensors."""
