# Runs the stages of .ci/run or .ci/long. Both source this file and call `run_stages "$@"` with the
# list `stages`: in each entry the name of a file in .ci/stages/ and its arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh

# The disk may be small, and most of the time goes into builds. No crate is built again after a
# change, no program is debugged, and optimisation across crates makes programs faster, not
# different.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=line-tables-only PIP_NO_CACHE_DIR=1
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=none

# The time of a stage, so that one that hangs is named.
limit=30m

# What all stages print, for the counts in the summary; and how long each took.
log=$(mktemp)
times=$(mktemp)
current=
# Of etcd and SLURM, for `finish`.
etcd=
slurm=
munge_pid=
# By the name of a set-up: its process in the background, and "yes" or "no" once it has ended.
declare -A preparations results

# `--part 1/4` leaves every fourth stage. `--list` prints the names of the stages. Names run these
# stages alone, in the order of the list; no name runs all.
run_stages() {
    if [ "${1:-}" = --part ]; then
        keep_part "${2:-}"
        shift 2
    fi
    if [ "${1:-}" = --list ]; then
        list
        return
    fi
    local name entry selected=()
    local -A known=() asked=()
    for name in $(list); do known[$name]=yes; done
    for name in "$@"; do
        if [ -z "${known[$name]:-}" ]; then
            echo "$0: there is no stage $name; the stages are:" >&2
            list >&2
            exit 2
        fi
        asked[$name]=yes
    done
    for entry in "${stages[@]}"; do
        if [ $# = 0 ] || [ -n "${asked[${entry%% *}]:-}" ]; then selected+=("$entry"); fi
    done

    begin_setups "${selected[@]}"
    for entry in "${selected[@]}"; do
        # An entry is a name and plain words.
        # shellcheck disable=SC2086
        stage $entry
    done
    summary
}

# Leaves the stages of one of several parts, which machines can run side by side.
keep_part() {
    local at part parts kept=()
    if [[ ! $1 =~ ^([1-9][0-9]?)/([1-9][0-9]?)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
        echo "$0: --part needs a part and the number of parts, such as 1/4" >&2
        exit 2
    fi
    part=${BASH_REMATCH[1]} parts=${BASH_REMATCH[2]}
    for at in "${!stages[@]}"; do
        if ((at % parts == part - 1)); then kept+=("${stages[at]}"); fi
    done
    stages=("${kept[@]}")
}

list() {
    printf '%s\n' "${stages[@]%% *}"
}

# Runs a stage, unless what it needs is missing.
stage() {
    current=$1
    local setup
    for setup in $(header uses "$1"); do
        ready "$setup" || not_run "a part of $1: ${without[$setup]}"
    done
    for setup in $(header needs "$1"); do
        if ! ready "$setup"; then
            not_run "$1: ${without[$setup]}"
            return
        fi
    done
    local began=$SECONDS limited=()
    # At a terminal the user sees the hang, and Ctrl-C must reach the stage.
    [ -t 2 ] || limited=(timeout --verbose --kill-after=30 "$limit")
    echo "=== $*"
    "${limited[@]}" ".ci/stages/$1" "${@:2}" 2>&1 </dev/null | tee -a "$log"
    echo "$((SECONDS - began)) $1" >>"$times"
    echo "=== $1: passed in $((SECONDS - began)) s, $(free_space) free"
}

# The set-ups that a stage names after "needs:" or "uses:" in its comment.
header() {
    sed -n "s/^# $1: //p" ".ci/stages/$2"
}

# Runs the set-ups that must come first and starts those in the background, as far as stages need
# them.
begin_setups() {
    local setup entry
    local -A wanted=()
    for entry in "$@"; do
        for setup in $(header uses "${entry%% *}") $(header needs "${entry%% *}"); do wanted[$setup]=yes; done
    done
    for setup in "${setups_first[@]}"; do
        if [ -n "${wanted[$setup]:-}" ]; then ready "$setup" || true; fi
    done
    for setup in "${setups_in_background[@]}"; do
        if [ -n "${wanted[$setup]:-}" ]; then
            "setup_$setup" >"$log.$setup" 2>&1 </dev/null &
            preparations[$setup]=$!
        fi
    done
}

# Whether what a stage needs is there. The first call sets it up, or waits for the background.
ready() {
    if [ -z "${results[$1]:-}" ]; then
        local began=$SECONDS
        echo "=== set-up: $1"
        results[$1]=yes
        if [ -n "${preparations[$1]:-}" ]; then
            wait "${preparations[$1]}" || results[$1]=no
            cat "$log.$1"
        else
            "setup_$1" </dev/null || results[$1]=no
        fi
        if [ "${results[$1]}" = yes ] && declare -F "use_$1" >/dev/null; then "use_$1"; fi
        echo "$((SECONDS - began)) set-up: $1" >>"$times"
    fi
    [ "${results[$1]}" = yes ]
}

# Says loudly what is missing here.
not_run() {
    echo "NOT RUN: $*" | tee -a "$log"
}

# Prints the longest stages, how many tests passed, and what did not run.
summary() {
    local passed count
    passed=$({ grep -oE '^test result: ok\. [0-9]+ passed|^[0-9]+ passed(,| in)' "$log" || true; } |
        sed 's/[^0-9]*\([0-9]*\).*/\1/' | awk '{ n += $1 } END { print n + 0 }')
    count=$(grep -vc " set-up: " "$times" || true)
    echo
    echo "=== the longest stages, in seconds"
    sort -rn "$times" | head -15
    echo "=== all $count stages passed in $((SECONDS / 60)) min $((SECONDS % 60)) s: $passed tests"
    if grep "NOT RUN: " "$log"; then
        echo "=== $(grep -c "NOT RUN: " "$log") not run"
    fi
}

free_space() {
    df -h --output=avail . | tail -1 | tr -d ' '
}

finish() {
    local status=$? file
    # What still runs in the background, Redis and etcd among it.
    jobs -p | xargs -r kill 2>/dev/null || true
    if [ -n "$slurm" ]; then
        for file in "$slurm/slurmd.pid" "$slurm/slurmctld.pid" "$munge_pid"; do
            [ ! -f "$file" ] || stop "$file"
        done
        as_root rm -rf "$slurm"
    fi
    if [ -n "$etcd" ]; then rm -rf "$etcd"; fi
    # 2: a stage that does not exist.
    if [ $status != 0 ] && [ $status != 2 ]; then
        echo "FAILED: ${current:-start}"
    fi
    rm -f "$log" "$log".* "$times"
    exit $status
}
trap finish EXIT
