//! Checks the buffers of sends and receives that run side by side.

use smallvec::SmallVec;

use crate::buffer::RawSlice;
use crate::call::Call;
use crate::error::{ArgumentError, Error, Result};
use crate::types::Op;

/// Gives a send whose buffer is also that of a receive a copy of it, as `MPI_Sendrecv_replace` does.
/// Returns the copies, which the calls use. Fails if a buffer in which a call receives overlaps another
/// one in part, or if the system has no memory.
///
/// The engine receives without regard to what it has still to send, so what is sent has to be apart from
/// what is received.
pub(super) fn keep_apart(calls: &mut [Call]) -> Result<Vec<Vec<u8>>> {
    let mut copies = Vec::new();
    // The begin and the end of each buffer, and whether it receives.
    let mut ranges: SmallVec<[(usize, usize, bool); 4]> = SmallVec::new();
    let mut receives: SmallVec<[(usize, usize); 2]> = calls.iter().filter(|call| call.op == Op::Recv).map(range_of).collect();
    receives.sort_unstable();
    for call in calls {
        let range = range_of(call);
        let is_receive = call.op == Op::Recv;
        let is_in_place = !is_receive && range.0 < range.1 && receives.binary_search(&range).is_ok();
        match &call.on_device {
            None if is_in_place => {
                copies.push(copy_of(call.send)?);
                call.send = copies.last().map_or(call.send, |copy| RawSlice::of(copy));
            }
            // A stream copies device memory that is sent to the host before it writes what comes.
            Some(on_device) if is_in_place && on_device.sends_from_device() => {}
            _ if range.0 < range.1 => ranges.push((range.0, range.1, is_receive)),
            _ => {}
        }
    }
    ranges.sort_unstable();
    let (mut end, mut end_of_receives) = (0, 0);
    for (from, to, is_receive) in ranges {
        if from < if is_receive { end } else { end_of_receives } {
            return Err(Error::Argument { op: Op::Recv, problem: ArgumentError::Overlap });
        }
        end = end.max(to);
        if is_receive {
            end_of_receives = end_of_receives.max(to);
        }
    }
    Ok(copies)
}

fn range_of(call: &Call) -> (usize, usize) {
    let buffer = if call.op == Op::Recv { call.recv.as_const() } else { call.send };
    (buffer.ptr.addr(), buffer.ptr.addr() + buffer.len)
}

fn copy_of(memory: RawSlice) -> Result<Vec<u8>> {
    let mut copy = Vec::new();
    let reserved = copy.try_reserve_exact(memory.len);
    reserved.map_err(|_| Error::os("copying a message that is sent in place")(std::io::ErrorKind::OutOfMemory.into()))?;
    // SAFETY: the caller lends the memory, which nothing writes before the receive begins.
    copy.extend_from_slice(unsafe { std::slice::from_raw_parts(memory.ptr, memory.len) });
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::RawSliceMut;

    fn send(memory: &[u8]) -> Call {
        Call { send: RawSlice::of(memory), ..Call::new::<u8>(Op::Send) }
    }

    fn receive(memory: &[u8]) -> Call {
        let RawSlice { ptr, len } = RawSlice::of(memory);
        Call { recv: RawSliceMut { ptr: ptr.cast_mut(), len }, ..Call::new::<u8>(Op::Recv) }
    }

    #[test]
    fn buffers_overlap_nowhere_but_where_one_is_sent_and_received() {
        let memory: Vec<u8> = (0..100).collect();
        let all = &memory[..];
        let fits = |mut calls: Vec<Call>| keep_apart(&mut calls).map(|copies| (copies.len(), calls));
        for (copies, calls) in [
            (0, vec![send(&all[..50]), receive(&all[50..])]),
            (0, vec![send(&all[..50]), send(&all[25..]), send(all)]),
            (0, vec![send(&all[..0]), receive(all), receive(&all[7..7])]),
            (1, vec![send(all), receive(all)]),
            (2, vec![receive(&all[..50]), send(&all[..50]), send(&all[..50]), receive(&all[50..])]),
        ] {
            let (found, calls) = fits(calls).unwrap();
            assert_eq!(found, copies);
            for call in calls.iter().filter(|call| call.op == Op::Send && copies > 0) {
                assert_ne!(call.send.ptr, all.as_ptr(), "a copy is sent");
            }
        }
        for calls in [
            vec![send(&all[..51]), receive(&all[50..])],
            vec![receive(all), send(&all[..50])],
            vec![receive(all), send(&all[99..])],
            vec![receive(all), receive(all)],
            vec![receive(&all[..60]), send(&all[..60]), receive(&all[59..])],
            vec![send(&all[..10]), send(all), receive(&all[20..30])],
            vec![send(all), send(&all[1..]), receive(all)],
        ] {
            let refused = fits(calls).map(|(copies, _)| copies);
            assert!(matches!(refused, Err(Error::Argument { problem: ArgumentError::Overlap, .. })), "{refused:?}");
        }
    }
}
