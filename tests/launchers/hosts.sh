# shellcheck shell=bash
# Two hosts with an sshd each, for the tests of launchers, which source this: network namespaces of
# tests/hosts/bed.sh, named node0 and node1. Needs root, iproute2 and openssh-server.
#
#     on HOST COMMAND...   runs a command on a host, under its name
#     host_file FORM       writes a list of the hosts, printf's FORM with the name of each, to $folder/hosts
#     expect TEXT          fails unless $folder/output contains the text
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck disable=SC2034 # for the tests
kolo=${KOLO:-$root/target/debug/kolo}
export BED=kl$$ RATE=none NETWORK=10.213.83
folder=$(mktemp -d)
chmod 755 "$folder"

# Without a secret, ranks listen only to their own host. Launchers pass it on by the name of the variable.
KOLO_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export KOLO_SECRET KOLO_START_TIMEOUT=${KOLO_START_TIMEOUT:-120}

die() {
    echo "$0: $*" >&2
    [ ! -f "$folder/output" ] || tail -n 40 "$folder/output" >&2
    exit 1
}

# Prints that a test did not run, and ends without an error.
not_run() {
    echo "NOT RUN: $*"
    exit 0
}

# Unlike `ip netns exec`, this leaves /sys as it is, where SLURM looks for its control groups.
on() {
    local host=$1
    shift
    # shellcheck disable=SC2016 # for the shell on the host
    nsenter --net="/run/netns/$BED-$host" unshare --uts --mount sh -c \
        'mount --bind "$1" /etc/hosts && hostname "$0" && shift && exec "$@"' "node$host" "$folder/names" "$@"
}

host_file() {
    # shellcheck disable=SC2059 # the caller's form
    printf "$1\n" node0 node1 >"$folder/hosts"
}

# Runs a launcher on the first host until the deadline, and shows what it has printed if it fails.
launch() {
    on 0 timeout --kill-after=10 "${PATIENCE:-180}" "$@" >"$folder/output" 2>&1 || die "$1 ended with status $?"
}

expect() {
    grep -q -- "$1" "$folder/output" || die "the output does not contain \"$1\""
}

finish() {
    local status=$?
    [ -z "$(type -t before_finish)" ] || before_finish || true
    # The hosts end with all of their processes.
    "$root/tests/hosts/bed.sh" down
    rm -rf "$folder"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

for program in ip nsenter unshare; do command -v "$program" >/dev/null || not_run "$0: $program is missing"; done
"$root/tests/hosts/bed.sh" up 2 || not_run "$0: network namespaces cannot be made here"

# The /etc/hosts of both hosts.
printf '127.0.0.1 localhost\n%s.1 node0\n%s.2 node1\n' "$NETWORK" "$NETWORK" >"$folder/names"

# Starts an sshd on each host, with keys of their own.
start_sshd() {
    [ -x /usr/sbin/sshd ] || not_run "$0: sshd is missing"
    local host
    ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
    ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
    cp "$folder/key.pub" "$folder/authorized_keys"
    mkdir -p /run/sshd
    cat >"$folder/sshd_config" <<END
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized_keys
PasswordAuthentication no
PermitRootLogin yes
UsePAM no
StrictModes no
PidFile none
END
    cat >"$folder/ssh_config" <<END
Host *
    IdentityFile $folder/key
    IdentitiesOnly yes
    UserKnownHostsFile $folder/known_hosts
    StrictHostKeyChecking yes
    LogLevel ERROR
END
    printf 'node0,node1 %s\n' "$(cat "$folder/host_key.pub")" >"$folder/known_hosts"
    printf '#!/bin/sh\nexec ssh -F %s "$@"\n' "$folder/ssh_config" >"$folder/ssh"
    chmod +x "$folder/ssh"
    for host in 0 1; do
        on "$host" /usr/sbin/sshd -D -f "$folder/sshd_config" 2>"$folder/sshd$host" &
    done
    for host in 0 1; do
        for _ in $(seq 100); do
            if on 0 "$folder/ssh" "node$host" true 2>"$folder/output"; then continue 2; fi
            sleep 0.1
        done
        die "the sshd of node$host does not answer"
    done
}
