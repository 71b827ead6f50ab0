//! The messages between a client and the server.
//!
//! Clients pass the job's handshake first. Then they send requests, and read one response to each.
//! Numbers are little-endian:
//!
//! ```text
//! request   operation (1), 0 (1), length of key (2), length of value (4),
//!           timeout in milliseconds (8), key, value
//! response  status (1), 0 (3), length of value (4), value
//! ```

use std::io::{self, Read};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::rendezvous::store::kv::{LARGEST_VALUE, LONGEST_KEY};

/// Bytes of a request before its key.
const REQUEST: usize = 16;
/// Bytes of a response before its value.
const RESPONSE: usize = 8;

/// The length of the longest request, in bytes.
pub(super) const LONGEST_REQUEST: usize = REQUEST + LONGEST_KEY + LARGEST_VALUE;

pub(super) const SET: u8 = 1;
pub(super) const GET: u8 = 2;
pub(super) const CLAIM: u8 = 3;

pub(super) const FOUND: u8 = 0;
pub(super) const NOT_FOUND: u8 = 1;
pub(super) const FULL: u8 = 2;

pub(super) struct Request {
    pub(super) operation: u8,
    pub(super) key: String,
    pub(super) value: Vec<u8>,
    pub(super) timeout: Duration,
}

impl Request {
    /// Takes the next complete request from the front of the received bytes. Fails if they are not
    /// a request.
    pub(super) fn take(received: &mut BytesMut) -> Result<Option<Request>, ()> {
        if received.len() < REQUEST {
            return Ok(None);
        }
        let mut header = &received[..REQUEST];
        let (operation, zero) = (header.get_u8(), header.get_u8());
        let (key_len, value_len) = (usize::from(header.get_u16_le()), header.get_u32_le() as usize);
        let timeout = Duration::from_millis(header.get_u64_le().min(1 << 32));
        let is_known = matches!(operation, SET | GET | CLAIM) && zero == 0;
        if !is_known || key_len > LONGEST_KEY || value_len > LARGEST_VALUE {
            return Err(());
        }
        if received.len() < REQUEST + key_len + value_len {
            return Ok(None);
        }
        received.advance(REQUEST);
        let key = String::from_utf8(received.split_to(key_len).to_vec()).map_err(drop)?;
        let value = received.split_to(value_len).to_vec();
        Ok(Some(Request { operation, key, value, timeout }))
    }
}

/// Encodes a request.
pub(super) fn encode_request(operation: u8, key: &str, value: &[u8], timeout: Duration) -> BytesMut {
    let mut request = BytesMut::with_capacity(REQUEST + key.len() + value.len());
    request.put_u8(operation);
    request.put_u8(0);
    request.put_u16_le(key.len() as u16);
    request.put_u32_le(value.len() as u32);
    request.put_u64_le(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
    request.put_slice(key.as_bytes());
    request.put_slice(value);
    request
}

/// Encodes a response: its header, and the value.
pub(super) fn response(status: u8, value: Bytes) -> [Bytes; 2] {
    let mut header = BytesMut::with_capacity(RESPONSE);
    header.put_u32_le(status.into());
    header.put_u32_le(value.len() as u32);
    [header.freeze(), value]
}

/// Reads a response: its status and its value.
pub(super) fn read_response(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut header = [0; RESPONSE];
    stream.read_exact(&mut header)?;
    let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if len > LARGEST_VALUE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut value = vec![0; len];
    stream.read_exact(&mut value)?;
    Ok((header[0], value))
}

/// Decodes the bytes of a client, and those of a server.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut received = BytesMut::from(bytes);
    while let Ok(Some(Request { operation, key, value, .. })) = Request::take(&mut received) {
        assert!(matches!(operation, SET | GET | CLAIM) && key.len() <= LONGEST_KEY && value.len() <= LARGEST_VALUE);
        assert!(received.len() + REQUEST + key.len() + value.len() <= bytes.len(), "more is decoded than the bytes contain");
    }
    if let Ok((_, value)) = read_response(&mut &*bytes) {
        assert!(value.len() + RESPONSE <= bytes.len(), "more is decoded than the bytes contain");
    }
}

/// Returns a request.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample() -> Vec<u8> {
    [&[SET, 0, 3, 0, 5, 0, 0, 0][..], &100u64.to_le_bytes(), b"keyvalue"].concat()
}
