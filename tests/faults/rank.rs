//! The tasks of the ranks. A rank writes lines about what happens to it, with times of the clock
//! that all processes of a machine share.

use std::io::Write;
use std::time::{Duration, Instant};

use kolo::{Communicator, Error, Op, ReduceOp, Result, Waited, Work, WorkError};

use crate::failure::{Failure, kind};
use crate::system::{self, Belongings, has_ended, sockets};
use crate::{bystander, log};

/// The variable with the task of a rank.
pub(crate) const WORKER: &str = "KOLO_TEST_WORKER";

/// The variable with the deadline of its operations, in milliseconds.
pub(crate) const DEADLINE: &str = "KOLO_TEST_DEADLINE";

/// Elements of the registered buffer of the task `registered`: much more than other programs use
/// meanwhile.
pub(crate) const REGISTERED: usize = 8 << 20;

/// How a task ended early.
pub(crate) enum End {
    /// This call failed.
    Failed(Failed),
    /// The rank drops the communicator, and then runs this check.
    Leaves(Box<dyn FnOnce()>),
}

/// An error, and the call as this rank made it; `None` if the library made the call.
pub(crate) struct Failed {
    pub(crate) error: Error,
    pub(crate) call: Option<(Op, u64)>,
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Failed(Failed { error, call: None })
    }
}

impl<B> From<WorkError<B>> for End {
    fn from(failed: WorkError<B>) -> End {
        Error::from(failed).into()
    }
}

fn leaves() -> End {
    End::Leaves(Box::new(|| {}))
}

/// The result of a task. Ranks that stay to the end return `Ok`.
pub(crate) type Task = Result<(), End>;

pub(crate) fn work(task: &str) {
    system::warm_up();
    log::say_all();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let deadline = Duration::from_millis(number(DEADLINE).unwrap_or(60_000));
    let before = Belongings::count();
    system::prepare(task);
    if task == "crowd" {
        say("begins");
    }
    let comm = match system::connecting(|| Communicator::builder().timeout(deadline).connect()) {
        Ok(comm) => comm,
        Err(error) => return say(&format!("refused {}: {error}", kind(&error))),
    };
    say(&format!("connected {} {}", comm.transport_name(), Belongings::count().regions));
    let mut look: Box<dyn FnOnce()> = Box::new(|| {});
    match run_task(task, &comm) {
        Ok(()) => return say("done"),
        Err(End::Leaves(then)) => look = then,
        Err(End::Failed(Failed { error, call })) => {
            say(&format!("failed {}", Failure::of(&error, call)));
            check_revoked(&comm, &error);
            match task {
                "shrink" => shrink(&comm),
                // Until all have learnt of the failure.
                "split apart" => await_line(),
                _ => {}
            }
        }
    }
    let began = Instant::now();
    drop(comm);
    say(&format!("dropped {}", began.elapsed().as_micros()));
    look();
    leftovers(&before);
}

fn run_task(task: &str, comm: &Communicator) -> Task {
    let rank = comm.rank();
    let calls = Calls::of(comm);
    match task {
        "once" | "crowd" => Ok(comm.barrier()?),
        "unlinked" => unlinked(comm),
        "bystander" => Err(bystander::beside_an_operation(comm).into()),
        "differ" => differ(comm),
        "drop" => drop_with_work(comm),
        "registered" => registered(comm),
        "split" => split(comm, 0, |_| Ok(())),
        "split apart" => split(comm, usize::from(rank == 2), Communicator::barrier),
        "last words" => last_words(comm),
        "messages" => messages(comm),
        "part fails" => part_fails(comm),
        "tags" | "many tags" | "tags at the end" => tags(comm, task),
        "any" | "any of some" => any(comm, task == "any"),
        "ended" => receives_from_the_ended(comm),
        "crossed" => crossed(comm),
        "arrivals" => arrivals(comm),
        "parts" => {
            let part = comm.split([0, 1, 1, 2][rank], 0)?;
            match rank {
                1 => {
                    say("ready");
                    sleep()
                }
                2 => Calls::of(&part).call(Op::Barrier, |part| part.barrier()),
                // The number of collectives in a split is not specified, so the call is not
                // counted.
                _ => Ok(comm.broadcast(&mut [0u8; 8], 2)?),
            }
        }
        // Rank 1 lives, but makes no more calls.
        "late" if rank == 1 => {
            collectives(calls, Duration::MAX, 20)?;
            say("late");
            sleep()
        }
        "leave" if rank == 2 => {
            collectives(calls, Duration::MAX, 20)?;
            Err(leaves())
        }
        "work" | "pipe" | "late" | "leave" | "shrink" => collectives(calls, Duration::MAX, usize::MAX),
        other => system::run_task(other, comm),
    }
}

