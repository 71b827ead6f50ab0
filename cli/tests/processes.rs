//! Real processes under real launchers: every collective, on every path, against the plain
//! reference.
//!
//! Without `KOLO_TEST_WORKER` this program is a test runner; it starts itself with it as the ranks.
//! What cannot run here is printed and counted.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "common/namespaces.rs"]
mod namespaces;
#[path = "../../tests/common/runner.rs"]
mod runner;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::Instant;

use common::{Case, DEADLINE, PATIENCE, check, free_port, ops, patient, random, wait_until};
use kolo::{Communicator, DType, ReduceOp, Transport};
use namespaces::Namespaces;
use runner::Outcome::{self, Left, NotRun, Passed};
use runner::{Test, all};

/// The variable that tells a rank what to do.
const WORKER: &str = "KOLO_TEST_WORKER";

/// The folder where ranks tell each other their progress without kolo.
const FOLDER: &str = "KOLO_TEST_FOLDER";

const TESTS: [Test; 18] = [
    ("every_collective_in_shared_memory", || collectives("auto")),
    ("every_collective_over_links_of_shared_memory", || collectives("links")),
    ("every_collective_over_tcp", || collectives("tcp")),
    ("every_collective_over_several_sockets", || collectives("sockets")),
    ("every_collective_across_declared_hosts", || collectives("hosts")),
    ("every_collective_across_network_namespaces", network_namespaces),
    ("more_than_4_gib_in_shared_memory", || huge("auto")),
    ("more_than_4_gib_over_tcp", || huge("tcp")),
    ("under_open_mpi", || launched("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe", "-n"])),
    ("under_mpich", || launched("mpirun.mpich", &["-n"])),
    ("under_srun", || launched("srun", &["--overcommit", "-n"])),
    ("under_torchrun", || launched("torchrun", &["--standalone", "--no-python", "--nproc-per-node"])),
    ("with_plain_variables", plain_variables),
    ("a_second_job_at_the_same_time", two_jobs),
    ("nobody_writes_into_registered_memory_after_a_failure", late_rank),
    ("survivors_name_a_rank_that_was_killed", killed),
    ("a_store_is_where_every_spelling_of_its_path_says", spellings),
    ("a_run_replaces_the_store_of_a_run_that_was_killed", after_a_killed_run),
];

fn main() -> ExitCode {
    if let Ok(task) = std::env::var(WORKER) {
        work(&task);
        return ExitCode::SUCCESS;
    }
    // Some wait for deadlines. Those that run with all need the memory of the machine.
    runner::run(&TESTS, if runner::all() { 1 } else { 3 })
}

// ---- The work of ranks ----

fn work(task: &str) {
    let (task, argument) = task.split_once(' ').unwrap_or((task, ""));
    let rank: usize = std::env::var("KOLO_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    let builder = Communicator::builder().timeout(PATIENCE);
    let builder = match argument {
        "late" => builder.timeout(DEADLINE),
        "tcp" => builder.transport(Transport::Tcp),
        "sockets" => builder.transport(Transport::Tcp).sockets(3),
        "links" => builder.algorithm(kolo::Algorithm::Ring),
        "hosts" => builder.host(format!("host{}", rank % 3)),
        _ => builder,
    };
    let comm = builder.connect().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    match task {
        "collectives" => all_collectives(&comm),
        "huge" => all_reduce_huge(&comm),
        "registered" => come_late(&comm),
        "endless" => return work_until_a_failure(&comm),
        other => panic!("unknown task {other}"),
    }
    println!("rank {} of {} on {} hosts over {}: done", comm.rank(), comm.world_size(), comm.host_count(), comm.transport_name());
}

fn all_collectives(comm: &Communicator) {
    for (round, op) in ops().into_iter().enumerate() {
        for (i, count) in [0, 1, 7, 1000, 60_001].into_iter().enumerate() {
            for in_place in [false, true] {
                let seed = random(round as u64, i as u64);
                let dtype = DType::ALL[(round + i) % DType::ALL.len()];
                let applicable: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|redop| redop.applies_to(dtype)).collect();
                let redop = applicable[seed as usize % applicable.len()];
                let case = Case { op, dtype, redop, count, root: seed as usize % comm.world_size(), in_place, seed };
                check(comm, case).unwrap_or_else(|error| panic!("{error} in {case:?}"));
            }
        }
    }
    // Parts, asynchronous work and registered buffers, between processes.
    let part = comm.split(comm.rank() % 2, 0).unwrap();
    let work = part.start_all_reduce(vec![1u32; 100_000], ReduceOp::Sum).unwrap();
    let mut registered = comm.alloc::<f64>(50_000).unwrap();
    registered.fill(1.0);
    comm.all_reduce(&mut registered, ReduceOp::Sum).unwrap();
    assert!(registered.iter().all(|&x| x == comm.world_size() as f64));
    assert!(work.wait().unwrap().iter().all(|&x| x as usize == part.world_size()));
    comm.barrier().unwrap();
}

