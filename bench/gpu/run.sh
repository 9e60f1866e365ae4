#!/bin/sh
# Check the kernels on real shapes, then time them beside their peers. One command, any CUDA machine:
#   sh bench/gpu/run.sh [--sweep] [--no-rows] [--repeats N]
#   sh bench/gpu/run.sh --dry-run        the same on a CPU, tiny, no rows: does the script work?
# Peers are used if they can be imported: pip install liger-kernel trl verl
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
case " $* " in
*" --dry-run "*) ;;
*)
    echo "== kernels against their references, on this GPU"
    "$python" -m pytest -q tests/kernels
    ;;
esac
exec "$python" -m bench.gpu.kernels "$@"
