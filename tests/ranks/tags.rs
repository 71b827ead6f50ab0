//! Messages with tags, and messages of a rank to itself.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use kolo::{Cause, Communicator, Error, ReduceOp, Transport, Unmatched};

use crate::common::{Barrier, DEADLINE, all, at_once, on_every_transport, random, run};

const WORLD: usize = 3;

/// The tags of the messages; those with the last one are received from any rank.
const TAGS: [u32; 5] = [0, 1, 7, u32::MAX, 5];

/// Elements of a message. The larger ones are read where they are, or fill the buffers of links.
const SIZES: [usize; 7] = [0, 1, 5, 300, 1024, 3000, 100_000];

#[derive(Clone)]
struct Message {
    from: usize,
    to: usize,
    tag: u32,
    words: Vec<u64>,
}

/// Returns the messages of a seed, in the order in which they are sent.
fn messages(seed: u64) -> Vec<Message> {
    let count = 20 + random(seed, 0) % 60;
    let message = |number: u64| {
        let choose = |what: u64, of: usize| (random(seed, 8 * number + what) % of as u64) as usize;
        let (from, to, tag) = (choose(1, WORLD), choose(2, WORLD), TAGS[choose(3, TAGS.len())]);
        // The receiver does not know which message it gets from any rank.
        let len = if tag == TAGS[4] { 5 } else { SIZES[choose(4, SIZES.len())] };
        Message { from, to, tag, words: (0..len as u64).map(|word| number << 32 | word).collect() }
    };
    (1..=count).map(message).collect()
}

/// Shuffles a list by a seed.
fn shuffle<T>(list: &mut [T], seed: u64) {
    for at in (1..list.len()).rev() {
        list.swap(at, (random(seed, at as u64) % (at as u64 + 1)) as usize);
    }
}

/// Sends and receives the messages of a seed, in any order, and compares each with that of a queue for
/// each pair of ranks and tag.
fn exchange(comm: &Communicator, seed: u64) {
    let me = comm.rank();
    let all = messages(seed);
    let mut queues: HashMap<(usize, u32), VecDeque<Vec<u64>>> = HashMap::new();
    for message in all.iter().filter(|message| message.to == me) {
        queues.entry((message.from, message.tag)).or_default().push_back(message.words.clone());
    }
    let mut receives: Vec<(usize, u32)> =
        all.iter().filter(|message| message.to == me).map(|message| (message.from, message.tag)).collect();
    shuffle(&mut receives, seed ^ me as u64);
    let sends: Vec<&Message> = all.iter().filter(|message| message.from == me).collect();
    let receives_first = random(seed, 1000 + me as u64).is_multiple_of(2);

    let send = || {
        let mut works = Vec::new();
        for (number, Message { to, tag, words, .. }) in (0..).zip(&sends) {
            // All receives have been started, or no message is large: then none waits for a receive.
            if receives_first && random(seed, 2000 + number).is_multiple_of(2) {
                comm.send_tagged(words, *to, *tag).unwrap();
            } else {
                works.push(comm.start_send_tagged(words.clone(), *to, *tag).unwrap());
            }
        }
        works
    };
    let early = if receives_first { Vec::new() } else { send() };
    let mut from_any = Vec::new();
    let mut named = Vec::new();
    for (number, (from, tag)) in (0..).zip(receives) {
        let queue = queues.get_mut(&(from, tag)).unwrap();
        if tag == TAGS[4] {
            from_any.push(comm.start_recv_any_tagged(vec![0u64; 5], tag).unwrap());
            continue;
        }
        let expected = queue.pop_front().unwrap();
        let into = vec![9u64; expected.len()];
        if !receives_first && random(seed, 3000 + number).is_multiple_of(2) {
            let mut into = into;
            comm.recv_tagged(&mut into, from, tag).unwrap();
            assert!(into == expected, "seed {seed}: rank {me} receives from {from} with tag {tag}");
        } else {
            named.push((from, tag, expected, comm.start_recv_tagged(into, from, tag).unwrap()));
        }
    }
    let late = if receives_first { send() } else { Vec::new() };
    shuffle(&mut named, seed);
    for (from, tag, expected, work) in named {
        assert!(work.wait().unwrap() == expected, "seed {seed}: rank {me} receives from {from} with tag {tag}");
    }
    for work in from_any {
        let (words, from) = work.wait().unwrap();
        let expected = queues.get_mut(&(from, TAGS[4])).and_then(VecDeque::pop_front);
        assert_eq!(Some(words), expected, "seed {seed}: rank {me} receives from any rank, which is {from}");
    }
    early.into_iter().chain(late).for_each(|work| drop(work.wait().unwrap()));
}

