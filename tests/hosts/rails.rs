//! A rank on a host with two network interfaces, over both of which its links are striped.

use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp};

use crate::link::{OPS, counters, elements, run, sums};

/// Elements of a long operation: some seconds over a slow link.
const LONG: usize = 4 << 20;

/// How often an operation is timed.
const TIMES: usize = 7;

/// How long to wait for what has to happen.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn rank() -> ExitCode {
    let role = std::env::var("KOLO_TEST_ROLE").unwrap();
    // On the second host only.
    if role == "down" && std::env::var("KOLO_RANK").unwrap() == "1" {
        set("eth1", "down");
    }
    let comm = Communicator::from_env().unwrap();
    match &*role {
        "time" => time(&comm),
        "down" => OPS.iter().for_each(|&op| run(&comm, op)),
        interface => fail(&comm, interface),
    }
    ExitCode::SUCCESS
}

fn all_reduce(comm: &Communicator) {
    let mut buf = elements(comm.rank(), 0..LONG);
    comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
    assert!(buf == sums(comm.world_size(), 0..LONG), "a wrong sum");
}

/// Says the median time of an operation, and which part of the bytes the second interface carries.
fn time(comm: &Communicator) {
    all_reduce(comm);
    let rails = std::env::var("KOLO_RAILS").unwrap();
    let sent = || rails.split(',').map(|interface| counters(interface)[0]).collect::<Vec<u64>>();
    let before = sent();
    let mut times: Vec<Duration> = (0..TIMES)
        .map(|_| {
            let mut buf = vec![1f32; LONG];
            comm.barrier().unwrap();
            let began = Instant::now();
            comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            began.elapsed()
        })
        .collect();
    times.sort();
    let carried: Vec<u64> = sent().into_iter().zip(before).map(|(after, before)| after - before).collect();
    if comm.rank() == 0 {
        let of_second = carried.get(1).copied().unwrap_or(0) as f64 / carried.iter().sum::<u64>() as f64;
        println!("median {:.1} ms; part of eth1: {of_second:.2}", times[TIMES / 2].as_secs_f64() * 1e3);
    }
}

fn set(interface: &str, state: &str) {
    let status = Command::new("ip").args(["link", "set", interface, state]).status().unwrap();
    assert!(status.success(), "cannot set {interface} {state}");
}

/// Runs operations while an interface of rank 0's host fails and comes back.
fn fail(comm: &Communicator, interface: &str) {
    for op in OPS {
        run(comm, op);
    }
    let sent = |interface: &str| counters(interface)[0];
    let before = ["eth0", "eth1"].map(sent);
    all_reduce(comm);
    let [one, other] = [0, 1].map(|at| sent(["eth0", "eth1"][at]) - before[at]);
    let least = one.min(other) as f64 / (one + other) as f64;
    assert!(least > 0.05, "the interfaces carried {one} and {other} bytes");

    // In the middle of the operation.
    comm.barrier().unwrap();
    let before = sent(interface);
    let breaker = thread::scope(|scope| {
        let breaker = (comm.rank() == 0).then(|| {
            scope.spawn(|| {
                let began = Instant::now();
                while sent(interface) < before + (512 << 10) {
                    assert!(began.elapsed() < PATIENCE, "{interface} carries nothing");
                    thread::sleep(Duration::from_millis(1));
                }
                set(interface, "down");
                Instant::now()
            })
        });
        all_reduce(comm);
        breaker.map(|breaker| breaker.join().unwrap())
    });
    let after = breaker.map(|down| down.elapsed());
    for op in OPS {
        run(comm, op);
    }

    // All ranks go on until the interface carries its part again.
    let before = sent(interface);
    if comm.rank() == 0 {
        set(interface, "up");
    }
    let began = Instant::now();
    loop {
        let mut done = [u64::from(sent(interface) > before + (8 << 20))];
        comm.broadcast(&mut done, 0).unwrap();
        if done[0] != 0 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{interface} carries nothing");
        all_reduce(comm);
    }
    if let Some(after) = after {
        println!(
            "the operation ended {after:.1?} after {interface} failed; {interface} carried a part again after {:.1?}",
            began.elapsed()
        );
    }
}
