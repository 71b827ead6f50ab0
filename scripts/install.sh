#!/bin/sh
# Builds the C library and installs it under a prefix: the header, the static and the shared
# library, kolo.pc for pkg-config and a package for CMake; with PROGRAM=1 also the program kolo, its
# man pages, and its completions for bash, zsh and fish. The prefix can be moved later. Needs cargo
# alone; for Windows also llvm-dlltool, of LLVM, for the import library of Microsoft's linker.
#
#     scripts/install.sh PREFIX
#
# Variables:
#   DESTDIR   a folder that precedes the prefix where files are written
#   LIBDIR    the folder of the libraries, relative to the prefix; default: lib
#   STRIP     the program that removes debug information from the installed libraries, or 0 to keep
#             it; default: strip, or llvm-strip for Windows
#   PROFILE   cargo's profile; default: dist
#   TARGET    the platform to build for, by Rust's name for it, such as x86_64-pc-windows-gnu;
#             default: this machine's
#   FEATURES  features of the library: cuda, redis, tls; default: cuda, which needs nothing of CUDA
#             to build or to start
#   PROGRAM   1 to install the program, too; on Linux, with the feature cuda, what `kolo run --nccl` loads: LIBDIR/kolo/libnccl.so.2
#   BUILT     a folder with what cargo has built already; the script then builds nothing
set -eu

