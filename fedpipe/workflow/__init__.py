"""Code that the Snakefile uses.

`dag` has the functions that rules call. `snakemake_patches` has all uses of private parts of Snakemake. The plugins for
Slurm and for records of jobs are next to `fedpipe`.
"""
