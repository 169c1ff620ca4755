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
#   sbatch launch/slurm.sh --exp qwen3_8b_sft --workdir /shared/run data.path=/shared/chat.jsonl \
#     data.num_groups=32 train.micro_batches=2
#   launch/slurm.sh --dry-run --exp ...    shows the command
#
# The lines above are the defaults; what sbatch is given on its command line wins: the example runs on --nodes=1, 2 or 4. The number
# of processes must divide data.num_groups, and train.micro_batches times it the rows of a step. jax reads Slurm's variables, and
# each task takes the GPU of its local number. Slurm requeues a preempted job; a job that ended because a process
# died, or at its time limit, is requeued here, WEDLM_RESTARTS times (10).
set -euo pipefail

run=() # expanded below as bash 3.2, that of macOS, needs it: there an empty array is unbound
if [[ "${1:-}" == --dry-run ]]; then
  run=(echo)
  shift
fi
if (($# == 0)); then
  echo "usage: [sbatch] launch/slurm.sh [--dry-run] TRAIN_FLAGS..." >&2
  exit 2
fi

# A second try does not mend this, and its status would not tell it from a death.
if ((${#run[@]} == 0)) && ! tried=$(python3 -c 'import jax, wedlm_jax' 2>&1); then
  echo "error: python3 cannot import wedlm_jax (${tried##*$'\n'}); activate the environment in which it is installed" >&2
  exit 2
fi

# Since Slurm 22.05 srun does not take the CPUs of a task over from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}"

# jax takes three quarters of a GPU's memory by itself.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"

# A process that ends ends the others, and where it was bad input all have its status. With --kill-on-bad-exit=1 srun would end
# them before, and its own status be that of the signal.
status=0
${run[@]+"${run[@]}"} srun --kill-on-bad-exit=0 python3 -m wedlm_jax.train "$@" || status=$?
# 2 is bad input, which a second try does not mend.
if ((status != 0 && status != 2)) && [[ -n "${SLURM_JOB_ID:-}" && "${SLURM_RESTART_COUNT:-0}" -lt "${WEDLM_RESTARTS:-10}" ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
