#!/usr/bin/env bash
# The manifests for Kubernetes: valid by their schemas, and what they start runs with the variables of
# their pods. PYTHON has PyYAML and the schemas.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

python=${PYTHON:-python3}
manifests=$root/tests/launchers/manifests.py
"$python" "$manifests" check

# The names that Kubernetes' name server has for the pods of rank 0.
sed -i 's/ node0$/ node0 kolo-job-0.kolo-job kolo-torch-master-0/' "$folder/names"

# Runs the pods of a manifest, half of them on each host.
run() {
    local file=$1 pods=$2 index lines pids=()
    for ((index = 0; index < pods; index++)); do
        mapfile -t lines < <("$python" "$manifests" pod "$file" "$index")
        [ "${#lines[@]}" -gt 3 ] || die "$file has no pod $index"
        # The last line is the command.
        # shellcheck disable=SC2086 # its words
        on $((index * 2 / pods)) env -u KOLO_START_TIMEOUT "${lines[@]::${#lines[@]}-1}" PATH="$(dirname "$kolo"):$PATH" \
            timeout --kill-after=10 300 ${lines[-1]} >"$folder/pod$index" 2>&1 &
        pids+=($!)
    done
    for ((index = 0; index < pods; index++)); do
        wait "${pids[index]}" || {
            tail -n 20 "$folder"/pod* >&2
            die "pod $index of $file failed"
        }
    done
    cp "$folder/pod0" "$folder/output"
    expect "4 ranks on 2 hosts"
    expect "Out of bounds values : 0 OK"
    echo "passed: $file, 4 ranks in $pods pods"
}

run job.yaml 4
if command -v torchrun >/dev/null; then
    OMP_NUM_THREADS=1 run pytorchjob.yaml 2
else
    echo "NOT RUN: the pods of pytorchjob.yaml: torchrun is missing"
fi