/// More elements than 32 bits count.
fn all_reduce_huge(comm: &Communicator) {
    let count = (1usize << 32) + 12_345;
    let mut buf: Vec<u8> = vec![0; count];
    for (i, chunk) in buf.chunks_mut(4096).enumerate() {
        chunk.fill((i as u8).wrapping_add(comm.rank() as u8));
    }
    comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
    let n = comm.world_size();
    for (i, chunk) in buf.chunks(4096).enumerate() {
        let expected = (0..n).fold(0u8, |sum, rank| sum.wrapping_add((i as u8).wrapping_add(rank as u8)));
        assert!(chunk.iter().all(|&byte| byte == expected), "chunk {i}");
    }
}

/// Rank 0 gives up at its deadline and then uses its buffer; only then does rank 1 call.
fn come_late(comm: &Communicator) {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let tell = |what: &str| std::fs::write(folder.join(what), []).unwrap();
    let hear = |what: &str| {
        wait_until(what, || folder.join(what).exists());
    };
    let mut buf = comm.alloc::<f32>(1 << 20).unwrap();
    if comm.rank() == 0 {
        let error = comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        buf.fill(7.0);
        tell("given up");
        hear("came");
        assert!(buf.iter().all(|&x| x == 7.0), "memory changed after the failure");
    } else {
        hear("given up");
        let error = comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap_err();
        tell("came");
        // Rank 0 has reported the cause.
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}

/// Works until a rank fails, and prints the error.
fn work_until_a_failure(comm: &Communicator) {
    let mut buf = vec![1.0f32; 1000];
    for round in 0.. {
        if let Err(error) = comm.all_reduce(&mut buf, ReduceOp::Max) {
            return println!("failed: {error}");
        }
        if round == 100 {
            println!("works");
        }
    }
}

// ---- Launchers ----

fn kolo() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_kolo"))
}

fn this() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// Runs a command to its end. Returns its output if it succeeded.
fn output(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = patient(command).stdin(Stdio::null()).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?} ended with {status}:\n{text}");
    text
}

/// Returns how many ranks reported their end, and the other facts in their output.
fn done<'a>(text: &'a str, what: &'a str) -> usize {
    text.lines().filter(|line| line.contains(": done") && line.contains(what)).count()
}

fn kolo_run(ranks: usize, task: &str) -> String {
    output(Command::new(kolo()).args(["run", "-n", &ranks.to_string(), "--"]).arg(this()).env(WORKER, task))
}

/// Whether processes of this system share memory.
fn shares_memory() -> bool {
    cfg!(any(target_os = "linux", target_os = "macos", windows))
}

fn collectives(path: &str) -> Outcome {
    if !shares_memory() && path != "tcp" && path != "sockets" {
        return NotRun("kolo has no shared memory between processes on this system".to_owned());
    }
    let worlds = if all() { &[1, 2, 3, 4, 5, 8][..] } else { &[1, 2, 5] };
    for &ranks in worlds {
        let text = kolo_run(ranks, &format!("collectives {path}"));
        let over = match (path, ranks) {
            (_, 1) => "over none",
            ("tcp" | "sockets", _) => "over tcp",
            ("hosts", 2 | 3) => "over tcp",
            ("hosts", _) => "on 3 hosts over shm+tcp",
            _ => "on 1 hosts over shm",
        };
        assert_eq!(done(&text, over), ranks, "{text}");
    }
    Passed(String::new())
}

