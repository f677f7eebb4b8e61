"""Partition schemes: one rule a file, found by its name."""