#[test]
fn messages_find_their_receives_by_tag_in_any_order() {
    let seeds = if all() { 300 } else { 12 };
    let seed = std::process::id() as u64 * 1000;
    on_every_transport(WORLD, |comm| {
        for seed in seed..seed + seeds {
            exchange(&comm, seed);
            // No rank begins the next seed before the messages of this one were received.
            comm.barrier().unwrap();
        }
    });
}

/// Messages wait for their receives while other operations take place.
#[test]
fn a_message_with_a_tag_waits_while_collectives_run() {
    on_every_transport(WORLD, |comm| {
        let (me, next, before) = (comm.rank() as u64, (comm.rank() + 1) % WORLD, (comm.rank() + WORLD - 1) % WORLD);
        // All ranks have links: the first message to a higher rank opens one.
        comm.send_recv(&[me], next, &mut [0u64], before).unwrap();
        for round in 0..10 {
            for tag in 1..5 {
                comm.send_tagged(&[me, round, u64::from(tag)], next, tag).unwrap();
            }
            for size in [1, 1000, 100_000] {
                let mut sum = vec![1u64; size];
                comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert!(sum.iter().all(|&sum| sum == WORLD as u64));
            }
            comm.send_recv(&[me], next, &mut [0u64], before).unwrap();
            for tag in (1..5).rev() {
                let mut got = [0; 3];
                comm.recv_tagged(&mut got, before, tag).unwrap();
                assert_eq!(got, [before as u64, round, u64::from(tag)]);
            }
        }
    });
}

/// More messages wait than any search from the front could pass.
#[test]
fn many_messages_are_received_in_reverse() {
    const MESSAGES: u32 = 30_000;
    on_every_transport(2, |comm| {
        if comm.rank() == 0 {
            let works: Vec<_> = (1..=MESSAGES).map(|tag| comm.start_send_tagged([tag], 1, tag).unwrap()).collect();
            works.into_iter().for_each(|work| _ = work.wait().unwrap());
        } else {
            for tag in (1..=MESSAGES).rev() {
                let mut got = [0u32];
                comm.recv_tagged(&mut got, 0, tag).unwrap();
                assert_eq!(got, [tag]);
            }
        }
    });
}

/// A rank keeps 64 MiB of a peer. What exceeds them waits at the sender until others were received.
#[test]
fn what_exceeds_the_queue_waits_at_the_sender() {
    let sent = Barrier::new(2);
    let fills = |comm: &Communicator| {
        let (rank, mib) = (comm.rank(), vec![3u8; 20 << 20]);
        match rank {
            0 => {
                let works: Vec<_> = (1..=8).map(|tag| comm.start_send_tagged(mib.clone(), 1, tag).unwrap()).collect();
                works.into_iter().for_each(|work| drop(work.wait().unwrap()));
                sent.wait();
            }
            _ => {
                let mut got = vec![0u8; 20 << 20];
                // Three fit, so the third and the fourth arrive.
                for tag in [3, 4, 1, 2, 7, 5, 6, 8] {
                    comm.recv_tagged(&mut got, 0, tag).unwrap();
                    assert!(got == mib, "tag {tag}");
                    got.fill(0);
                }
                sent.wait();
            }
        }
    };
    run(2, |_, builder| builder, |comm| fills(&comm));
    run(2, |_, builder| builder.transport(Transport::Tcp), |comm| fills(&comm));
}

