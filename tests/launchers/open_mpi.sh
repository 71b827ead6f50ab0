#!/usr/bin/env bash
# Open MPI's mpirun starts ranks on two hosts by ssh.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

command -v mpirun.openmpi >/dev/null || not_run "$0: mpirun.openmpi is missing"
start_sshd
host_file '%s slots=2'
mpirun=(mpirun.openmpi --allow-run-as-root --hostfile "$folder/hosts" --mca plm_rsh_agent "$folder/ssh"
    -x KOLO_SECRET -x KOLO_START_TIMEOUT)

launch "${mpirun[@]}" -n 4 -x MASTER_ADDR=node0 "$kolo" bench all_reduce --sizes 8,1M --check
expect "4 ranks on 2 hosts"
expect "Out of bounds values : 0 OK"

# Without the address of rank 0, the error says what to give.
if on 0 timeout 120 "${mpirun[@]}" -n 4 "$kolo" bench all_reduce --sizes 8 >"$folder/output" 2>&1; then
    die "mpirun succeeded without MASTER_ADDR"
fi
expect "ranks on several hosts need MASTER_ADDR"
echo "passed: Open MPI, 4 ranks on 2 hosts by ssh"
