"""Results after training: load, trace, verify, compare and prune them."""
