#!/usr/bin/env bash
# Trains on one machine with several GPUs, or on several machines by hand, without a scheduler.
#
#   launch/gpu.sh [--dry-run] --exp sft model.path=DIR data.path=chat.jsonl mesh.data=-1
#   WEDLM_COORDINATOR=host0:12345 WEDLM_NUM_PROCESSES=2 WEDLM_PROCESS_ID=0 launch/gpu.sh ...    on host0
#   WEDLM_COORDINATOR=host0:12345 WEDLM_NUM_PROCESSES=2 WEDLM_PROCESS_ID=1 launch/gpu.sh ...    on host1
#
# host1 must reach host0 at this port and at the one below it (12344). The processes wait WEDLM_START_TIMEOUT (300) seconds for each
# other.
#
# One process drives all GPUs of its machine, so on one machine no variable is needed. It is started again, up to
# WEDLM_RESTARTS (10) times, whatever it died of: the run goes on from its last checkpoint. It is not where it ended well,
# with bad input (status 2) or by a signal that was not waited for (130, 143), nor after Ctrl-C or a SIGTERM to this script: the
# process is told, saves, and its status is that of the script.
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
python=${PYTHON:-python3}
command=("$python" -m wedlm_jax.train "$@")
if $dry; then
  echo "${command[@]}"
  exit
fi
# A second try does not mend this, and its status would not tell it from a death.
if ! tried=$("$python" -c 'import jax, wedlm_jax' 2>&1); then
  echo "error: $python cannot import wedlm_jax (${tried##*$'\n'}); activate the environment in which it is installed," \
    "or name its Python: PYTHON=/path/to/python" >&2
  exit 2
fi

interrupted=false
stop() {
  interrupted=true heard=true
  kill -TERM $(jobs -p) 2>/dev/null || true # not INT, which what runs in the background ignores
}
trap stop INT TERM

# In the background: bash hears no signal before the end of what it runs in front.
run() {
  local status
  "$@" &
  if $interrupted; then stop; fi # by a signal before there was anything to tell
  while
    heard=false status=0
    wait "$!" || status=$? # of the signal, where one ends the wait
    $heard
  do :; done
  return "$status"
}

for ((try = 0; ; try++)); do
  status=0
  run "${command[@]}" || status=$?
  case "$status" in
    0 | 2 | 130 | 143) exit "$status" ;;
  esac
  if $interrupted || ((try >= ${WEDLM_RESTARTS:-10})); then
    exit "$status"
  fi
  echo "ended with status $status; starting again ($((try + 1)) of ${WEDLM_RESTARTS:-10})" >&2
  run sleep "${WEDLM_RESTART_SECONDS:-10}" || true
  if $interrupted; then
    exit "$status"
  fi
done
