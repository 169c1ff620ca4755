#!/usr/bin/env bash
# Trains on a Cloud TPU VM or pod slice: installs the package on every worker and starts the same command on each of them.
#
#   launch/tpu_vm.sh [--dry-run] NAME ZONE -- --exp qwen3_8b_cpt --workdir /mnt/bucket/run \
#     data.source=text data.mixture= data.path=/mnt/bucket/corpus
#
# NAME and ZONE are those of an existing TPU VM (gcloud compute tpus tpu-vm create ...; for TPU7x, which that does not serve, take
# gke.sh). The workers find each other through the TPU's metadata. After a preemption, or where a worker died, run the same line
# again: the run goes on from its last checkpoint, which all workers must be able to read (a shared disk, or a bucket mounted
# with gcsfuse).
#
# The files that git tracks in this clone, or in the one that WEDLM_SOURCE names, as they are now, and a virtual environment take the
# place of what was in ~/wedlm_jax_launch of every worker. Its Python is the newest of 3.11 to 3.13 there, or the one that WEDLM_PYTHON names.
#
# WEDLM_EXTRAS=wandb,datasets installs these extras of pyproject.toml beside tpu. WEDLM_PASS=WANDB_API_KEY,HF_TOKEN hands these
# variables of your environment to the training on every worker, in a file that it alone can read and that goes once it is read.
set -euo pipefail

run=() # expanded below as bash 3.2, that of macOS, needs it: there an empty array is unbound
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
source=${WEDLM_SOURCE:-$(CDPATH='' cd "$(dirname "$0")/.." && pwd)}
home=wedlm_jax_launch
pass=${WEDLM_PASS:-} passed=() # names of variables
for variable in ${pass//,/ }; do
  if [[ ! "$variable" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || [[ -z "${!variable+set}" ]]; then
    echo "error: WEDLM_PASS names $variable, which is not in the environment; export it, or leave it out" >&2
    exit 2
  fi
  passed+=("$variable")
done
sent=$(mktemp -d)
trap 'rm -rf "$sent"' EXIT

# What a worker runs. The Ubuntu of a TPU VM may have a python3 that is too old (22.04), or one that pip may not change (24.04).
pythons=${WEDLM_PYTHON:-python3.13 python3.12 python3.11}
install="set -e; rm -rf $home; mkdir -p $home/source; tar -xzf $home.tar.gz -C $home/source"
install+="; python=\$(command -v $pythons | head -n 1)"
install+="; [ -n \"\$python\" ] || { echo 'error: this worker has none of $pythons; install one (sudo apt-get install -y"
install+=" python3.11-venv), or name one of 3.11 or newer: WEDLM_PYTHON=/path/to/python' >&2; exit 1; }"
install+="; \$python -m venv $home/venv"
install+="; $home/venv/bin/python3 -m pip install --quiet './$home/source[tpu${WEDLM_EXTRAS:+,$WEDLM_EXTRAS}]'"
command="$home/venv/bin/python3 -m wedlm_jax.train$(printf ' %q' "$@")"
if ((${#passed[@]})); then
  command="set -a && . ./$home.env && rm $home.env && $command"
fi

commit=HEAD
if ((${#run[@]} == 0)); then
  if ! tried=$(git -C "$source" rev-parse --verify HEAD 2>&1); then
    echo "error: $source is no git clone (${tried%%$'\n'*}); clone the repository, or name a clone of it: WEDLM_SOURCE=DIR" >&2
    exit 2
  fi
  git -C "$source" update-index -q --refresh || true # stash fails where files were touched but hold what they held
  changed=$(git -C "$source" stash create) # a commit of the tracked files as they are; empty where none was changed
  commit=${changed:-HEAD}
fi
${run[@]+"${run[@]}"} git -C "$source" archive --output="$sent/$home.tar.gz" "$commit"
${run[@]+"${run[@]}"} gcloud compute tpus tpu-vm scp --worker=all --zone="$zone" "$sent/$home.tar.gz" "$name:"
${run[@]+"${run[@]}"} gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$install"
if ((${#passed[@]})); then # in a file, since every user of a machine can read the command lines of its processes
  if ((${#run[@]} == 0)); then
    (umask 077 && for variable in "${passed[@]}"; do printf '%s=%q\n' "$variable" "${!variable}"; done > "$sent/$home.env")
  fi
  ${run[@]+"${run[@]}"} gcloud compute tpus tpu-vm scp --worker=all --zone="$zone" "$sent/$home.env" "$name:"
fi
${run[@]+"${run[@]}"} gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command"
