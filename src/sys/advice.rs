//! Advice for users, where systems differ.

/// Returns how to remove a variable from the environment.
pub(crate) fn how_to_remove(variable: &str) -> String {
    match cfg!(windows) {
        true => format!("`set {variable}=` in cmd, `Remove-Item Env:{variable}` in PowerShell"),
        false => format!("`unset {variable}`, or `env -u {variable}` before one command"),
    }
}

/// What to do if no name server answers.
pub(super) const NAME_SERVERS: &str = if cfg!(windows) {
    "no name server answered in time; check those of this machine (ipconfig /all), or give an address instead of the name"
} else {
    "no name server answered in time; check /etc/resolv.conf, or give an address instead of the name"
};

/// What to do if there is no memory to share.
pub(crate) const MORE_MEMORY: &str = if cfg!(target_os = "macos") {
    "ranks of one machine use TCP, which is slower; end programs that use much memory"
} else if cfg!(windows) {
    "ranks of one machine use TCP, which is slower; end programs that use much memory, or let the page file grow"
} else {
    "ranks of one machine use TCP, which is slower; raise the memory limit of the container or of `ulimit -v` (Linux only)"
};

/// What to do if processes of this machine cannot find each other.
pub(crate) const LOCAL_CONNECTIONS: &str = if cfg!(target_os = "macos") {
    "ranks of one machine use TCP; let this user make folders in the one that `getconf DARWIN_USER_CACHE_DIR` prints"
} else if cfg!(windows) {
    "ranks of one machine use TCP; let this process create named objects of its session"
} else {
    "ranks of one machine use TCP; on Linux, allow abstract Unix sockets"
};

/// The call that reads the memory of another process.
pub(crate) const READING_CALL: &str = if cfg!(windows) { "ReadProcessMemory" } else { "process_vm_readv" };

/// What to do if processes cannot read each other's memory.
pub(crate) const READING: &str = if cfg!(target_os = "macos") {
    "large private buffers pass through shared memory instead, which may be slower; registered buffers are not copied"
} else if cfg!(windows) {
    "large private buffers pass through shared memory instead, which may be slower; run all ranks as one user, with the same \
     privileges"
} else {
    "large private buffers pass through shared memory instead, which may be slower; set kernel.yama.ptrace_scope=0, or give the \
     container CAP_SYS_PTRACE"
};
