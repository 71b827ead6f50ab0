//! Options of other launchers and benchmarks, and what kolo has in their place.

/// Options without their dashes, and the advice. A `_` in an option counts as a `-`.
type Advice = (&'static [&'static str], &'static str);

/// Options of mpirun, mpiexec, torchrun, horovodrun and srun.
const RUN: [Advice; 16] = [
    (
        &["np", "c", "nproc", "num-proc", "num-processes", "ntasks", "ppn", "nproc-per-node", "ntasks-per-node", "npernode"],
        "'-n 4' starts four ranks, '--hosts a:4,b:4' four on each host",
    ),
    (
        &["nnodes", "nodes", "N", "node-rank", "num-machines", "nodelist"],
        "'--hosts a:4,b:4' starts the ranks of all hosts from here",
    ),
    (&["machinefile", "hostfile", "f"], "write '--hostfile'"),
    (&["host", "hosts"], "write '--hosts a:4,b:4'"),
    (
        &["master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "local-addr"],
        "leave it out: the launcher has a store; '--address' is where other hosts reach it",
    ),
    (
        &["kill-on-bad-exit", "no-kill", "enable-recovery"],
        "with '--keep-going', the other ranks go on; '--max-restarts 3' starts all again",
    ),
    (&["wdir", "wd", "chdir", "workdir", "cwd"], "write '--directory'"),
    (&["env", "genv", "export"], "write '-x NAME=VALUE', or '-x NAME'"),
    (&["start-timeout"], "'--connect-timeout' is that of the hosts, KOLO_START_TIMEOUT that of the ranks"),
    (&["ssh-port", "ssh-identity-file"], "write '--ssh \"ssh -p 2222 -i FILE\"'"),
    (&["network-interface", "network-interfaces", "iface", "interface"], "set KOLO_INTERFACE"),
    (
        &["tag-output", "label", "l", "prepend-rank"],
        "leave it out: each line begins with its rank, unless '--no-prefix' is given",
    ),
    (&["oversubscribe", "allow-run-as-root"], "leave it out: any user may start any number of ranks"),
    (
        &["map-by", "rank-by", "cpu-bind", "cpus-per-task", "numa-binding"],
        "'--bind-to core', 'l3' or 'numa' binds ranks to processors",
    ),
    (&["output-filename", "redirects", "r", "o", "output"], "write '--log-dir FOLDER', with '--tee' to see it here, too"),
    (&["verbose", "log-level"], "set KOLO_LOG=debug"),
];

/// Options of nccl-tests. Others have the same names here.
const BENCH: [Advice; 2] = [
    (&["g", "ngpus", "t", "nthreads"], "'kolo run -n 4 -- bench' measures four ranks, which share the GPUs with '--device cuda'"),
    (&["i", "stepbytes"], "write '--sizes 1M,2M,3M'"),
];

/// Returns the advice for an option of a command, as it was written.
pub(crate) fn advice(command: &str, option: &str) -> Option<&'static str> {
    let all = match command {
        "run" => &RUN[..],
        "bench" => &BENCH,
        _ => return None,
    };
    let name = option.trim_start_matches('-').replace('_', "-");
    all.iter().find(|(options, _)| options.contains(&&*name)).map(|(_, advice)| *advice)
}
