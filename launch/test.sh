#!/usr/bin/env bash
# The tests: bash launch/test.sh [--full] [pytest arguments]
#
# From any folder, safe to repeat. --full draws 20 to 2,000 random cases a test instead of 1 to 200, and runs what is too slow for
# every run.
set -euo pipefail

arguments=()
for argument in "$@"; do
    if [ "$argument" = --full ]; then export WEDLM_FULL=1; else arguments+=("$argument"); fi
done

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Workers, and the commands that tests run, find here what others have compiled.
JAX_COMPILATION_CACHE_DIR=$(mktemp -d)
export JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3
trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT

# -rs lists what was skipped, and why: the comparison with PyTorch runs only where requirements-torch.txt is installed.
python -m pytest -rs --durations 20 --numprocesses 2 --dist worksteal ${arguments[@]+"${arguments[@]}"}
