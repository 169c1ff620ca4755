#!/usr/bin/env bash
#SBATCH --job-name=wedlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
# Trains on a Slurm cluster with GPUs: one process for each GPU.
#
#   sbatch --nodes=4 launch/slurm.sh --exp qwen3_8b_sft --workdir /shared/run data.path=/shared/chat.jsonl
#   launch/slurm.sh --dry-run --exp ...    shows the command
#
# The lines above are the defaults; what sbatch is given on its command line wins. jax reads Slurm's variables, and each task
# takes the GPU of its local number. Slurm requeues a preempted job; a job that ended because a process died is requeued here.
set -euo pipefail

run=()
if [[ "${1:-}" == --dry-run ]]; then
  run=(echo)
  shift
fi
if (($# == 0)); then
  echo "usage: [sbatch] launch/slurm.sh [--dry-run] TRAIN_FLAGS..." >&2
  exit 2
fi

status=0
"${run[@]}" srun --kill-on-bad-exit=1 python3 -m wedlm_jax.train "$@" || status=$?
# 2 is bad input, which a second try does not mend.
if ((status != 0 && status != 2)) && [[ -n "${SLURM_JOB_ID:-}" && "${SLURM_RESTART_COUNT:-0}" -lt "${WEDLM_RESTARTS:-10}" ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
