#!/usr/bin/env bash
# Every test: bash launch/test.sh [--full] [pytest arguments]
#
# From any folder, safe to repeat. --full runs the costly checks at their full counts (2,000 cases instead of about 150).
set -euo pipefail

arguments=()
for argument in "$@"; do
    if [ "$argument" = --full ]; then export WEDLM_FULL=1; else arguments+=("$argument"); fi
done

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# -rs lists what was skipped, and why: the comparison with PyTorch runs only where requirements-torch.txt is installed.
python -m pytest -rs --numprocesses 2 --dist worksteal ${arguments[@]+"${arguments[@]}"}
