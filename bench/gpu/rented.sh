#!/bin/sh
# A card lent or rented by the half hour, without network, with little carried per call: bench/gpu/rented.md.
#   sh bench/gpu/rented.sh parts    here: what is to be carried, in parts of at most BENCH_PART_MIB (56)
#   sh bench/gpu/rented.sh calls    here: do tree and parts fit? then the calls to send, word for word
#   sh bench/gpu/rented.sh N        there: unpack what came along, then run call N (1 to 5) into BENCH_OUT
#   sh bench/gpu/rented.sh STAGE    there: a stage again, or one that no call has (engine/0.6B/graphs)
#   sh bench/gpu/rented.sh unpack   there: only unpack, after a machine was lost
#   sh bench/gpu/rented.sh walk     the calls on a CPU, tiny (or some: walk 1 5): does every stage end, with rows?
# Always ends with 0 once a call began: what failed is a row of gpu_stages. NEVER RUN ON A GPU yet.
set -eu
# relative folders are relative to where this is called
[ -z "${BENCH_OUT:-}" ] || export BENCH_OUT="$(realpath -m "$BENCH_OUT")"
[ -z "${BENCH_STASH:-}" ] || BENCH_STASH=$(realpath -m "$BENCH_STASH")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
stash=${BENCH_STASH:-build/rented}   # ignored by git: stays on the machine from call to call
[ "${1:-}" != walk ] || stash=${BENCH_STASH:-build/walked}  # what is here; the parts are for a card
limit=${BENCH_LIMIT:-560}            # seconds of a call, below what the machine's keeper allows
mkdir -p "$stash"
stash=$(cd "$stash" && pwd)
export PYTHONPATH=".:$stash/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# there is no network to ask for an address, and no FlashInfer to sample with
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_USE_FLASHINFER_SAMPLER=0
for cache in VLLM_CACHE_ROOT TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR AGENTGRPO_CACHE; do
    export "$cache=$stash/cache/$cache"  # compiled once for all calls
done

call() { # NUMBER [--walk]
    : "${BENCH_OUT:?a folder for the rows}"
    "$python" -m bench.gpu.parts --unpack "$stash/parts" --into "$stash" ||
        echo "parts: not unpacked; stages that need them will say so"
    "$python" -m bench.harness || exit 1  # no row without a commit
    "$python" -m bench.gpu.stages --limit "$limit" ${2:-} "$1" || true
}

case ${1:-} in
parts) shift; exec "$python" -m bench.gpu.parts --build "$stash/parts" "$@" ;;
calls) exec "$python" -m bench.gpu.parts --calls "$stash/parts" ;;
unpack) exec "$python" -m bench.gpu.parts --unpack "$stash/parts" --into "$stash" ;;
[1-5] | */*) call "$1" ;;
walk)
    shift
    for number in ${*:-1 2 3 4 5}; do
        (export BENCH_OUT="${BENCH_OUT:?a folder for the rows}/$number"; call "$number" --walk)
    done
    ;;
*) sed -n '2,9p' "$0" >&2; exit 2 ;;
esac