if [ $# != 1 ] || [ -z "$1" ]; then
    echo "usage: $0 PREFIX" >&2
    exit 2
fi
case $1 in
    /*) prefix=$1 ;;
    *) prefix=$PWD/$1 ;;
esac
libdir=${LIBDIR:-lib}
case /$libdir/ in
    *//* | */./* | */../*)
        echo "$0: LIBDIR is $libdir; give a folder below the prefix, such as lib64" >&2
        exit 2
        ;;
esac
target=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
tools=
case $target in
    x86_64-*-windows-gnu)
        tools=llvm-
        if ! command -v llvm-dlltool >/dev/null; then
            echo "$0: llvm-dlltool is not installed; install LLVM (Debian: llvm)" >&2
            exit 1
        fi
        ;;
    *-windows-*)
        echo "$0: TARGET is $target; for Windows, give x86_64-pc-windows-gnu, whose library Microsoft's linker takes, too" >&2
        exit 2
        ;;
esac
strip=${STRIP:-${tools}strip}
if [ "$strip" != 0 ] && ! command -v "$strip" >/dev/null; then
    echo "$0: $strip is not installed; install binutils, or keep debug information by STRIP=0" >&2
    exit 1
fi
cd "$(dirname "$0")/.."

profile=${PROFILE:-dist}
case $profile in
    dev | test) built=debug ;;
    *) built=$profile ;;
esac
built=${BUILT:-${CARGO_TARGET_DIR:-target}/${TARGET:+$TARGET/}$built}
crates=kolo-capi
[ -z "${PROGRAM:-}" ] || crates="kolo-capi kolo-cli"
# It needs kolo's feature cuda, and cargo would build the others with it.
case ${PROGRAM:+$target},${FEATURES-cuda}, in *-linux-*,cuda,*) nccl=kolo-nccl ;; *) nccl= ;; esac
if [ -z "${BUILT:-}" ]; then
    for crate in $crates; do
        set -- "$@" --package "$crate"
        for feature in $(echo "${FEATURES-cuda}" | tr , ' '); do set -- "$@" --features "$crate/$feature"; done
    done
    shift
    cargo build --profile "$profile" "$@" ${nccl:+--package $nccl} ${TARGET:+--target "$TARGET"}
fi
version=$(cargo pkgid --package kolo-capi | sed 's/.*[#@]//')
case $version in
    0.*) abi=${version%.*} ;;
    *) abi=${version%%.*} ;;
esac
case $target in
    *-apple-*)
        library=libkolo.dylib
        shared=libkolo.$version.dylib
        name=libkolo.$abi.dylib
        soname=@rpath/$name
        private="-framework CoreFoundation -lobjc -liconv -lm"
        targets="-framework CoreFoundation;objc;iconv;m"
        debug=-S
        ;;
    *-windows-*)
        library=kolo.dll
        private="-lws2_32 -luserenv -lntdll -ladvapi32 -liphlpapi"
        targets="ws2_32;userenv;ntdll;advapi32;iphlpapi"
        debug=--strip-debug
        ;;
    *)
        library=libkolo.so
        shared=libkolo.so.$version
        name=libkolo.so.$abi
        soname=$name
        private="-lpthread -ldl -lm"
        targets="pthread;dl;m"
        debug=--strip-debug
        ;;
esac

to=${DESTDIR:-}$prefix
lib=$to/$libdir
mkdir -p "$to/include" "$lib/pkgconfig" "$lib/cmake/kolo"
install -m 644 include/kolo.h "$to/include/kolo.h"
install -m 644 "$built/libkolo.a" "$lib/libkolo.a"

# From the libraries to the prefix.
up=$(echo "$libdir" | sed 's,[^/][^/]*,..,g')
if [ $library = kolo.dll ]; then
    # Programs look for it in their own folder and in PATH. They link with an import library, which
    # is of one kind for mingw and of another for Microsoft.
    shared=$up/bin/kolo.dll
    soname=kolo.dll
    mkdir -p "$to/bin"
    install -m 755 "$built/kolo.dll" "$to/bin/kolo.dll"
    install -m 644 "$built/libkolo.dll.a" "$lib/libkolo.dll.a"
    names=$(mktemp)
    trap 'rm -f "$names"' EXIT
    { echo EXPORTS && sed -n 's/^[a-z].*\(kolo_[a-z0-9_]*\)(.*/\1/p' include/kolo.h; } >"$names"
    llvm-dlltool -m i386:x86-64 -D kolo.dll -d "$names" -l "$lib/kolo.lib"
else
    install -m 755 "$built/$library" "$lib/$shared"
    ln -sf "$shared" "$lib/$name"
    ln -sf "$name" "$lib/$library"
fi
[ "$strip" = 0 ] || "$strip" $debug "$lib/libkolo.a" "$lib/$shared"

if [ -n "${PROGRAM:-}" ]; then
    share=$to/share
    mkdir -p "$to/bin" "$share/bash-completion/completions" "$share/zsh/site-functions" "$share/fish/vendor_completions.d"
    for program in "$built/kolo" "$built/kolo.exe"; do
        [ -f "$program" ] || continue
        install -m 755 "$program" "$to/bin/"
        [ "$strip" = 0 ] || "$strip" $debug "$to/bin/${program##*/}"
    done
    if [ -n "$nccl" ]; then
        # By this name in a folder of its own: ldconfig would have it take the place of NVIDIA's for all programs.
        mkdir -p "$lib/kolo"
        install -m 755 "$built/libkolo_nccl.so" "$lib/kolo/libnccl.so.2"
        [ "$strip" = 0 ] || "$strip" $debug "$lib/kolo/libnccl.so.2"
    fi
    install -m 644 cli/completions/kolo "$share/bash-completion/completions/"
    install -m 644 cli/completions/_kolo "$share/zsh/site-functions/"
    install -m 644 cli/completions/kolo.fish "$share/fish/vendor_completions.d/"
    # A program for another machine does not run here.
    "$built/kolo" man "$share/man/man1" || echo "$0: there are no man pages" >&2
fi

for file in kolo-config.cmake kolo-config-version.cmake; do
    sed -e "s|@up@|$up|g" -e "s|@shared@|$shared|g" -e "s|@soname@|$soname|g" -e "s|@libraries@|$targets|g" \
        -e "s|@version@|$version|g" -e "s|@abi@|$abi|g" "capi/cmake/$file.in" >"$lib/cmake/kolo/$file"
done
cat >"$lib/pkgconfig/kolo.pc" <<END
prefix=\${pcfiledir}/../$up
libdir=\${prefix}/$libdir
includedir=\${prefix}/include

Name: kolo
Description: Collective communication for processes
URL: https://docs.rs/kolo
Version: $version
Libs: -L\${libdir} -lkolo
Libs.private: $private
Cflags: -I\${includedir}
END
echo "kolo $version is in $to"
