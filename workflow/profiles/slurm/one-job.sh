#!/bin/bash
# Many small runs in parallel in one Slurm job, on one GPU:  sbatch slurm/one-job.sh
# The jobs of the array run one after another. Each resumes after the time limit of the previous one, and the last ones may
# have nothing to do. Type this in the clone's folder, with the environment active. docs/cluster.md explains when to use it.
# Change the options here, or give them to `sbatch`: `sbatch --time=600 slurm/one-job.sh --params studies/other.yaml`.
#SBATCH --partition=gpu
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=240
#SBATCH --array=1-9%1
#SBATCH --output=results/one-job-%A_%a.log
# SIGTERM two minutes before the time limit. Every run ends after its round.
#SBATCH --signal=TERM@120

# `gpu` is the number of runs that train at the same time, each on one core.
exec srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
	fedpipe run --profile workflow/profiles/gpu --cores "$SLURM_CPUS_PER_TASK" --resources gpu=8 \
	--quiet rules host "$@"
