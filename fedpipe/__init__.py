"""Federated-learning experiments as one declarative DAG of cached stages, on Snakemake and DVC."""

__version__ = "0.1.0"
