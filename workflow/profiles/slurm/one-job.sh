#!/bin/bash
# Runs many small runs in one Slurm job, in parallel on its GPU:  sbatch slurm/one-job.sh
# The array's jobs run one after another. Each resumes where the time limit ended the previous one, and the last ones
# have nothing to do. Type the command in the study's folder, with the environment active. docs/cluster.md explains when
# this is better than one job per run. Edit this file as you like, or give options: `sbatch --time=600 slurm/one-job.sh
# --params studies/other.yaml`.
#SBATCH --partition=gpu
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=240
#SBATCH --array=1-9%1
#SBATCH --output=results/one-job-%A_%a.log
# SIGTERM two minutes before the time limit: each run ends after its current round.
#SBATCH --signal=TERM@120

# `gpu` is the number of runs at once. Each uses one core.
exec srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
	fedpipe run --profile workflow/profiles/gpu --cores "$SLURM_CPUS_PER_TASK" --resources gpu=8 \
	--quiet rules host "$@"