/// What a receive says that gets no message before the deadline.
fn unmatched(result: kolo::Result<()>) -> (usize, Unmatched, String) {
    match result {
        Err(error @ Error::Peer { .. }) => {
            let text = error.to_string();
            match error {
                Error::Peer { rank, cause: Cause::Unmatched { unmatched, .. }, .. } => (rank, *unmatched, text),
                _ => panic!("{text}"),
            }
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_receive_of_a_tag_that_does_not_come_names_those_that_wait() {
    let waits = |comm: &Communicator, size: usize, done: &Barrier| {
        if comm.rank() == 0 {
            let sent = [5, 9, 7, 7].map(|tag| comm.start_send_tagged(vec![1u8; size], 1, tag).unwrap());
            done.wait();
            drop(sent);
            return;
        }
        let (rank, unmatched, text) = unmatched(comm.recv_tagged(&mut [0u8; 4], 0, 4));
        assert_eq!((rank, unmatched.tag, unmatched.is_itself), (0, Some(4), false));
        if size == 4 {
            assert_eq!((unmatched.waiting, &unmatched.tags[..], unmatched.refused), (4, &[5, 7, 9][..], None));
            assert!(
                text.contains("sent no message with tag 4 within the deadline of 5.0s; 4 messages of other tags wait: 5, 7, 9"),
                "{text}"
            );
        } else {
            assert_eq!((unmatched.waiting, &unmatched.tags[..], unmatched.refused), (2, &[5, 9][..], Some(7)));
            assert!(text.contains("wait: 5, 9; the next one, with tag 7, does not fit and waits at the sender"), "{text}");
        }
        done.wait();
    };
    let cases = [4, 30 << 20].into_iter().flat_map(|size| [Transport::Auto, Transport::Tcp].map(|transport| (size, transport)));
    at_once(cases, |(size, transport)| {
        let done = Barrier::new(2);
        run(2, |_, builder| builder.timeout(DEADLINE).transport(transport), |comm| waits(&comm, size, &done));
    });
}

/// The message is larger than a link.
#[test]
fn the_error_of_a_send_does_not_name_messages_that_wait() {
    let done = Barrier::new(2);
    run(
        2,
        |_, builder| builder.timeout(DEADLINE),
        |comm| {
            if comm.rank() == 0 {
                comm.recv_tagged(&mut [0u8], 1, 6).unwrap();
                let error = comm.send_tagged(&vec![0u8; 8 << 20], 1, 9).unwrap_err();
                let is_unmatched = matches!(error, Error::Peer { cause: Cause::Unmatched { .. }, .. });
                assert!(!is_unmatched && error.to_string().contains("did not make this call"), "{error}");
            } else {
                comm.send_tagged(&[0u8], 0, 5).unwrap();
                comm.send_tagged(&[0u8], 0, 6).unwrap();
            }
            done.wait();
        },
    );
}

/// The part of rank 0 has arrived, behind messages for which there is no room.
#[test]
fn a_collective_behind_messages_that_do_not_fit_names_them() {
    let done = Barrier::new(2);
    run(
        2,
        |_, builder| builder.transport(Transport::Tcp).timeout(DEADLINE),
        |comm| {
            if comm.rank() == 0 {
                let large = vec![0u8; 1 << 20];
                (0..63).for_each(|_| comm.send_tagged(&large, 1, 8).unwrap());
                (0..3000).for_each(|_| comm.send_tagged(&[0u8; 0], 1, 9).unwrap());
                // It has all parts that it needs, or fails when rank 1 does.
                _ = comm.all_reduce(&mut [1.0f32], ReduceOp::Sum);
            } else {
                let (rank, unmatched, text) = unmatched(comm.all_reduce(&mut [1.0f32], ReduceOp::Sum));
                assert_eq!(
                    (rank, unmatched.tag, &unmatched.tags[..], unmatched.refused),
                    (0, None, &[8, 9][..], Some(9)),
                    "{text}"
                );
                assert!(
                    text.contains("did not take part within the deadline") && text.contains("messages with tags wait: 8, 9"),
                    "{text}"
                );
            }
            done.wait();
        },
    );
}

#[test]
fn a_receive_from_any_rank_takes_the_message_that_was_kept_first() {
    let (first, second) = (Barrier::new(3), Barrier::new(3));
    on_every_transport(3, |comm| match comm.rank() {
        0 => {
            // Keeps a message of another tag of rank 1.
            comm.recv_tagged(&mut [0u8], 1, 6).unwrap();
            first.wait();
            comm.recv_tagged(&mut [0u8], 2, 8).unwrap();
            second.wait();
            comm.recv_tagged(&mut [0u8], 1, 10).unwrap();
            let from = [0, 1].map(|_| comm.recv_any_tagged(&mut [0u8], 7).unwrap());
            assert_eq!(from, [2, 1]);
            comm.recv_tagged(&mut [0u8], 1, 5).unwrap();
        }
        rank => {
            let send = |tags: [u32; 2]| tags.into_iter().for_each(|tag| comm.send_tagged(&[0u8], 0, tag).unwrap());
            if rank == 1 {
                send([5, 6]);
            }
            first.wait();
            if rank == 2 {
                send([7, 8]);
            }
            second.wait();
            if rank == 1 {
                send([7, 10]);
            }
        }
    });
}

#[test]
fn a_rank_that_sends_much_leaves_others_their_turn() {
    const MESSAGES: usize = 200;
    let sent = Barrier::new(3);
    on_every_transport(3, |comm| match comm.rank() {
        0 => {
            // The links are open, so that nothing below waits for this rank.
            [1, 2].into_iter().for_each(|peer| comm.recv_tagged(&mut [0u64], peer, 1).unwrap());
            sent.wait();
            let from: Vec<usize> = (0..=MESSAGES).map(|_| comm.recv_any(&mut [0u64]).unwrap()).collect();
            let turn = from.iter().position(|&rank| rank == 2).unwrap();
            assert!(turn < MESSAGES / 2, "rank 2 has turn {turn}");
        }
        1 => {
            comm.send_tagged(&[1u64], 0, 1).unwrap();
            (0..MESSAGES).for_each(|_| comm.send(&[1u64], 0).unwrap());
            sent.wait();
        }
        _ => {
            comm.send_tagged(&[1u64], 0, 1).unwrap();
            comm.send(&[2u64], 0).unwrap();
            sent.wait();
        }
    });
}

#[test]
fn a_message_with_the_tag_and_another_count_is_a_mismatch() {
    on_every_transport(2, |comm| {
        if comm.rank() == 0 {
            comm.send_tagged(&[1u8; 4], 1, 3).unwrap();
            comm.send_tagged(&[1u8; 4], 1, 4).unwrap();
            comm.barrier().unwrap_err();
        } else {
            // It waits when it is received.
            comm.recv_tagged(&mut [0u8; 4], 0, 4).unwrap();
            let error = comm.recv_tagged(&mut [0u8; 5], 0, 3).unwrap_err();
            let Error::Mismatch { mine, theirs, .. } = &error else { panic!("{error}") };
            assert_eq!((mine.tag(), mine.count(), theirs.tag(), theirs.count()), (3, 5, 3, 4), "{error}");
        }
    });
}

#[test]
fn a_rank_sends_to_itself() {
    for world in [1, 2] {
        on_every_transport(world, |comm| {
            let me = comm.rank();
            // A message that fits waits for its receive.
            for size in [0, 1, 1000, 1 << 20] {
                let words = vec![size as u64; size];
                comm.send(&words, me).unwrap();
                comm.send_tagged(&words, me, 2).unwrap();
                comm.send(&words, me).unwrap();
                let mut got = vec![0; size];
                comm.recv_tagged(&mut got, me, 2).unwrap();
                assert!(got == words);
                got.fill(0);
                assert_eq!(comm.recv_any(&mut got).unwrap(), me);
                assert!(got == words);
                comm.recv(&mut got, me).unwrap();
            }
            // A larger one goes beside its receive, whichever begins first.
            let bytes = vec![7u8; 65 << 20];
            let (send, recv) =
                (|| comm.start_send(bytes.clone(), me).unwrap(), || comm.start_recv(vec![0u8; 65 << 20], me).unwrap());
            let (first, second) = (send(), recv());
            assert!(second.wait().unwrap() == bytes);
            first.wait().unwrap();
            let (first, second) = (recv(), send());
            assert!(first.wait().unwrap() == bytes);
            second.wait().unwrap();
            let mut got = [0u64; 2];
            comm.send_recv(&[1u64, 2], me, &mut got, me).unwrap();
            assert_eq!(got, [1, 2]);
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn a_message_to_oneself_that_nothing_receives_ends_at_the_deadline() {
    let soon = Duration::from_millis(300);
    for size in [65 << 20, 1] {
        run(
            1,
            |_, builder| builder.timeout(soon),
            |comm| {
                let buf = vec![1u8; size];
                let result = if size > 1 { comm.send(&buf, 0) } else { comm.recv_tagged(&mut [0u8], 0, 3) };
                let (rank, unmatched, text) = unmatched(result);
                assert!((rank, unmatched.is_itself) == (0, true) && text.contains("exchanged with itself no message"), "{text}");
            },
        );
    }
}
