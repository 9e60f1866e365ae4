#!/bin/sh
# Builds the C extension with ASan and UBSan in a copy of the tree and runs its tests there.
# Usage: tests/csrc/run_sanitized.sh PYTHON [pytest arguments]
# A user without rights needs a clone of their own, and a PYTHON that they may enter.
set -eu
case "$1" in
*/*) python=$(realpath --no-symlinks "$1") ;; # from here on we are elsewhere
*) python=$1 ;;
esac
shift
copy=$(mktemp -d)
chmod o+x "$copy" # sessions without namespaces run as users of their own
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory="$copy"
cd "$copy"
# without root and control groups, what the sanitizer keeps counts as a session's memory
small=$(test "$(id -u)" = 0 ||
    echo :allocator_may_return_null=1:quarantine_size_mb=1:thread_local_quarantine_size_kb=64)
AGENTGRPO_SANITIZE=1 "$python" setup.py -q build_ext --inplace
# PYTHONMALLOC: Python's own arena would hide overruns; leaks are the interpreter's, not ours
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:handle_segv=0$small UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONMALLOC=malloc PYTHONPATH="$copy" \
    "$python" -m pytest -q tests/csrc tests/learn/test_packing.py tests/learn/test_flex_blocks.py \
    tests/sandbox/session/test_session.py tests/sandbox/e2b/test_api.py tests/sandbox/e2b/test_handles.py \
    tests/sandbox/isolation/test_degraded.py tests/sandbox/session/test_watchdog.py tests/sandbox/session/test_host_limits.py tests/sandbox/isolation/test_tree.py \
    tests/sandbox/session/test_image_sessions.py tests/sandbox/attacks/test_image_attacks.py tests/sandbox/attacks/test_attacks.py -k "not outlives and not forks_and_ends and not share_count_once and not forked_child and not ctrl_c" "$@"
