#!/bin/bash
# Many small runs in one Slurm job, side by side on its GPU:  sbatch slurm/one-job.sh
# The jobs of an array, one after another: each goes on where the time of the one before it ended, and the last ones have
# nothing to do. Typed in the clone's folder, with the environment active; docs/cluster.md says when this is better. Yours to
# change, as is what stands behind `sbatch`: `sbatch --time=600 slurm/one-job.sh --params studies/other.yaml`.
#SBATCH --partition=gpu
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=240
#SBATCH --array=1-9%1
#SBATCH --output=results/one-job-%A_%a.log
# SIGTERM two minutes before the time limit: every run ends after its round.
#SBATCH --signal=TERM@120

# As many runs at once as `gpu` says; each has one of the cores.
exec srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
	fedpipe run --profile workflow/profiles/gpu --cores "$SLURM_CPUS_PER_TASK" --resources gpu=8 \
	--quiet rules host "$@"