/// Rank 0 waits for rank 1 in one communicator, and ranks 1 and 2 wait for rank 0 in another one. No rank
/// waits for rank 3.
fn crossed(comm: &Communicator) -> Task {
    let other = comm.split(0, comm.rank())?;
    for comm in [comm, &other] {
        // All ranks have links.
        comm.all_to_all_v(&[0u8; 4], &[1; 4], &mut [0u8; 4], &[1; 4])?;
    }
    say("ready");
    let error = match comm.rank() {
        0 => comm.recv(&mut [0u8; 8], 1).unwrap_err(),
        3 => sleep(),
        _ => other.recv(&mut [0u8; 8], 0).unwrap_err(),
    };
    say(&format!("failed {}", Failure::of(&error, None)));
    // Rank 0 must not tell by its end.
    await_line();
    Err(leaves())
}

/// Rank 1 leaves and ends, then rank 0 receives from it.
fn receives_from_the_ended(comm: &Communicator) -> Task {
    let mut processes = [0u32; 2];
    comm.all_gather(&[std::process::id()], &mut processes)?;
    if comm.rank() == 1 {
        return Err(leaves());
    }
    while !has_ended(processes[1]) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Calls::of(comm).call(Op::Recv, |comm| comm.recv(&mut [0u8; 4], 1))
}

/// Rank 0 sends messages with tags, of which rank 1 receives the one with tag 9. Then it receives one that
/// does not come, or leaves.
fn tags(comm: &Communicator, task: &str) -> Task {
    // Three of these fit into the queue of a peer.
    let size = if task == "many tags" { 20 << 20 } else { 100 };
    if comm.rank() == 0 {
        let tags = if task == "many tags" { vec![5, 7, 6, 8, 4] } else { vec![5, 7, 7, 9] };
        let works: Vec<_> =
            tags.into_iter().map(|tag| comm.start_send_tagged(vec![tag as u8; size], 1, tag)).collect::<Result<_, _>>()?;
        if task != "many tags" {
            works.into_iter().try_for_each(|work| work.wait().map(drop))?;
        }
        say("ready");
        if task == "tags" {
            sleep()
        } else {
            await_line()
        }
        return Err(leaves());
    }
    let mut got = vec![0u8; size];
    if task != "many tags" {
        comm.recv_tagged(&mut got, 0, 9)?;
    }
    say("ready");
    await_line();
    if task == "tags at the end" {
        return Err(leaves());
    }
    if task == "tags" {
        // It has arrived, and its sender is gone, which another thread may have noticed.
        comm.recv_tagged(&mut got, 0, 5)?;
        assert_eq!(got, [5; 100]);
    }
    Ok(comm.recv_tagged(&mut got, 0, 4)?)
}

/// Rank 0 receives from any rank after one was killed, with which it has no link, and while the others
/// leave, or live.
fn any(comm: &Communicator, others_leave: bool) -> Task {
    let killed: usize = std::env::var("KOLO_TEST_KILLED").unwrap().parse().unwrap();
    match comm.rank() {
        0 => {
            (1..4).filter(|&rank| rank != killed).try_for_each(|rank| comm.recv(&mut [0u8; 4], rank))?;
            say("ready");
            await_line();
            Ok(comm.recv_any(&mut [0u8; 4]).map(drop)?)
        }
        rank if rank == killed => {
            say("ready");
            sleep()
        }
        _ => {
            comm.send(&[1u8; 4], 0)?;
            await_line();
            if others_leave { Err(leaves()) } else { Ok(()) }
        }
    }
}

