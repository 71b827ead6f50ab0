#!/usr/bin/env bash
# scripts/wine.sh PROGRAM.exe [ARGUMENT...]: runs a program for Windows under Wine, in a Wine prefix
# of kolo's own, which the first call makes. Cargo runs what it has cross-compiled with it:
#
#   export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=$PWD/scripts/wine.sh
#   cargo test --target x86_64-pc-windows-gnu --test ranks
#
# It needs Debian's wine64 and gcc-mingw-w64-x86-64, and takes the prefix from KOLO_WINEPREFIX.
# scripts/wine.sh --end ends the processes of the prefix.
set -euo pipefail

export WINEPREFIX=${KOLO_WINEPREFIX:-${TMPDIR:-/tmp}/kolo-wine-$(id -u)}
# Nothing is drawn, and no program wants .NET, a browser or a menu. A program that crashes ends, and
# waits for no debugger.
export WINEDEBUG=${WINEDEBUG:--all} DISPLAY=
export WINEDLLOVERRIDES="mscoree,mshtml,winemenubuilder.exe,winedbg.exe=${WINEDLLOVERRIDES:+;$WINEDLLOVERRIDES}"
wine=$(command -v wine64 || echo /usr/lib/wine/wine64)
server=$(dirname "$(readlink -f "$wine")")/wineserver
# Windows has no such variable, and kolo reports variables with its prefix that it does not know.
unset HOSTNAME KOLO_WINEPREFIX

if [ "${1:-}" = --end ]; then
    exec "$server" -k
fi

# Starts the server that all programs of the prefix share; fails if there is one. Debian's ends with
# the last of them, and then a program that starts at that moment fails: this one stays for a minute.
start_server() {
    "$server" -p60 </dev/null >/dev/null 2>&1 9>&-
}

# Several programs may start at once. One of them makes the prefix, and the others wait.
make_prefix() {
    local done=$WINEPREFIX/kolo-is-ready
    [ ! -e "$done" ] || return 0
    mkdir -p "$WINEPREFIX"
    exec 9>"$WINEPREFIX/kolo-lock"
    flock 9
    [ ! -e "$done" ] || return 0
    start_server || true
    "$wine" wineboot.exe --init </dev/null >/dev/null 2>&1 9>&-
    # Wine 8 lacks the source of random numbers of Rust's standard library.
    local system=$WINEPREFIX/drive_c/windows/system32
    if [ ! -e "$system/bcryptprimitives.dll" ]; then
        x86_64-w64-mingw32-gcc -shared -O1 -o "$WINEPREFIX/bcryptprimitives.dll" -x c - -ladvapi32 <<'C'
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(void *, unsigned long);
__declspec(dllexport) BOOL WINAPI ProcessPrng(unsigned char *to, size_t len) { return SystemFunction036(to, (unsigned long)len); }
C
        mv "$WINEPREFIX/bcryptprimitives.dll" "$system/"
    fi
    touch "$done"
    exec 9>&-
}

make_prefix
if start_server; then
    # The first program starts Wine's services, which stay as long as the server and keep the output
    # of that program open.
    "$wine" cmd.exe /c exit </dev/null >/dev/null 2>&1
fi
exec "$wine" "$@"
