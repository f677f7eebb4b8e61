"""What the Snakefile needs of the package.

The Slurm executor and the patches of Snakemake.
"""
