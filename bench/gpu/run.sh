#!/bin/sh
# What this project claims about GPUs, measured. One command, any CUDA machine that is yours:
#   sh bench/gpu/run.sh [PART ...]             parts: tests kernels step colocated learn trl; default: all
#                                              or one stage of bench/gpu/stages.py: step/0.6B/full/tools
#   sh bench/gpu/run.sh --dry-run [PART ...]   the same on a CPU, tiny: does it work?
# A card that is lent bare for a quarter of an hour: bench/gpu/rented.sh. Each stage ends alone, and BENCH_LIMIT=SECONDS
# ends one that takes longer. Rows go to BENCH_OUT=FOLDER, else to bench/results. In a copy without .git set
# BENCH_COMMIT (bench/harness.py).
#   tests      the kernels against their references, on the GPU
#   kernels    real shapes: checked first, then timed beside peers and the roof
#              (peers are used if they can be imported: pip install liger-kernel trl verl)
#   step       the learner's pass by layout: tree, rows (varlen, flex), padded; 0.6B, 1.7B, 4B
#   colocated  50 cycles of wake, publish, agree, sample, sleep, update: times and memory; needs vllm
#   learn      the quickstart at GPU batch sizes: does it learn, and how fast; needs vllm
#   trl        seconds a step of the same work in TRL's GRPOTrainer, colocated; needs vllm and trl
set -eu
# a relative folder is relative to where this is called
[ -z "${BENCH_OUT:-}" ] || export BENCH_OUT="$(realpath -m "$BENCH_OUT")"
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
walk=
if [ "${1:-}" = --dry-run ]; then
    walk=--walk
    shift
    export BENCH_OUT="${BENCH_OUT:-$(mktemp -d)}"
fi
# shellcheck disable=SC2086 # no word where there is none
exec "$python" -m bench.gpu.stages $walk ${BENCH_LIMIT:+--each "$BENCH_LIMIT"} \
    ${*:-tests kernels step colocated learn trl}