/// Rank 0 sends to the last rank, which is stopped and with which it has no link. It does so on one
/// communicator until it aborts that, on one until it drops that, and on one until the deadline.
fn unlinked(comm: &Communicator) -> Task {
    let last = comm.world_size() - 1;
    let (aborted, dropped) = (comm.split(0, 0)?, comm.split(0, 0)?);
    say("ready");
    if comm.rank() != 0 {
        sleep()
    }
    // Once the last rank is stopped.
    await_line();
    // A new socket shows that the link is being opened.
    let until_it_connects = |before: usize| {
        while sockets() <= before {
            std::thread::sleep(Duration::from_millis(1));
        }
    };

    let before = sockets();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| aborted.send(&[1u8; 100], last).unwrap_err());
        until_it_connects(before);
        let began = Instant::now();
        aborted.abort();
        let error = sender.join().unwrap();
        say(&format!("unlinked aborted {} {error}", began.elapsed().as_micros()));
    });
    drop(aborted);

    let before = sockets();
    let work = dropped.start_send(vec![1u8; 100], last)?;
    until_it_connects(before);
    let began = Instant::now();
    drop(dropped);
    say(&format!("unlinked dropped {} {}", began.elapsed().as_micros(), work.wait().unwrap_err()));

    // Messages to each rank have their own sequence numbers.
    Calls::of(comm).call(Op::Send, |comm| comm.send(&[1u8; 100], last))
}

/// Counts the collectives of one communicator.
pub(crate) struct Calls<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) seq: u64,
}

