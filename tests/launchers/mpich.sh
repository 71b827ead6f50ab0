#!/usr/bin/env bash
# MPICH's mpiexec starts ranks on two hosts by ssh.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

command -v mpiexec.mpich >/dev/null || not_run "$0: mpiexec.mpich is missing"
start_sshd
host_file '%s:2'
launch mpiexec.mpich -f "$folder/hosts" -launcher ssh -launcher-exec "$folder/ssh" -genv MASTER_ADDR node0 -n 4 \
    "$kolo" bench all_reduce --sizes 8,1M --check
expect "4 ranks on 2 hosts"
expect "Out of bounds values : 0 OK"
echo "passed: MPICH, 4 ranks on 2 hosts by ssh"
