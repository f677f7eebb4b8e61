"""Partition schemes: one rule a file, each deals every sample to exactly one client."""
