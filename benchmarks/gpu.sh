#!/usr/bin/env bash
# Every GPU measurement and correctness check, in under 8 minutes on one H200, into a file to paste into RESULTS.md.
#
#   benchmarks/gpu.sh [--smoke] [FILE.md]        by default runs/gpu.md
#
# Needs this checkout, its requirements, jax with CUDA, and the `gpu` extra if the kernels are to be measured. --smoke runs every
# stage with tiny shapes on a CPU. WEDLM_OFFICIAL=CHECKOUT also runs the official trainer's step beside ours (WEDLM_OFFICIAL_PYTHON:
# an interpreter with torch), within two minutes more; read `python -m benchmarks.train_step --help` first.
#
# A stage that fails or runs out of its time is told in the file, the others still run, and the exit status is 1.
set -uo pipefail

smoke=false
if [[ "${1:-}" == --smoke ]]; then
  smoke=true
  shift
fi
results=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../runs/gpu.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
mkdir -p "$(dirname "$results")"
python=${PYTHON:-python3}
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
if $smoke; then export JAX_PLATFORMS=cpu; fi
# What was compiled and tuned stays for the next run, which is under way sooner; nearly all of the memory, for by its arrays the
# step of 1.7B parameters needs more than jax's three quarters of 80 GB; and no second start of Python for pages of the host
# (wedlm_jax.host_memory).
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/jax_cache}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=0}
# Of several GPUs the first: every figure is of one, and of the others jax would take the memory.
gpus=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${gpus%%,*}

install="pip install -e '.[cuda,gpu]' (and on Python 3.11 pip install --no-deps tokamax==0.0.12)"

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

modules="benchmarks.correctness, benchmarks.train_step, benchmarks.decode_forward, benchmarks.attention, benchmarks.loss"
if ! missing=$("$python" -c "import $modules" 2>&1); then
  echo "error: $python cannot run the stages, ${missing##*$'\n'}; $install, or name another: PYTHON=..." >&2
  exit 2
fi
if ! $smoke && ! "$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' 2>/dev/null; then
  echo "error: jax sees no GPU; $install, or --smoke runs every stage on this CPU" >&2
  exit 2
fi

# One set of flags for each stage: of a GPU, and of the smoke run.
best=xla
if $smoke; then
  correctness=(--length 128 --cases 1)
  attention=(--lengths 256 --heads 2 --kv-heads 1 --head-dim 16 --rounds 1)
  loss=(--rows 512 --width 32 --vocab-size 512 --rounds 1)
  steps=(tiny)
  step=(--lengths 128 --no-parts --rounds 1)
  decode=(--shape tiny --context 60 --slots 128 --rounds 1)
else
  if has tokamax; then best=tokamax; fi
  correctness=()
  attention=(--lengths 4096 --heads 16 --kv-heads 8 --head-dim 128 --dtype bfloat16)
  loss=(--rows 8192 --width 2048 --vocab-size 151936 --dtype bfloat16)
  steps=(qwen3_0p6b qwen3_1p7b)
  step=(--lengths 4096 --no-parts)
  decode=()
fi
failed=0
start=$SECONDS

# stage TITLE SECONDS MODULE [FLAG...]
stage() {
  local title=$1 limit=$2 status=0 begun=$SECONDS
  shift 2
  if $smoke; then limit=900; fi # a busy CPU
  echo "$title ..." >&2
  printf '\n### %s\n\n`python -m %s`\n\n' "$title" "$*" >>"$results"
  timeout --kill-after=5 "$limit" "$python" -m "$@" >>"$results" 2>"$errors" || status=$?
  if ((status != 0)); then
    failed=1
    if ((status == 124 || status == 137)); then status="$status: out of its $limit s"; fi
    printf '\nFAILED (status %s)\n\n```\n%s\n```\n' "$status" "$(tail -n 15 "$errors")" >>"$results"
    echo "  failed (status $status)" >&2
  else # which kernels were taken, and why none
    grep -E '^(attention: |decoding copies)' "$errors" | sort -u | sed 's/^/- /' >>"$results" || true
  fi
  printf '\n%d s\n' $((SECONDS - begun)) >>"$results"
}

{
  printf '## GPU\n\n%s, commit %s' "$(date -u +%F)" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  if $smoke; then printf ', smoke run on a CPU: nothing below is a figure'; fi
  printf '. `benchmarks/gpu.sh`%s\n' "$(nvidia-smi --id="$CUDA_VISIBLE_DEVICES" --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sed 's/^/ · /')"
} >"$results"

# Correctness needs no program to be fast, and finding the fastest would take most of its time.
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" stage "Correctness in bfloat16" 80 benchmarks.correctness "${correctness[@]}"
stage "Attention, xla, and a dense mask" 50 benchmarks.attention "${attention[@]}" --implementation xla
if [[ $best != xla ]]; then
  stage "Attention, $best" 40 benchmarks.attention "${attention[@]}" --implementation "$best" --no-dense
fi
stage "Losses" 30 benchmarks.loss "${loss[@]}"
for shape in "${steps[@]}"; do
  stage "Training step, $shape, attention $best" 60 benchmarks.train_step --shape "$shape" "${step[@]}" --attention "$best"
done
if [[ $best != xla ]]; then
  stage "Training step, ${steps[0]}, attention xla" 45 benchmarks.train_step --shape "${steps[0]}" "${step[@]}" --attention xla
fi
if ! $smoke; then # our own kernel, as programs take it: after its trial; a warning says why where it is not taken
  stage "Decoding forward, attention auto" 50 benchmarks.decode_forward "${decode[@]}" --attention auto
fi
# Of one token alone: with a condition in every layer the program of 16 takes most of a minute to compile.
stage "Decoding forward, attention xla" 65 benchmarks.decode_forward "${decode[@]}" --windows 1 --attention xla
if [[ -n "${WEDLM_OFFICIAL:-}" ]]; then
  stage "Training step beside the official one" 120 benchmarks.train_step --shape "${steps[0]}" "${step[@]}" --attention "$best" \
    --official "$WEDLM_OFFICIAL" --official-python "${WEDLM_OFFICIAL_PYTHON:-$python}"
fi

printf '\n%d s in all\n' $((SECONDS - start)) >>"$results"
echo "$results: $((SECONDS - start)) s" >&2
exit $failed
