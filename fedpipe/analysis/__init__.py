"""Loads, traces, verifies, compares and prunes results."""