fn huge(path: &str) -> Outcome {
    const NEEDED: u64 = 11 << 30;
    if !all() {
        return Left;
    }
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    match available {
        Some(kibibytes) if kibibytes << 10 >= NEEDED => {}
        Some(kibibytes) => return NotRun(format!("{} GiB of memory are free, {} are needed", kibibytes >> 20, NEEDED >> 30)),
        None => return NotRun("it cannot be told how much memory is free".to_owned()),
    }
    assert_eq!(done(&kolo_run(2, &format!("huge {path}")), ""), 2);
    Passed(String::new())
}

/// Starts ranks by a launcher whose last option is followed by the number of ranks.
fn launched(launcher: &str, options: &[&str]) -> Outcome {
    let command = |ranks: usize| {
        let mut command = Command::new(launcher);
        command.args(options).arg(ranks.to_string()).stdin(Stdio::null());
        command
    };
    match command(1).arg(kolo()).arg("--version").output() {
        Err(error) => return NotRun(format!("{launcher}: {error}")),
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr);
            return NotRun(format!("{launcher} cannot start one process: {}", said.lines().next().unwrap_or_default()));
        }
        Ok(_) => {}
    }
    for ranks in [1, 3] {
        let text = output(command(ranks).arg(this()).env(WORKER, "collectives auto"));
        assert_eq!(done(&text, &format!("of {ranks}")), ranks, "{text}");
    }
    // The bench runs like any other program.
    let text = output(command(2).arg(kolo()).args(["bench", "all_reduce", "--sizes", "1K", "--check"]));
    assert!(text.contains("2 ranks on 1 host") && text.contains(": 0 OK"), "{text}");
    Passed(String::new())
}

