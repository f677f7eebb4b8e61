"""Analyses of stored states: norms of heads, features, loss surfaces, gradients and step traces."""
