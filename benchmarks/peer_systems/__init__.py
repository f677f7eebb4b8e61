"""The systems of benchmarks/peers.py, one module each, which run in their own processes."""
