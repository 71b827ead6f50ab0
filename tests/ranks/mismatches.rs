//! What ranks that make different calls find in their memory afterwards.

use crate::common::{all, at_once, run};
use kolo::{Communicator, Error, FlagLayout, ReduceOp, Result, Transport};

/// Elements on both sides of a buffer, which belong to no call.
const BESIDE: usize = 32;

/// A call of `count` elements, or of blocks of `count` elements.
type CallOf = fn(&Communicator, &[i32], &mut [i32], usize) -> Result<()>;

/// Every operation, and some of them with another type, reduction, count or root.
const CALLS: [(&str, CallOf); 20] = [
    ("all_reduce", |comm, _, out, count| comm.all_reduce(&mut out[..count], ReduceOp::Sum)),
    ("all_reduce max", |comm, _, out, count| comm.all_reduce(&mut out[..count], ReduceOp::Max)),
    ("all_reduce of less", |comm, _, out, count| comm.all_reduce(&mut out[..count - 2], ReduceOp::Sum)),
    ("all_reduce u32", |comm, _, out, count| comm.all_reduce(unsigned(&mut out[..count]), ReduceOp::Sum)),
    ("broadcast 0", |comm, _, out, count| comm.broadcast(&mut out[..count], 0)),
    ("broadcast 1", |comm, _, out, count| comm.broadcast(&mut out[..count], 1)),
    ("reduce 0", |comm, _, out, count| comm.reduce(&mut out[..count], ReduceOp::Sum, 0)),
    ("reduce 1", |comm, _, out, count| comm.reduce(&mut out[..count], ReduceOp::Sum, 1)),
    ("all_gather", |comm, send, out, count| comm.all_gather(&send[..count], out)),
    ("all_gather u32", |comm, send, out, count| {
        comm.all_gather(&send[..count].iter().map(|&word| word as u32).collect::<Vec<_>>(), unsigned(out))
    }),
    ("all_gather_v", |comm, send, out, count| comm.all_gather_v(&send[..count], out, &vec![count; comm.world_size()])),
    ("reduce_scatter", |comm, send, out, count| comm.reduce_scatter(send, &mut out[..count], ReduceOp::Sum)),
    ("reduce_scatter_v", |comm, send, out, count| {
        comm.reduce_scatter_v(send, &mut out[..count], &vec![count; comm.world_size()], ReduceOp::Sum)
    }),
    ("all_to_all", |comm, send, out, _| comm.all_to_all(send, out)),
    ("all_to_all_v", |comm, send, out, count| {
        let counts = vec![count; comm.world_size()];
        comm.all_to_all_v(send, &counts, out, &counts)
    }),
    ("gather 0", |comm, send, out, count| comm.gather(&send[..count], (comm.rank() == 0).then_some(out), 0)),
    ("gather 1", |comm, send, out, count| comm.gather(&send[..count], (comm.rank() == 1).then_some(out), 1)),
    ("scatter 0", |comm, send, out, count| comm.scatter((comm.rank() == 0).then_some(send), &mut out[..count], 0)),
    ("scatter 1", |comm, send, out, count| comm.scatter((comm.rank() == 1).then_some(send), &mut out[..count], 1)),
    ("barrier", |comm, _, _, _| comm.barrier()),
];

fn unsigned(words: &mut [i32]) -> &mut [u32] {
    // SAFETY: both types have the same size and alignment, and every value is one of both.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// Where ranks are, and what they may find in their memory.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    world: usize,
    flag_layout: FlagLayout,
    transport: Transport,
    hosts: usize,
}

impl Place {
    /// Whether a rank takes nothing of its peers before their calls were compared with its own. In a
    /// broadcast or scatter it is only the root's call.
    fn compares_first(self, call: &str) -> bool {
        let is_rooted = call.starts_with("broadcast") || call.starts_with("scatter");
        self.hosts == 1 && self.transport == Transport::Auto && call != "all_to_all_v" && !is_rooted
    }

    /// One rank makes the call `theirs`, and the others make `mine`. Every element that a rank gives is
    /// its own bit, so that those that a failed call leaves say where they come from.
    fn differ(self, mine: usize, theirs: usize, count: usize) {
        let Place { name: place, world, flag_layout, transport, hosts } = self;
        let odd = (mine + theirs) % world;
        let options = |rank: usize, builder: kolo::Builder| {
            builder.flag_layout(flag_layout).transport(transport).host(["a", "b"][rank % hosts])
        };
        run(world, options, |comm| {
            let rank = comm.rank();
            let (name, call) = CALLS[if rank == odd { theirs } else { mine }];
            let what = format!("{place}: {name} of {count} on rank {rank}, {} on rank {odd}", CALLS[theirs].0);
            let own = 1 << rank;
            let send = vec![own; world * count];
            let is_in_place = ["all_reduce", "broadcast", "reduce 0", "reduce 1"].iter().any(|op| name.starts_with(op));
            let mut memory = vec![0; world * count + 2 * BESIDE];
            let out = BESIDE..BESIDE + world * count;
            memory[out.clone()].fill(if is_in_place { own } else { 0 });
            let result = call(&comm, &send, &mut memory[out.clone()], count);
            assert!(memory[..BESIDE].iter().chain(&memory[out.end..]).all(|&word| word == 0), "{what}: beside the buffer");
            let written = memory[out].iter().fold(0, |all, word| all | word);
            match &result {
                Ok(()) => {}
                Err(Error::Mismatch { .. } | Error::Peer { .. }) => {
                    let allowed = match rank == odd || self.compares_first(name) {
                        true => own,
                        false => ((1 << world) - 1) & !(1 << odd),
                    };
                    assert_eq!(written & !allowed, 0, "{what}: elements of other ranks were written, then {result:?}");
                }
                Err(other) => panic!("{what}: {other}"),
            }
            // A rank that only sends may learn of it later.
            let noticed = result.and_then(|()| comm.barrier()).and_then(|()| comm.barrier());
            assert!(noticed.is_err(), "{what}: nothing was noticed");
        });
    }
}

/// A failed call accepts no element of a rank that made another call. In shared memory it accepts none
/// of any other rank, and writes at most the rank's own block.
#[test]
fn a_call_that_others_do_not_make_takes_nothing_of_theirs() {
    let (flat, groups) = (FlagLayout::Flat, FlagLayout::Hierarchy);
    let (auto, tcp) = (Transport::Auto, Transport::Tcp);
    let places = [
        Place { name: "shared memory", world: 3, flag_layout: flat, transport: auto, hosts: 1 },
        Place { name: "groups in shared memory", world: 6, flag_layout: groups, transport: auto, hosts: 1 },
        Place { name: "TCP", world: 3, flag_layout: flat, transport: tcp, hosts: 1 },
        Place { name: "two hosts", world: 4, flag_layout: flat, transport: auto, hosts: 2 },
    ];
    // By default every call meets another one at each place.
    let step = if all() { 1 } else { CALLS.len() - 1 };
    at_once(places.into_iter().enumerate(), |(number, place)| {
        let pairs = (0..CALLS.len()).flat_map(|mine| (1..CALLS.len()).map(move |by| (mine, (mine + by) % CALLS.len())));
        // The messages of this pair are such that no later call reads them.
        let unread = ["broadcast 0", "gather 0"].map(|name| CALLS.iter().position(|call| call.0 == name).unwrap());
        for (mine, theirs) in pairs.skip(5 * number).step_by(step).chain([unread.into()]) {
            // Small blocks, and those from which on ranks read registered memory.
            for count in [600, 24_000] {
                place.differ(mine, theirs, count);
            }
        }
    });
}
