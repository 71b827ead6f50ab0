# Runs the stages of .ci/run or .ci/long. Both source this file and call `run_stages "$@"` with the
# list `stages`: in each entry the name of a file in .ci/stages/ and its arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh

# The disk may be small, and most of the time goes into builds. No crate is built again after a
# change.
export CARGO_INCREMENTAL=0 PIP_NO_CACHE_DIR=1

# The time of a stage, so that one that hangs is named.
limit=30m

# For all stages, also those of the second lane.
folder=$(mktemp -d)
# What they print, for the counts in the summary; and how long each took.
log=$folder/log
times=$folder/times
touch "$log" "$times"
current=
# The process of the second lane.
lane=
# Of SLURM, for `finish`.
slurm=
munge_pid=
# By the name of a set-up: "yes" or "no" once it has ended, and its process in the background.
declare -A results preparations

# `--part 1/4` leaves every fourth stage. `--list` prints the names of the stages. Names run these
# stages alone, in the order of the list; no name runs all.
#
# A stage with a + before its name waits more than it computes. It runs in a second lane, beside the
# others; if stages are named, there is one lane.
run_stages() {
    if [ "${1:-}" = --part ]; then
        keep_part "${2:-}"
        shift 2
    fi
    if [ "${1:-}" = --list ]; then
        list
        return
    fi
    local name entry first=() second=()
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
        name=${entry#+}
        if [ -n "${asked[${name%% *}]:-}" ]; then
            first+=("$name")
        elif [ $# = 0 ]; then
            if [ "$name" = "$entry" ]; then first+=("$name"); else second+=("$name"); fi
        fi
    done

    begin_setups "${first[@]}" "${second[@]}"
    if [ ${#second[@]} != 0 ]; then
        # The children of this shell are not those of the lane.
        (
            trap - EXIT
            quietly=yes
            each_stage "${second[@]}"
            [ -z "$slurm" ] || stop_daemons
        ) &
        lane=$!
    fi
    each_stage "${first[@]}"
    if [ -n "$lane" ]; then
        current="the second lane"
        wait "$lane"
        lane=
    fi
    summary
}

each_stage() {
    local entry
    for entry in "$@"; do
        # The other lane has ended with a failure.
        [ ! -e "$folder/failed" ] || exit 1
        # An entry is a name and plain words.
        # shellcheck disable=SC2086
        stage $entry || fail
    done
}

# Names the stage that has failed, once.
fail() {
    if mkdir "$folder/failed" 2>/dev/null; then echo "${current:-start}" >"$folder/failed/name"; fi
    exit 1
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
    local names=("${stages[@]#+}")
    printf '%s\n' "${names[@]%% *}"
}

# Set in the second lane, whose stages print when they have ended.
quietly=

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
    local began=$SECONDS output=$folder/$1.output status=0 limited=()
    # At a terminal the user sees the hang, and Ctrl-C must reach the stage.
    { [ -t 2 ] && [ -z "$quietly" ]; } || limited=(timeout --verbose --kill-after=30 "$limit")
    echo "=== $*"
    if [ -n "$quietly" ]; then
        "${limited[@]}" ".ci/stages/$1" "${@:2}" >"$output" 2>&1 </dev/null || status=$?
        echo "=== what $1 has printed, in the second lane"
        cat "$output"
    else
        "${limited[@]}" ".ci/stages/$1" "${@:2}" 2>&1 </dev/null | tee "$output" || status=$?
    fi
    cat "$output" >>"$log"
    rm "$output"
    [ "$status" = 0 ] || return "$status"
    echo "$((SECONDS - began)) $1${quietly:+ (second lane)}" >>"$times"
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
        if [ -n "${wanted[$setup]:-}" ] && [ -z "${results[$setup]:-}" ]; then
            (
                trap - EXIT
                # The lane that waits for it counts its time.
                times=/dev/null
                result=no
                if "setup_$setup"; then result=yes; fi
                echo "$result" >"$folder/$setup.result.new"
                mv "$folder/$setup.result.new" "$folder/$setup.result"
            ) >"$folder/$setup.said" 2>&1 </dev/null &
            preparations[$setup]=$!
        fi
    done
}

# Whether what a stage needs is there. The first call sets it up, or waits for the background, which
# both lanes do.
ready() {
    if [ -z "${results[$1]:-}" ]; then
        local began=$SECONDS
        results[$1]=yes
        if [ -n "${preparations[$1]:-}" ]; then
            until [ -e "$folder/$1.result" ]; do
                # It may end between the two looks.
                if ! kill -0 "${preparations[$1]}" 2>/dev/null && [ ! -e "$folder/$1.result" ]; then break; fi
                sleep 0.2
            done
            [ "$(cat "$folder/$1.result" 2>/dev/null)" = yes ] || results[$1]=no
            # The lane that is first shows what it said.
            if mv "$folder/$1.said" "$folder/$1.shown" 2>/dev/null; then
                echo "=== set-up: $1"
                cat "$folder/$1.shown"
            fi
        else
            echo "=== set-up: $1"
            "setup_$1" </dev/null || results[$1]=no
        fi
        if [ "${results[$1]}" = yes ] && declare -F "use_$1" >/dev/null; then "use_$1"; fi
        echo "$((SECONDS - began)) set-up: $1${quietly:+ (second lane)}" >>"$times"
    fi
    [ "${results[$1]}" = yes ]
}

# Says loudly what is missing here.
not_run() {
    echo "NOT RUN: $*" | tee -a "$log"
}

# The file with the seconds that each stage may take, if the list has one.
budgets=/dev/null

budget() {
    awk -v name="${1% (second lane)}" '$1 == name { print $2 }' "$budgets"
}

# Prints how long each stage took, how many tests passed, and what did not run.
summary() {
    local passed count seconds name budget
    passed=$({ grep -oE '^test result: ok\. [0-9]+ passed|^[0-9]+ passed(,| in)' "$log" || true; } |
        sed 's/[^0-9]*\([0-9]*\).*/\1/' | awk '{ n += $1 } END { print n + 0 }')
    count=$(grep -vc " set-up: " "$times" || true)
    echo
    echo "=== the stages; the second lane runs beside the others"
    printf '%-32s %7s %6s %7s\n' stage seconds share budget
    sort -rn "$times" | while read -r seconds name; do
        if [ "$seconds" = 0 ]; then continue; fi
        budget=$(budget "$name")
        printf '%-32s %7d %4d %% %7s\n' "$name" "$seconds" $((100 * seconds / (SECONDS > 0 ? SECONDS : 1))) "${budget:--}"
    done
    sort -rn "$times" | while read -r seconds name; do
        budget=$(budget "$name")
        if [ -n "$budget" ] && ((2 * seconds > 3 * budget)); then
            echo "OVER BUDGET: $name took $seconds s of $budget s"
        fi
    done
    echo "=== all $count stages passed in $((SECONDS / 60)) min $((SECONDS % 60)) s: $passed tests"
    if grep "NOT RUN: " "$log"; then
        echo "=== $(grep -c "NOT RUN: " "$log") not run"
    fi
}

free_space() {
    df -h --output=avail . | tail -1 | tr -d ' '
}

# Ends a process and all that it has started.
end_tree() {
    local child
    for child in $(ps -o pid= --ppid "$1"); do end_tree "$child"; done
    kill "$1" 2>/dev/null || true
}

stop_daemons() {
    local file
    if [ -n "$slurm" ]; then
        for file in "$slurm/slurmd.pid" "$slurm/slurmctld.pid" "$munge_pid"; do
            [ ! -f "$file" ] || stop "$file"
        done
        as_root rm -rf "$slurm"
    fi
}

finish() {
    local status=$? job
    # What still runs in the background: the second lane and Redis.
    for job in $(jobs -p); do end_tree "$job"; done
    stop_daemons
    # 2: a stage that does not exist.
    if [ $status != 0 ] && [ $status != 2 ]; then
        echo "FAILED: $(cat "$folder/failed/name" 2>/dev/null || echo "${current:-start}")"
    fi
    rm -rf "$folder"
    exit $status
}
trap finish EXIT
