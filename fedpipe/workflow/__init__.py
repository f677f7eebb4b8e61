"""What the Snakefile needs of the package: the patches of Snakemake.

The executor `fedpipe-slurm` and the logger `fedpipe` are packages of their own, since Snakemake finds plugins by name.
"""
