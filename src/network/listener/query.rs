//! The framing of queries and replies: a length in 4 bytes, then the message.

use std::io::{self, Read, Write};

/// The length of the longest query and of the longest reply, in bytes.
pub(super) const LONGEST_QUERY: usize = 64 << 10;
const LONGEST_REPLY: usize = 1 << 20;

/// Bytes of the length before a message.
const PREFIX: usize = 4;

/// Returns a message with its length before it.
pub(super) fn prefixed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_le_bytes()[..], message].concat()
}

/// Returns how many bytes are missing of a query, of which `received` has come; `None` if the query
/// is too long.
pub(super) fn missing(received: &[u8]) -> Option<usize> {
    let Some(prefix) = received.first_chunk::<PREFIX>() else { return Some(PREFIX - received.len()) };
    let len = u32::from_le_bytes(*prefix) as usize;
    (len <= LONGEST_QUERY).then(|| PREFIX + len - received.len())
}

/// Returns the message of a query of which nothing is missing.
pub(super) fn message(received: &[u8]) -> &[u8] {
    &received[PREFIX..]
}

/// Sends a query to a listener that has admitted this process, and reads the reply.
pub(super) fn exchange(stream: &mut (impl Read + Write), query: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(&prefixed(query))?;
    let mut prefix = [0; PREFIX];
    stream.read_exact(&mut prefix)?;
    let len = u32::from_le_bytes(prefix) as usize;
    if len > LONGEST_REPLY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut reply = vec![0; len];
    stream.read_exact(&mut reply)?;
    Ok(reply)
}
