#!/usr/bin/env bash
# The main job, from nothing: bash launch/quickstart.sh
#
# Trains a small AR model, adapts it to WeDLM, compares its decoders, exports it to a Hugging Face directory and completes
# a prompt with the export. From any folder, safe to repeat: what is installed and trained is kept. Everything lands in runs/.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Shows a command as one would type it, then runs it.
run() {
    local word line='$'
    for word in "$@"; do
        case $word in
            *[!A-Za-z0-9_./=-]*) line+=" '$word'" ;;
            *) line+=" $word" ;;
        esac
    done
    printf '\n%s\n' "$line"
    "$@"
}

run python -m wedlm_jax.train --exp quickstart_base
run python -m wedlm_jax.train --exp quickstart
run python -m wedlm_jax.evaluate --exp quickstart
run python -m wedlm_jax.convert --from runs/quickstart --to runs/quickstart/export --arch qwen3
run python -m wedlm_jax.generate --model runs/quickstart/export --decoder verified \
    --prompt 'Q: Tom has 12 apples. Tom buys 7 more and loses 4. How many apples does Tom have left? A:'
