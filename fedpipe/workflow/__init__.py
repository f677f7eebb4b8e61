"""What the Snakefile needs of the package.

The functions that rules call, the Slurm executor and the patches of Snakemake.
"""