impl<'a> Calls<'a> {
    pub(crate) fn of(comm: &'a Communicator) -> Calls<'a> {
        Calls { comm, seq: 0 }
    }

    pub(crate) fn call(&mut self, op: Op, call: impl FnOnce(&Communicator) -> Result<()>) -> Task {
        self.seq += 1;
        let call = call(self.comm);
        call.map_err(|error| End::Failed(Failed { error, call: Some((op, self.seq)) }))
    }
}

/// Runs all-reduces of changing sizes until one fails, or for `duration`. This rank leaves after
/// `rounds`.
pub(crate) fn collectives(mut calls: Calls<'_>, duration: Duration, rounds: usize) -> Task {
    let began = Instant::now();
    let (rank, world) = (calls.comm.rank() as u64, calls.comm.world_size() as u64);
    // Bytes, which are written and compared without a look at each. Their sums wrap. One buffer of all
    // rounds, so that the memory of the process stays as it is.
    let mut bytes = vec![1; 2_400_000];
    for round in 0..rounds {
        let buf = &mut bytes[..[8, 8000, 2_400_000][round % 3]];
        buf.fill((rank + round as u64) as u8);
        calls.call(Op::AllReduce, |comm| comm.all_reduce(buf, ReduceOp::Sum))?;
        let expected = (world * (world - 1) / 2 + world * round as u64) as u8;
        assert!(buf[0] == expected && buf[1..] == buf[..buf.len() - 1], "a wrong result in round {round}");
        if round % 16 == 5 {
            say(&format!("ready {round}"));
        }
        // All ranks end with the same round.
        let mut is_over = [u8::from(began.elapsed() >= duration)];
        calls.call(Op::AllReduce, |comm| comm.all_reduce(&mut is_over, ReduceOp::Max))?;
        if is_over[0] != 0 {
            return Ok(());
        }
    }
    Ok(())
}

/// Rank 0 broadcasts on more communicators than it has stages for, and ends. Rank 1 receives when
/// rank 0 has ended.
fn last_words(comm: &Communicator) -> Task {
    let parts = (0..12).map(|_| comm.split(0, 0)).collect::<Result<Vec<_>>>()?;
    let mut processes = [0u32; 2];
    comm.all_gather(&[std::process::id()], &mut processes)?;
    while comm.rank() == 1 && !has_ended(processes[0]) {
        std::thread::sleep(Duration::from_millis(1));
    }
    for (number, part) in (1u64..).zip(&parts) {
        // Less than 32 KiB: the root of a larger broadcast may wait for its peers.
        let mut words = vec![if comm.rank() == 0 { number } else { 0 }; 4_000];
        Calls::of(part).call(Op::Broadcast, |part| part.broadcast(&mut words, 0))?;
        assert!(words.iter().all(|&word| word == number), "part {number}: {:?}", &words[..9]);
    }
    Ok(())
}

/// Rank 1 sends messages that no link can hold to rank 0, which checks them. Rank 1 changes its
/// buffer as soon as a call returns.
fn messages(comm: &Communicator) -> Task {
    let mut words = vec![0u64; 4 << 20];
    for number in 1.. {
        if comm.rank() == 1 {
            words.fill(number);
            let sent = comm.send(&words, 0);
            words.fill(u64::MAX);
            sent?;
        } else {
            comm.recv(&mut words, 1)?;
            assert!(words.iter().all(|&word| word == number), "message {number} has changed on its way");
        }
        say("ready");
    }
    Ok(())
}

/// Rank 0 opens a link to rank 1 on several communicators, which both abort before rank 1 asks for
/// the link, or which rank 1 has dropped before.
fn arrivals(comm: &Communicator) -> Task {
    comm.barrier()?;
    let (before, mut kept) = (sockets(), Vec::new());
    for round in 0..20 {
        let part = comm.split(0, 0)?;
        comm.barrier()?;
        let is_late = round % 2 == 1;
        let part = Some(part).filter(|_| !is_late || comm.rank() == 0);
        comm.barrier()?;
        let sent = match &part {
            Some(part) if comm.rank() == 0 => {
                let before = sockets();
                let work = part.start_send(vec![1u8; 1 << 20], 1)?;
                // A link to a rank that has left may fail at once.
                while sockets() <= before && !work.is_finished() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some(work)
            }
            _ => None,
        };
        comm.barrier()?;
        part.iter().for_each(Communicator::abort);
        drop(sent);
        // In shared memory, rank 1 has opened no link, and keeps what has failed.
        kept.extend(part.filter(|part| comm.rank() == 1 && part.transport_name() == "shm"));
    }
    // What has just been closed may be in the list for a moment.
    let deadline = Instant::now() + Duration::from_secs(20);
    while sockets() > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    say(&format!("sockets {} more", sockets().saturating_sub(before)));
    Ok(comm.barrier()?)
}

/// Splits the communicator until a split fails.
fn split(comm: &Communicator, color: usize, on_part: impl Fn(&Communicator) -> Result<()>) -> Task {
    let mut is_ready = false;
    loop {
        on_part(&comm.split(color, 0)?)?;
        if !std::mem::replace(&mut is_ready, true) {
            say("ready");
        }
    }
}

/// The input of rank 1 in a call mismatch: no sum of other inputs has this bit.
const FOREIGN: i32 = 1 << 24;

/// Rank 1 makes other calls than its peers. Each mismatch has a new communicator, which has not
/// failed yet.
fn differ(comm: &Communicator) -> Task {
    let is_odd = comm.rank() == 1;
    let mine = if is_odd { FOREIGN } else { 1 + comm.rank() as i32 };
    let sum = |comm: &Communicator, buf: &mut [i32]| comm.all_reduce(buf, ReduceOp::Sum);
    type Differing<'a> = &'a dyn Fn(&Communicator, &mut [i32]) -> (Op, Result<()>);
    let ways: [(&str, Differing<'_>); 5] = [
        ("operation", &|comm, buf| match is_odd {
            true => (Op::Broadcast, comm.broadcast(buf, 1)),
            false => (Op::AllReduce, sum(comm, buf)),
        }),
        ("count", &|comm, buf| match is_odd {
            true => (Op::AllReduce, sum(comm, &mut buf[1..])),
            false => (Op::AllReduce, sum(comm, buf)),
        }),
        ("element", &|comm, buf| match is_odd {
            true => (Op::AllReduce, comm.all_reduce(as_unsigned(buf), ReduceOp::Sum)),
            false => (Op::AllReduce, sum(comm, buf)),
        }),
        ("reduction", &|comm, buf| match is_odd {
            true => (Op::AllReduce, comm.all_reduce(buf, ReduceOp::Max)),
            false => (Op::AllReduce, sum(comm, buf)),
        }),
        // The odd rank is not the root, because it would send then.
        ("root", &|comm, buf| match is_odd {
            true => (Op::Broadcast, comm.broadcast(buf, 0)),
            false => (Op::Broadcast, comm.broadcast(buf, 2)),
        }),
    ];
    for (way, call) in ways {
        let part = comm.split(0, 0)?;
        let mut buf = vec![mine; 1000];
        let (op, result) = call(&part, &mut buf);
        // A rank that only sends may notice at the next call.
        let (error, call) = match result {
            Err(error) => (error, (op, 1)),
            Ok(()) => (part.barrier().expect_err("the calls differ"), (Op::Barrier, 2)),
        };
        // In shared memory nothing is written, except in a broadcast from a root whose call is the
        // same. Otherwise the buffer may hold data of ranks whose calls are the same, but no other
        // data.
        let is_untouched = buf.iter().all(|&x| x == mine);
        let is_of_others = buf.iter().any(|&x| if is_odd { x != mine } else { x >= FOREIGN });
        let is_compared_by_all = part.transport_name() == "shm" && op != Op::Broadcast;
        let is_right = if is_compared_by_all { is_untouched } else { !is_of_others };
        say(&format!("{way} {} {}", if is_right { "kept" } else { "written" }, Failure::of(&error, Some(call))));
        check_revoked(&part, &error);
    }
    Err(leaves())
}

fn as_unsigned(buf: &mut [i32]) -> &mut [u32] {
    // SAFETY: the memory is the same, and all bits are valid for both types.
    unsafe { std::slice::from_raw_parts_mut(buf.as_mut_ptr().cast(), buf.len()) }
}

/// Rank 1 drops the communicator while a collective waits for rank 3, which makes no call.
fn drop_with_work(comm: &Communicator) -> Task {
    let mut calls = Calls::of(comm);
    calls.call(Op::Barrier, |comm| comm.barrier())?;
    match comm.rank() {
        1 => {
            let work = comm.start_all_reduce(vec![1u64; 1000], ReduceOp::Sum)?;
            let work = work.wait_timeout(Duration::from_millis(50)).expect("it has not failed");
            let Waited::Pending(work) = work else { panic!("rank 3 does not take part") };
            let look = || match work.wait().map_err(Error::from) {
                Err(Error::Aborted { op: Op::AllReduce, seq: 2 }) => say("given up"),
                other => say(&format!("the work ended: {:?}", other.map(|_| ()))),
            };
            Err(End::Leaves(Box::new(look)))
        }
        3 => sleep(),
        _ => calls.call(Op::AllReduce, |comm| comm.all_reduce(&mut [1u64; 1000], ReduceOp::Sum)),
    }
}

/// Runs all-reduces in registered memory.
fn registered(comm: &Communicator) -> Task {
    let mut buf = comm.alloc::<u64>(REGISTERED)?;
    buf.fill(1);
    let mut calls = Calls::of(comm);
    loop {
        calls.call(Op::AllReduce, |comm| comm.all_reduce(&mut buf, ReduceOp::Max))?;
        say("ready");
    }
}

/// Rank 1 is killed. Rank 0 learns that in a part and shrinks the whole, where ranks 2 and 3 wait.
fn part_fails(comm: &Communicator) -> Task {
    let part = comm.split(comm.rank() / 2, 0)?;
    part.barrier()?;
    say("ready");
    match comm.rank() {
        0 => {
            part.barrier().unwrap_err();
            let kept = if std::env::var("KOLO_TEST_DROPS").as_deref() == Ok("yes") { None } else { Some(part) };
            shrink(comm);
            drop(kept);
        }
        1 => sleep(),
        _ => {
            comm.barrier().unwrap_err();
            shrink(comm);
        }
    }
    // The whole names the failure in every later call.
    say(&format!("culprit {:?}", comm.barrier().unwrap_err().culprit()));
    Err(leaves())
}

/// Shrinks the communicator and uses the result.
fn shrink(comm: &Communicator) {
    let began = Instant::now();
    let fewer = comm.shrink().unwrap();
    let took = began.elapsed();
    let mut sum = vec![1u64; 100_000];
    fewer.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert!(sum.iter().all(|&sum| sum == fewer.world_size() as u64));
    say(&format!("shrunk {} {}", fewer.world_size(), took.as_micros()));
    fewer.barrier().unwrap();
}

/// Checks that calls of every kind return that the communicator is revoked, and why.
fn check_revoked(comm: &Communicator, first: &Error) {
    let other = (comm.rank() + 1) % comm.world_size();
    let calls = [
        ("barrier", comm.barrier()),
        ("all_reduce", comm.all_reduce(&mut [1u8], ReduceOp::Sum)),
        ("send", comm.send(&[1u8], other)),
        ("recv", comm.recv(&mut [1u8], other)),
        ("start_barrier", comm.start_barrier().and_then(Work::wait).map_err(Error::from)),
        ("split", comm.split(0, 0).map(drop)),
    ];
    for (name, result) in calls {
        match result {
            Err(Error::Revoked { first: why }) if why.to_string() == first.to_string() => {}
            other => say(&format!("usable {name}: {other:?} after {first}")),
        }
    }
    say("revoked");
}

/// Writes whether this process has the same resources as before.
fn leftovers(before: &Belongings) {
    // A thread that was joined may stay in the list for a moment.
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut after = Belongings::count();
    while after != *before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        after = Belongings::count();
    }
    say(&if after == *before { "clean".to_owned() } else { format!("leaks: {after:?} after {before:?}") });
}

pub(crate) fn say(line: &str) {
    // One write, so that a signal cannot split the line. The test may have closed the pipe.
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
    let _ = std::io::stdout().flush();
}

/// Waits for the line that the test writes.
fn await_line() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

fn sleep() -> ! {
    loop {
        std::thread::park();
    }
}
