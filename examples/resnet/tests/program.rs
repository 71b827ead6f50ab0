//! The program as users run it: processes, arguments, files, and ranks that are killed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A time that only a defect takes, even on a busy machine. It is shorter than the limit of CI.
const LONG: Duration = Duration::from_secs(600);

/// A small net's small run: twelve steps an epoch, each with a checkpoint.
const SMALL: &str =
    "--shapes --images 96 -a resnet20 --image-size 8 -b 8 --lr 0.02 --lr-decay cosine -j 2 -p 1 --threads 1 --seed 5";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("kolo-resnet-program-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn join(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn resnet(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_resnet"));
    command.args(line.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Hide the variables of launchers around the tests.
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "KOLO_RANK", "KOLO_WORLD_SIZE", "KOLO_STORE", "KOLO_STORE_SERVED", "KOLO_JOIN"]
    {
        command.env_remove(name);
    }
    command.env("KOLO_START_TIMEOUT", "15m");
    command
}

fn finish(mut command: Command) -> Output {
    end(command.spawn().unwrap())
}

/// Waits for the end of the process, with a deadline.
fn end(mut child: std::process::Child) -> Output {
    fn read(pipe: Option<impl std::io::Read>) -> Vec<u8> {
        let mut bytes = Vec::new();
        pipe.map(|mut pipe| pipe.read_to_end(&mut bytes).unwrap());
        bytes
    }
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let reader = std::thread::spawn(move || read(err));
    let waiter = std::thread::spawn(move || {
        let began = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if began.elapsed() > LONG {
                child.kill().unwrap();
                panic!("it did not end in {LONG:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let stdout = read(out);
    Output { status: waiter.join().unwrap(), stdout, stderr: reader.join().unwrap() }
}

fn succeed(line: &str) -> String {
    let output = finish(resnet(line));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn fail(line: &str) -> String {
    let output = finish(resnet(line));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{line} succeeded");
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Step and loss, as they were written.
fn losses(run: &str) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps = events.filter(|event| event["kind"] == "step");
    steps.map(|event| (event["step"].as_u64().unwrap(), event["loss"].to_string())).collect()
}

#[test]
fn it_trains_reports_draws_and_tests() {
    let folder = Folder::new("whole");
    let (one, two) = (folder.join("one"), folder.join("two"));
    let plot = folder.join("one.svg");
    let text = succeed(&format!("{SMALL} --epochs 2 --output {one} --plot {plot}"));
    assert!(text.contains("resnet20 on 1 ranks") && text.contains("epoch 2/2 in"), "{text}");
    assert!(std::fs::read_to_string(&plot).unwrap().contains("loss in training"));
    let text = succeed(&format!("{SMALL} --epochs 2 --nproc 2 --output {two}"));
    assert!(text.contains("resnet20 on 2 ranks, 1 hosts"), "{text}");
    // The loss of 1 and 2 ranks differs by what batch normalisation sees, and not by much.
    assert_eq!((losses(&one).len(), losses(&two).len()), (24, 24));
    let plot = folder.join("both.svg");
    let table = succeed(&format!("report {two} {one} --plot {plot}"));
    let rows: Vec<&str> = table.lines().collect();
    assert!(rows[0].contains("efficiency") && rows[2].contains("| one ") && rows[3].contains("| two "), "{table}");
    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(["scaling efficiency", "seconds an epoch", "time spent computing"].iter().all(|panel| drawn.contains(panel)));
    // The best weights, as a file that others read, tested by another number of ranks.
    let text = succeed(&format!("{SMALL} -e --nproc 3 --weights {}", folder.join("two/best.safetensors")));
    assert!(text.contains("24 images: loss"), "{text}");
    let error = fail(&format!("{SMALL} --epochs 2 --output {one}"));
    assert!(error.contains("has a run already") && error.contains("--resume"), "{error}");
    // A run continues in its own folder, by any name, but not in the folder of another run.
    let before = losses(&one);
    let error = fail(&format!("{SMALL} --epochs 3 --resume {two} --output {one}"));
    assert!(error.contains("has a run already"), "{error}");
    assert_eq!(losses(&one), before);
    succeed(&format!("{SMALL} --epochs 3 --resume {one} --output {one}/../one"));
    assert_eq!(losses(&one).len(), 36);
}

#[test]
fn it_runs_under_launchers() {
    let folder = Folder::new("launchers");
    // By the environment, as torchrun and srun do; here with a file as the store.
    let start = |rank: usize, more: &str| {
        let run = folder.join("run");
        let mut command = resnet(&format!("{SMALL} --epochs 1 --output {run} {more}"));
        command.env("KOLO_START_TIMEOUT", "60");
        if more.is_empty() {
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
            command.env("KOLO_STORE", format!("file://{}", folder.join("store")));
        }
        command
    };
    let pair = |commands: [Command; 2]| {
        let threads = commands.map(|command| std::thread::spawn(move || finish(command)));
        for output in threads.map(|thread| thread.join().unwrap()) {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        assert_eq!(losses(&folder.join("run")).len(), 12);
        std::fs::remove_dir_all(folder.join("run")).unwrap();
    };
    pair([0, 1].map(|rank| start(rank, "")));
    let url = format!("file://{}", folder.join("rendezvous"));
    pair([0, 1].map(|rank| start(rank, &format!("--world-size 2 --rank {rank} --dist-url {url}"))));
}

/// Small images in folders, eight of each class.
fn images(folder: &Folder) {
    for part in ["train", "val"] {
        for class in ["a", "b"] {
            let place = folder.0.join(part).join(class);
            std::fs::create_dir_all(&place).unwrap();
            for i in 0..8 {
                image::RgbImage::from_pixel(9, 9, image::Rgb([i * 20; 3])).save(place.join(format!("{i}.png"))).unwrap();
            }
        }
    }
}

/// Returns a free port of this machine.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The commands that PyTorch's ImageNet example is started with.
#[test]
fn ranks_meet_where_the_command_line_says() {
    let folder = Folder::new("meet");
    images(&folder);
    let dir = folder.0.display();
    let small = "-a resnet20 --image-size 8 -b 4 --epochs 1 -j 1 --threads 1 -p 1";
    let cores = std::thread::available_parallelism().unwrap().get().min(4);
    let url = |name: &str| match name {
        "tcp" => format!("tcp://127.0.0.1:{}", free_port()),
        name => format!("file://{}", folder.join(name)),
    };
    // A rank for each core, of one node; as many as asked for.
    for (i, kind) in ["tcp", "store"].into_iter().enumerate() {
        let run = folder.join(&format!("all-{i}"));
        let batch = 4 * std::thread::available_parallelism().unwrap().get();
        let line = format!(
            "{dir} --dist-url {} --multiprocessing-distributed --world-size 1 --rank 0 {small} -b {batch} --output {run}",
            url(kind)
        );
        assert!(succeed(&line).contains("ranks, 1 hosts"), "{line}");
        let run = folder.join(&format!("some-{i}"));
        let said = succeed(&format!("{dir} --dist-url {} --nproc {cores} {small} --output {run}", url(kind)));
        assert!(said.contains(&format!("on {cores} ranks, 1 hosts")), "{said}");
    }
    // Two nodes, both on this machine. Over TCP they need a common secret, or a store that no other
    // machine reaches.
    for (i, kind) in ["tcp", "nodes"].into_iter().enumerate() {
        let url = url(kind);
        let start = |node: usize| {
            let run = folder.join(&format!("two-{i}"));
            let mut command =
                resnet(&format!("{dir} --dist-url {url} --nproc 2 --world-size 2 --rank {node} {small} --output {run}"));
            command.env("KOLO_SECRET", "5".repeat(64)).env("KOLO_START_TIMEOUT", "60");
            std::thread::spawn(move || finish(command))
        };
        for (node, output) in [0, 1].map(start).map(|thread| thread.join().unwrap()).into_iter().enumerate() {
            assert!(output.status.success(), "{url}, node {node}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn mistakes_are_named_and_nothing_hangs() {
    let folder = Folder::new("mistakes");
    std::fs::write(folder.join("checkpoint"), "something else").unwrap();
    std::fs::create_dir(folder.join("empty")).unwrap();
    for (line, hints) in [
        ("", &["DIR", "--dummy"][..]),
        ("/nowhere/images", &["/nowhere/images/train", "cannot be read"]),
        (&folder.join("empty"), &["train"]),
        ("--shapes -b 1 --nproc 2", &["--batch-size 1", "2 ranks"]),
        ("--shapes --global-batch 7 --nproc 2", &["--global-batch 7", "2 ranks"]),
        ("--shapes --rank 1", &["--world-size"]),
        ("--shapes --rank 2 --world-size 2 --nproc 2", &["--rank 2"]),
        ("--shapes --world-size 2 --nproc 2", &["counts nodes", "--rank"]),
        ("--shapes --plot /nowhere/run.svg", &["/nowhere/run.svg", "cannot be written"]),
        (&format!("--shapes --resume {}", folder.join("checkpoint")), &["not a checkpoint"]),
        (&format!("--shapes --resume {}", folder.join("empty")), &["empty/checkpoint", "cannot be read"]),
        (&format!("--shapes --weights {}", folder.join("checkpoint")), &["no safetensors"]),
        ("report /nowhere", &["/nowhere/metrics.jsonl"]),
        ("--shapes --dist-url carrier://pigeon --rank 0 --world-size 2", &["carrier://pigeon"]),
    ] {
        let error = fail(line);
        assert!(hints.iter().all(|hint| error.contains(hint)), "{line}: {error}");
    }
    let (run, error) =
        (folder.join("diverged"), fail(&format!("{SMALL} --lr 1e30 --epochs 1 --output {}", folder.join("diverged"))));
    assert!(error.contains("the loss is") && error.contains("--lr"), "{run}: {error}");
}

#[test]
fn a_misspelt_net_is_named_with_the_nearest() {
    assert!(fail("--shapes -a resnet21").contains("a similar value exists: 'resnet20'"));
}

#[test]
fn a_batch_larger_than_the_data_is_told_once() {
    let folder = Folder::new("larger");
    let small = "--shapes --images 12 -a resnet20 --image-size 8 --epochs 1 --threads 1 --nproc 2 --seed 5";
    let said = |more: &str, run: &str| {
        let output = finish(resnet(&format!("{small} {more} --output {}", folder.join(run))));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    for (run, more, option) in [("node", "-b 64", "--batch-size (-b)"), ("all", "--global-batch 64", "--global-batch")] {
        let said = said(more, run);
        let warning = "a step takes 64 images, and there are 12: each epoch is one step of 12 images; give a smaller";
        assert_eq!(said.matches(&format!("{warning} {option}")).count(), 1, "{said}");
    }
    assert!(!said("-b 12", "fits").contains("a step takes"));
}

#[test]
fn tasks_of_a_launcher_start_no_ranks() {
    let mut command = resnet("--shapes --nproc 2");
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "1");
    let output = finish(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("this process is one of 2 tasks (plain variables)"), "{said}");
}

#[test]
fn a_launcher_does_not_join() {
    let mut command = resnet(&format!("{SMALL} --nproc 2 --elastic"));
    command.env("KOLO_JOIN", "1");
    let output = finish(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("leave out --nproc"), "{said}");
}

/// The first difference is named on both ranks, with both values.
#[test]
fn ranks_that_were_given_different_things_say_so() {
    let folder = Folder::new("differ");
    let [one, other] = ["one", "other"].map(|name| {
        let folder = Folder(folder.0.join(name));
        images(&folder);
        let place = folder.join("");
        std::mem::forget(folder);
        place
    });
    std::fs::rename(format!("{other}train/b"), format!("{other}train/c")).unwrap();
    std::fs::rename(format!("{other}val/b"), format!("{other}val/c")).unwrap();
    let small = "-a resnet20 --image-size 8 -b 4 --epochs 1 --threads 1";
    let lines: [[String; 2]; 3] = [
        [format!("--shapes {small} --lr 0.1"), format!("--shapes {small} --lr 0.2")],
        [format!("--shapes {small}"), format!("--shapes {small} --checkpoint-every 3")],
        [format!("{one} {small}"), format!("{other} {small}")],
    ];
    let hints = [["--lr 0.1", "--lr 0.2"], ["nothing", "--checkpoint-every 3"], ["class 1 b", "class 1 c"]];
    for (i, (lines, hints)) in lines.iter().zip(hints).enumerate() {
        let url = format!("file://{}", folder.join(&format!("store-{i}")));
        let start = |rank: usize| {
            let run = folder.join(&format!("run-{i}"));
            let line = format!("{} --output {run} --world-size 2 --rank {rank} --dist-url {url}", lines[rank]);
            std::thread::spawn(move || fail(&line))
        };
        for said in [0, 1].map(start).map(|thread| thread.join().unwrap()) {
            assert!(hints.iter().all(|hint| said.contains(hint)) && said.contains("rank 1 has"), "{said}");
        }
    }
}

/// An image that cannot be read ends all ranks, with its name.
#[test]
fn a_damaged_image_is_named() {
    let folder = Folder::new("damaged");
    images(&folder);
    std::fs::write(folder.0.join("train/b/3.png"), "damaged").unwrap();
    let error =
        fail(&format!("{} -a resnet20 --image-size 8 -b 8 --nproc 2 --output {}", folder.0.display(), folder.join("run")));
    assert!(error.contains("train/b/3.png"), "{error}");
}

#[cfg(target_os = "linux")]
mod killed {
    use super::*;

    /// Whether all cases are tried: `KOLO_TEST_ALL=1`.
    fn all() -> bool {
        std::env::var_os("KOLO_TEST_ALL").is_some()
    }

    /// The ranks that a launcher has started.
    fn ranks(launcher: u32) -> Vec<u32> {
        let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    fn kill(pid: u32) {
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        // The process may just have ended.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }

    /// Returns whether a process has ended, even if its parent has not waited for it.
    fn has_ended(pid: u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        status.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    }

    /// A random number, from the time.
    fn random(below: u64) -> u64 {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let mut z = time.as_nanos() as u64;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 31)) % below
    }

    #[test]
    fn with_elastic_the_ranks_that_are_left_go_on() {
        let folder = Folder::new("elastic");
        let run = folder.join("run");
        // The first rank is the one that writes.
        for killed in [1, 0] {
            let _ = std::fs::remove_dir_all(&run);
            let command = resnet(&format!("{SMALL} -b 12 --epochs 15 --nproc 3 --elastic --output {run}"));
            let mut launcher = { command }.spawn().unwrap();
            let metrics = Path::new(&run).join("metrics.jsonl");
            let began = Instant::now();
            // Usually in the middle of the second epoch.
            while std::fs::read_to_string(&metrics).map_or(0, |text| text.matches("\"step\"").count()) < 20 {
                assert!(began.elapsed() < LONG && launcher.try_wait().unwrap().is_none());
                std::thread::sleep(Duration::from_millis(2));
            }
            kill(ranks(launcher.id())[killed]);
            let output = end(launcher);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
            let said = text(&output.stdout);
            assert!(said.contains("2 of 3 ranks continue") && said.contains("epoch 15/15 in"), "{said}");
            let events = std::fs::read_to_string(&metrics).unwrap();
            assert_eq!(events.matches("\"kind\":\"shrink\"").count(), 1);
            assert_eq!(events.matches("\"kind\":\"epoch\"").count(), 15);
        }
    }

    #[test]
    fn with_max_restarts_a_killed_rank_is_replaced() {
        let folder = Folder::new("replaced");
        let run = folder.join("run");
        // The first rank is the one that writes, and that admits newcomers.
        for killed in [1, 0] {
            let _ = std::fs::remove_dir_all(&run);
            // More epochs than the test waits for.
            let options = "-b 12 --epochs 1000000 --nproc 3 --elastic --max-restarts 1";
            let mut launcher = resnet(&format!("{SMALL} {options} --output {run}")).stdout(Stdio::null()).spawn().unwrap();
            let metrics = Path::new(&run).join("metrics.jsonl");
            let events = || -> Vec<serde_json::Value> {
                let text = std::fs::read_to_string(&metrics).unwrap_or_default();
                // The last line may be incomplete.
                text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
            };
            let wait_until = |launcher: &mut std::process::Child, what: &str, holds: &dyn Fn(&[serde_json::Value]) -> bool| {
                let began = Instant::now();
                while !holds(&events()) {
                    assert!(began.elapsed() < LONG && launcher.try_wait().unwrap().is_none(), "{what}");
                    std::thread::sleep(Duration::from_millis(20));
                }
            };
            let of = |events: &[serde_json::Value], kind: &str| events.iter().filter(|event| event["kind"] == kind).count();
            wait_until(&mut launcher, "two epochs", &|events| of(events, "epoch") >= 2);
            kill(ranks(launcher.id())[killed]);
            // Two whole epochs of all ranks follow.
            let after = |events: &[serde_json::Value]| {
                let at = events.iter().position(|event| event["kind"] == "grow");
                at.map_or(0, |at| of(&events[at..], "epoch"))
            };
            wait_until(&mut launcher, "two epochs of the larger world", &|events| after(events) >= 2);
            launcher.kill().unwrap();
            let said = String::from_utf8_lossy(&launcher.wait_with_output().unwrap().stderr).into_owned();
            assert!(
                said.contains(&format!("rank {killed} (pid ")) && said.contains("joins at the next epoch (restarts left: 0)"),
                "{said}"
            );
            let events = events();
            let find = |kind: &str| events.iter().find(|event| event["kind"] == kind).unwrap();
            assert_eq!((&find("shrink")["ranks"], &find("grow")["ranks"]), (&2.into(), &3.into()));
            // No epoch is lost or repeated, and each counts all images.
            let epochs: Vec<u64> =
                events.iter().filter(|event| event["kind"] == "epoch").map(|event| event["epoch"].as_u64().unwrap()).collect();
            assert_eq!(epochs, (1..=epochs.len() as u64).collect::<Vec<_>>());
            assert!(events.iter().filter(|event| event["kind"] == "step").all(|step| step["loss"].as_f64().unwrap().is_finite()));
        }
    }

    #[test]
    fn with_elastic_two_of_four_may_be_killed_one_after_the_other() {
        let folder = Folder::new("elastic-two");
        let run = folder.join("run");
        // The rank that writes and its successor; two other ranks; and two ranks before any rank
        // has continued.
        for (killed, waits) in [([0, 1], true), ([3, 1], true), ([0, 2], false)] {
            let _ = std::fs::remove_dir_all(&run);
            let command = resnet(&format!("{SMALL} -b 12 --epochs 12 --nproc 4 --elastic --output {run}"));
            let mut launcher = { command }.spawn().unwrap();
            let metrics = Path::new(&run).join("metrics.jsonl");
            let began = Instant::now();
            let wait_for = |launcher: &mut std::process::Child, text: &str, count: usize| {
                while std::fs::read_to_string(&metrics).map_or(0, |all| all.matches(text).count()) < count {
                    assert!(began.elapsed() < LONG && launcher.try_wait().unwrap().is_none(), "{text}");
                    std::thread::sleep(Duration::from_millis(2));
                }
            };
            wait_for(&mut launcher, "\"kind\":\"step\"", 12);
            let pids = ranks(launcher.id());
            kill(pids[killed[0]]);
            if waits {
                wait_for(&mut launcher, "\"kind\":\"shrink\"", 1);
            }
            kill(pids[killed[1]]);
            let output = end(launcher);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert!(output.status.success(), "{killed:?}: {}{}", text(&output.stdout), text(&output.stderr));
            let events = std::fs::read_to_string(&metrics).unwrap();
            let events: Vec<serde_json::Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let of = |kind: &'static str| events.iter().filter(move |event| event["kind"] == kind);
            assert_eq!(of("shrink").next_back().unwrap()["ranks"], 2);
            let epochs: Vec<u64> = of("epoch").map(|event| event["epoch"].as_u64().unwrap()).collect();
            assert_eq!(epochs, (1..=12).collect::<Vec<_>>());
        }
    }

    /// Returns the identity of a checkpoint, which differs from that of any other.
    fn checkpoint(run: &str) -> Option<(std::time::SystemTime, u64)> {
        let metadata = std::fs::metadata(Path::new(run).join("checkpoint")).ok()?;
        Some((metadata.modified().ok()?, std::os::unix::fs::MetadataExt::ino(&metadata)))
    }

    #[test]
    fn a_run_killed_many_times_has_the_losses_of_one_that_was_not() {
        // At least three times the steps that pass before the last kill.
        let (epochs, kills_wanted) = if all() { (40, 20) } else { (12, 6) };
        let folder = Folder::new("killed");
        let (whole, run) = (folder.join("whole"), folder.join("run"));
        let line = format!("{SMALL} --epochs {epochs} --nproc 2 --checkpoint-every 1");
        succeed(&format!("{line} --output {whole}"));
        let mut kills = 0;
        for attempt in 0.. {
            let before = checkpoint(&run);
            let place = if before.is_some() { format!("--resume {run}") } else { format!("--output {run}") };
            // Before the first checkpoint there is nothing to resume from, and the output is not
            // used.
            if before.is_none() {
                let _ = std::fs::remove_dir_all(&run);
            }
            let mut command = resnet(&format!("{line} {place}"));
            if kills == kills_wanted {
                let output = finish(command);
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                break;
            }
            let mut launcher = command.stdout(Stdio::null()).spawn().unwrap();
            // Sometimes while the run starts, which does not count as one of the twenty.
            let counts = attempt % 5 != 4;
            let started = Instant::now();
            if !counts {
                std::thread::sleep(Duration::from_millis(random(300)));
            }
            // A few steps, each with a checkpoint: the run is killed long before its end.
            let (mut last, mut steps) = (before, if counts { 1 + random(8) } else { 0 });
            while steps > 0 {
                assert!(started.elapsed() < LONG, "no checkpoint in {LONG:?}");
                assert!(launcher.try_wait().unwrap().is_none(), "it ended by itself after {kills} kills");
                std::thread::sleep(Duration::from_millis(1));
                let now = checkpoint(&run);
                if now != last {
                    (last, steps) = (now, steps - 1);
                }
            }
            assert!(launcher.try_wait().unwrap().is_none(), "it ended by itself after {kills} kills");
            let ranks = ranks(launcher.id());
            if counts && attempt % 2 == 0 {
                // One rank: the other rank reports it and stops before its launcher would end it.
                let killed = random(2) as usize;
                kill(ranks[killed]);
                let output = end(launcher);
                let text = String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success() && text.contains(&format!("rank {killed} (pid {})", ranks[killed])), "{text}");
                let other = 1 - killed;
                assert!(text.contains(&format!("resnet: rank {other}: ")), "{text}");
                assert!(text.contains(&format!("rank {other} (pid {}) ended: exit status: 1", ranks[other])), "{text}");
            } else {
                // The launcher: its ranks end with it.
                kill(launcher.id());
                end(launcher);
                let killed = Instant::now();
                while !ranks.iter().all(|&rank| has_ended(rank)) {
                    assert!(killed.elapsed() < LONG, "a rank outlived its launcher");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            kills += usize::from(counts);
        }
        assert_eq!(losses(&run), losses(&whole));
        assert_eq!(losses(&run).len(), 12 * epochs);
    }
}
