#!/usr/bin/env bash
# Trains on GKE with xpk: one workload, restarted by Kubernetes where a worker dies or is preempted.
#
#   launch/gke.sh [--dry-run] WORKLOAD CLUSTER ZONE TPU_TYPE IMAGE -- --exp qwen3_8b_cpt --workdir /mnt/bucket/run \
#     data.source=text data.mixture= data.path=/mnt/bucket/corpus
#
# CLUSTER is an xpk cluster (xpk cluster create ...), TPU_TYPE such as v5p-128 (this counts cores: 64 chips) or v6e-256, IMAGE
# a container image in which `pip install '.[tpu]'` was run in a clone of this repository. GKE sets the variables by which the
# workers find each other; WEDLM_RESTARTS (10) is how often the workload is started again: after a signal, which xpk does by
# itself, and after our own exit statuses 75 (told to end, or another process is gone) and 1. A worker that is told to end has
# WEDLM_GRACE_SECONDS (300) for a step, or some seconds of them, and a checkpoint.
set -euo pipefail

run=() # expanded below as bash 3.2, that of macOS, needs it: there an empty array is unbound
if [[ "${1:-}" == --dry-run ]]; then
  run=(echo)
  shift
fi
if (($# < 7)) || [[ "$6" != -- ]]; then
  echo "usage: launch/gke.sh [--dry-run] WORKLOAD CLUSTER ZONE TPU_TYPE IMAGE -- TRAIN_FLAGS..." >&2
  exit 2
fi
workload=$1 cluster=$2 zone=$3 tpu_type=$4 image=$5
shift 6

${run[@]+"${run[@]}"} xpk workload create --workload="$workload" --cluster="$cluster" --zone="$zone" --tpu-type="$tpu_type" \
  --docker-image="$image" --max-restarts="${WEDLM_RESTARTS:-10}" --restart-on-exit-codes=1,75 \
  --termination-grace-period-seconds="${WEDLM_GRACE_SECONDS:-300}" \
  --command="python3 -m wedlm_jax.train$(printf ' %q' "$@")"
