#!/bin/sh
# What this project claims about GPUs, measured. One command, any CUDA machine:
#   sh bench/gpu/run.sh [PART ...]             parts: tests kernels step colocated learn; default: all
#   sh bench/gpu/run.sh --dry-run [PART ...]   the same on a CPU, tiny, no rows: does it work?
# Each part stands alone, and a part that fails does not keep the next from running.
#   tests      the kernels against their references, on the GPU
#   kernels    real shapes: checked first, then timed beside peers and the roof
#              (peers are used if they can be imported: pip install liger-kernel trl verl)
#   step       the learner's pass by layout: tree, rows (varlen, flex), padded; 0.6B, 1.7B, 4B
#   colocated  50 cycles of wake, publish, agree, sample, sleep, update: times and memory; needs vllm
#   learn      the quickstart at GPU batch sizes: does it learn, and how fast; needs vllm
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
dry= failed=
if [ "${1:-}" = --dry-run ]; then
    dry=--dry-run
    shift
fi

part() {
    echo "== $*"
    "$python" -m "$@" || failed="$failed $2"
}

has_vllm() {
    "$python" -c 'import vllm' 2>/dev/null || { echo "absent: vllm; not run: $1"; return 1; }
}

for name in ${*:-tests kernels step colocated learn}; do
    case $name in
    tests) [ -n "$dry" ] || part pytest -q tests/kernels ;;
    kernels) part bench.gpu.kernels $dry ;;
    step) part bench.gpu.step $dry ;;
    colocated)
        has_vllm colocated || continue
        part bench.gpu.colocated $dry --weights shared
        part bench.gpu.colocated $dry --weights copy
        ;;
    learn)
        has_vllm learn || continue
        if [ -n "$dry" ]; then
            part bench.quickstart --seeds 0 --no-rows steps=1 data.num_heldout=4 rollout.tasks_per_step=2
        else
            part bench.quickstart rollout.tasks_per_step=64 rollout.group_size=16 steps=30 \
                learner.max_tokens=16384 engine.kv_cache_gib=16 engine.max_num_seqs=512 sandbox.max_live=512 --seeds 0
        fi
        ;;
    *) echo "error: no part $name" >&2; exit 2 ;;
    esac
done
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