fn late_rank() -> Outcome {
    if !shares_memory() {
        return NotRun("kolo has no shared memory between processes on this system".to_owned());
    }
    let folder = std::env::temp_dir().join(format!("kolo-late-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(kolo());
    command.args(["run", "-n", "2", "--grace", "240s", "--"]).arg(this()).env(WORKER, "registered late").env(FOLDER, &folder);
    let text = output(&mut command);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(done(&text, ""), 2, "{text}");
    Passed(String::new())
}

/// Starts the ranks of a job by hand.
fn by_hand(ranks: usize, port: u16, job: &str) -> Vec<std::process::Child> {
    (0..ranks)
        .map(|rank| {
            patient(&mut Command::new(this()))
                .env(WORKER, "collectives auto")
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("KOLO_JOB_ID", job)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

fn wait(children: Vec<std::process::Child>) {
    let ranks = children.len();
    for child in children {
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success() && done(&text, &format!("of {ranks}")) == 1, "{text}");
    }
}

fn plain_variables() -> Outcome {
    wait(by_hand(3, free_port(), "plain"));
    Passed(String::new())
}

fn two_jobs() -> Outcome {
    let jobs = [by_hand(2, free_port(), "first"), by_hand(3, free_port(), "second")];
    jobs.into_iter().for_each(wait);
    Passed(String::new())
}

/// Returns a new file for a store, with slashes and with the separators of this system.
fn store_file(test: &str) -> [String; 2] {
    let path = std::env::temp_dir().join(format!("kolo-{test}-{}", std::process::id()));
    let path = path.to_str().unwrap().to_owned();
    [path.replace('\\', "/"), path]
}

/// Starts ranks with a task. `store` returns the store of each.
fn start_with(ranks: usize, task: &str, transport: &str, store: impl Fn(usize) -> String) -> Vec<std::process::Child> {
    let start = |rank: usize| {
        patient(&mut Command::new(this()))
            .env(WORKER, task)
            .env("KOLO_RANK", rank.to_string())
            .env("KOLO_WORLD_SIZE", ranks.to_string())
            .env("KOLO_STORE", store(rank))
            .env("KOLO_JOB_ID", format!("job-{}", std::process::id()))
            .env("KOLO_TRANSPORT", transport)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap()
    };
    (0..ranks).map(start).collect()
}

/// Waits until ranks work, and returns what they still write.
fn working(children: &mut [std::process::Child]) -> Vec<impl std::io::BufRead + use<>> {
    use std::io::BufRead;
    let output = |child: &mut std::process::Child| {
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), "works");
        output
    };
    children.iter_mut().map(output).collect()
}

fn url_of(path: &str) -> String {
    if path.starts_with('/') { format!("file://{path}") } else { format!("file:///{path}") }
}

/// On every transport, all survivors name the rank that was killed and its process.
fn killed() -> Outcome {
    let mut measured = Vec::new();
    for transport in ["auto", "tcp"] {
        let [path, _] = store_file("killed");
        let mut children = start_with(3, "endless", transport, |_| url_of(&path));
        let mut outputs = working(&mut children);
        let pid = children[1].id();
        children[1].kill().unwrap();
        let began = Instant::now();
        for rank in [0, 2] {
            let mut text = String::new();
            std::io::Read::read_to_string(&mut outputs[rank], &mut text).unwrap();
            assert!(text.starts_with("failed: all_reduce"), "{transport}, rank {rank}: {text}");
            assert!(text.contains("rank 1 (") && text.contains(&format!("pid {pid})")), "{transport}, rank {rank}: {text}");
            assert!(children[rank].wait().unwrap().success());
        }
        measured.push(format!("{transport}: {:.0?}", began.elapsed()));
        children[1].wait().unwrap();
    }
    Passed(measured.join(", "))
}

/// Each rank spells the path of the store in another way.
fn spellings() -> Outcome {
    let [slashes, native] = store_file("spellings");
    let mut spellings = vec![url_of(&slashes), slashes.clone(), native.clone()];
    if cfg!(windows) {
        spellings.extend([url_of(&native), format!("file://{slashes}"), format!("file://{native}")]);
    }
    let children = start_with(spellings.len(), "collectives auto", "auto", |rank| spellings[rank].clone());
    wait(children);
    assert!(!PathBuf::from(native).exists(), "rank 0 removes the file");
    Passed(format!("{} spellings", spellings.len()))
}

/// A run is killed while its ranks connect, and the next run starts with the file that it leaves.
fn after_a_killed_run() -> Outcome {
    let [path, native] = store_file("left-behind");
    // A second rank never comes, so rank 0 waits with its file.
    let mut alone = Command::new(this());
    alone.env(WORKER, "collectives auto").env("KOLO_RANK", "0").env("KOLO_WORLD_SIZE", "2").env("KOLO_STORE", url_of(&path));
    let mut alone = patient(&mut alone).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("rank 0 makes no file", || std::fs::metadata(&native).is_ok_and(|file| file.len() > 0));
    alone.kill().unwrap();
    alone.wait().unwrap();
    assert!(PathBuf::from(&native).exists(), "a run that is killed leaves its file");
    wait(start_with(3, "collectives auto", "auto", |_| url_of(&path)));
    Passed(String::new())
}

fn network_namespaces() -> Outcome {
    let namespaces = match Namespaces::new("10.213.77", 3) {
        Ok(namespaces) => namespaces,
        Err(why) => return NotRun(format!("network namespaces cannot be made: {why}")),
    };
    // Two ranks on the first host, two on the second, one on the third.
    for layout in [&[0, 0, 1, 1, 2][..], &[0, 1, 2, 0]] {
        let children: Vec<_> = layout
            .iter()
            .enumerate()
            .map(|(rank, &host)| {
                patient(&mut Command::new("ip"))
                    .args(["netns", "exec", &namespaces.names[host]])
                    .arg(this())
                    .env(WORKER, "collectives auto")
                    .env("KOLO_RANK", rank.to_string())
                    .env("KOLO_WORLD_SIZE", layout.len().to_string())
                    .env("KOLO_STORE", format!("tcp://{}:29777", namespaces.address(0)))
                    .env("KOLO_SECRET", "0123456789abcdef".repeat(4))
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for child in children {
            let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
            let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
            assert!(status.success() && done(&text, "on 3 hosts over shm+tcp") == 1, "{text}");
        }
    }
    Passed(String::new())
}
