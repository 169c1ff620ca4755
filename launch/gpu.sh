#!/usr/bin/env bash
# Trains on one machine with several GPUs, or on several machines by hand, without a scheduler.
#
#   launch/gpu.sh [--dry-run] --exp sft model.path=DIR data.path=chat.jsonl mesh.data=-1
#   WEDLM_COORDINATOR=host0:12345 WEDLM_NUM_PROCESSES=2 WEDLM_PROCESS_ID=0 launch/gpu.sh ...    on host0
#   WEDLM_COORDINATOR=host0:12345 WEDLM_NUM_PROCESSES=2 WEDLM_PROCESS_ID=1 launch/gpu.sh ...    on host1
#
# One process drives all GPUs of its machine, so on one machine no variable is needed. It is started again, up to
# WEDLM_RESTARTS (10) times, unless it ends well or with bad input (status 2): the run goes on from its last checkpoint.
set -euo pipefail

dry=false
if [[ "${1:-}" == --dry-run ]]; then
  dry=true
  shift
fi
if (($# == 0)); then
  echo "usage: launch/gpu.sh [--dry-run] TRAIN_FLAGS..." >&2
  exit 2
fi
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
command=("${PYTHON:-python3}" -m wedlm_jax.train "$@")
if $dry; then
  echo "${command[@]}"
  exit
fi

for ((try = 0; ; try++)); do
  status=0
  "${command[@]}" || status=$?
  if ((status == 0 || status == 2 || status >= 128 || try >= ${WEDLM_RESTARTS:-10})); then
    exit "$status"
  fi
  echo "ended with status $status; starting again ($((try + 1)) of ${WEDLM_RESTARTS:-10})" >&2
  sleep "${WEDLM_RESTART_SECONDS:-10}"
done
