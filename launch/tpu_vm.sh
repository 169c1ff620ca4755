#!/usr/bin/env bash
# Trains on a Cloud TPU VM or pod slice: installs the package on every worker and starts the same command on each of them.
#
#   launch/tpu_vm.sh [--dry-run] NAME ZONE -- --exp qwen3_8b_cpt --workdir /mnt/bucket/run data.path=/mnt/corpus
#
# NAME and ZONE are those of an existing TPU VM (gcloud compute tpus tpu-vm create ...). The workers find each other through
# the TPU's metadata. After a preemption, or where a worker died, run the same line again: the run goes on from its last
# checkpoint, which all workers must be able to read (a shared disk, or a bucket mounted with gcsfuse).
set -euo pipefail

run=()
if [[ "${1:-}" == --dry-run ]]; then
  run=(echo)
  shift
fi
if (($# < 4)) || [[ "$3" != -- ]]; then
  echo "usage: launch/tpu_vm.sh [--dry-run] NAME ZONE -- TRAIN_FLAGS..." >&2
  exit 2
fi
name=$1 zone=$2
shift 3
source=${WEDLM_SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}
command="python3 -m wedlm_jax.train$(printf ' %q' "$@")"

"${run[@]}" gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$zone" "$source" "$name:wedlm_jax"
"${run[@]}" gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="python3 -m pip install --quiet './wedlm_jax[tpu]'"
"${run[@]}" gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command"
