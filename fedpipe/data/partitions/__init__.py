"""Partition schemes, one per file. The file's name is the name in params.yaml, with hyphens for underscores."""
