#!/usr/bin/env bash
# srun starts ranks on two hosts, each with a slurmd of its own.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

for program in slurmctld slurmd srun munged; do command -v "$program" >/dev/null || not_run "$0: $program is missing"; done

# The daemons authenticate each other by a munged, with a key and a socket of its own.
munge=$folder/munge
mkdir -m 755 "$munge"
head -c 64 /dev/urandom >"$munge/key"
chmod 600 "$munge/key"
munged --force --key-file "$munge/key" --socket "$munge/socket" --pid-file "$munge/pid" --seed-file "$munge/seed" \
    --log-file "$munge/log" || not_run "$0: munged does not start"

mkdir "$folder/controller" "$folder/node0" "$folder/node1"
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=two
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket
CredType=cred/munge
StateSaveLocation=$folder/controller
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=node[0-1] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP
END
before_finish() {
    for file in "$folder"/node?/slurmd.pid "$folder/slurmctld.pid" "$munge/pid"; do
        if [ -f "$file" ]; then kill "$(cat "$file")" || true; fi
    done
}
on 0 slurmctld -f "$SLURM_CONF" || die "slurmctld does not start"
for host in 0 1; do on "$host" slurmd -f "$SLURM_CONF" || die "the slurmd of node$host does not start"; done

for attempt in $(seq 30); do
    if on 0 timeout 20 srun -N 2 -n 2 hostname >"$folder/output" 2>&1; then break; fi
    [ "$attempt" -lt 30 ] || die "srun does not start a process on each host"
    sleep 1
done
expect node0
expect node1

launch srun -N 2 -n 4 --ntasks-per-node 2 "$kolo" bench all_reduce --sizes 8,1M --check
expect "4 ranks on 2 hosts"
expect "Out of bounds values : 0 OK"
# Unequal numbers of ranks, and rank 0 on the second host, of which srun tells no rank.
apart=(srun -N 2 -n 3 -m arbitrary -w "node1,node0,node0")
if on 0 timeout 120 "${apart[@]}" "$kolo" bench all_reduce --sizes 8 >"$folder/output" 2>&1; then
    die "srun succeeded without MASTER_ADDR"
fi
expect "set MASTER_ADDR to that host"
export MASTER_ADDR=node1
launch "${apart[@]}" "$kolo" bench all_reduce --sizes 1K --check
expect "3 ranks on 2 hosts"
echo "passed: SLURM, 4 and 3 ranks on 2 hosts with a slurmd each"
