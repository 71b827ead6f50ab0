//! What the launcher and the agent of a host tell each other, over the agent's standard input and
//! output.
//!
//! The agent first writes a line that names the protocol: the shell of the host may write something
//! before it. Then each side writes frames: a length of 4 bytes (little-endian), a kind, and a body.
//! The body is a message in JSON, or bytes that a rank reads or has written.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::bind::BindTo;

/// The agent's first line. Its number changes with the protocol.
pub(super) const PREAMBLE: &[u8] = b"kolo agent: protocol 5\n";

/// The largest frame of the launcher, in bytes: arguments and environment are at most this long.
pub(super) const LARGEST_JOB: usize = 16 << 20;

/// The largest frame of an agent, in bytes.
pub(super) const LARGEST: usize = 1 << 20;

/// How many bytes of a stream may be under way.
pub(super) const WINDOW: usize = 1 << 20;

/// The ranks of a host. It has the secret of the job, so it has no `Debug`.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) name: String,
    /// The number of the host in the job.
    pub(super) host: usize,
    pub(super) secret: String,
    pub(super) store: SocketAddr,
    pub(super) world_size: usize,
    pub(super) first: usize,
    pub(super) ranks: usize,
    pub(super) directory: OsString,
    pub(super) environment: Vec<(OsString, OsString)>,
    pub(super) program: Vec<OsString>,
    /// Whether rank 0 is among the ranks and reads what the launcher reads.
    pub(super) has_input: bool,
    /// Whether the other ranks go on when one has failed.
    pub(super) keep_going: bool,
    pub(super) bind_to: BindTo,
    pub(super) report_bindings: bool,
    /// Whether the ranks load kolo in place of NCCL.
    pub(super) has_nccl: bool,
}

/// What the launcher tells an agent.
#[derive(Serialize, Deserialize)]
pub(super) enum ToAgent {
    Job(Box<Job>),
    /// All hosts are ready: the ranks start. `master` is the first host's.
    Start {
        master: SocketAddr,
    },
    /// The ranks get this signal.
    Signal(String),
    /// A rank of another host has failed.
    Failed,
    /// So many bytes of output were written.
    Written(usize),
    /// Nothing reads this stream of a rank any more.
    Unread {
        rank: usize,
        is_error: bool,
    },
    /// The launcher lives.
    Lives,
}

/// What an agent tells the launcher.
#[derive(Serialize, Deserialize)]
pub(super) enum ToLauncher {
    /// The agent has the job and can start the ranks. `master` is the host's address by which it reaches
    /// the launcher, with a port that is free there.
    Ready {
        master: SocketAddr,
    },
    /// The agent cannot start ranks, for this reason.
    Refused(String),
    Started {
        rank: usize,
        pid: u32,
    },
    NotStarted {
        rank: usize,
        why: String,
    },
    Ended {
        rank: usize,
        status: String,
        /// The rank's file of failures, and how long ago it was written, in milliseconds.
        failures: Option<(String, u64)>,
    },
    /// Rank 0 has taken this many bytes of its input.
    Taken(usize),
    /// All ranks have ended, and their output was sent.
    Done,
}

/// A frame that was read.
pub(super) enum Frame<M> {
    Message(M),
    Bytes { rank: usize, is_error: bool, bytes: Vec<u8> },
}

const MESSAGE: u8 = 0;
const BYTES: u8 = 1;

/// Returns the frame of a message.
pub(super) fn message(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = vec![0, 0, 0, 0, MESSAGE];
    serde_json::to_writer(&mut frame, message)?;
    finish(frame)
}

/// Returns the frame of bytes that a rank has written, or of bytes that rank 0 reads. No bytes are the
/// end of its input.
pub(super) fn bytes(rank: usize, is_error: bool, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let rank = u32::try_from(rank).map_err(io::Error::other)?;
    finish([&[0, 0, 0, 0, BYTES][..], &rank.to_le_bytes(), &[u8::from(is_error)], bytes].concat())
}

fn finish(mut frame: Vec<u8>) -> io::Result<Vec<u8>> {
    let length = frame.len() - 4;
    if length > LARGEST_JOB {
        return Err(io::Error::other(format!("a message of {length} bytes is too long; the most is {LARGEST_JOB}")));
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Reads a frame of at most `largest` bytes; `None` at the end of the stream.
pub(super) fn read<M: DeserializeOwned>(from: &mut impl Read, largest: usize) -> io::Result<Option<Frame<M>>> {
    let wrong = |what: &str| io::Error::new(ErrorKind::InvalidData, what.to_owned());
    let mut length = [0; 4];
    match from.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut length[1..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if !(1..=largest).contains(&length) {
        return Err(wrong("the length of a frame is wrong"));
    }
    // The memory grows with what has arrived.
    let mut body = Vec::new();
    if from.take(length as u64).read_to_end(&mut body)? != length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    match body.split_first() {
        Some((&MESSAGE, text)) => Ok(Some(Frame::Message(serde_json::from_slice(text)?))),
        Some((&BYTES, rest)) => {
            let (rank, rest) = rest.split_first_chunk().ok_or_else(|| wrong("a frame is too short"))?;
            let (stream, bytes) = rest.split_first().ok_or_else(|| wrong("a frame is too short"))?;
            let rank = u32::from_le_bytes(*rank) as usize;
            Ok(Some(Frame::Bytes { rank, is_error: *stream != 0, bytes: bytes.to_vec() }))
        }
        _ => Err(wrong("the kind of a frame is unknown")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut stream = message(&ToLauncher::Started { rank: 3, pid: 7 }).unwrap();
        stream.extend(bytes(2, true, b"line\xff\n").unwrap());
        let mut stream = &stream[..];
        let mut next = || read::<ToLauncher>(&mut stream, LARGEST);
        assert!(matches!(next().unwrap(), Some(Frame::Message(ToLauncher::Started { rank: 3, pid: 7 }))));
        let Some(Frame::Bytes { rank, is_error, bytes }) = next().unwrap() else { panic!() };
        assert_eq!((rank, is_error, &bytes[..]), (2, true, &b"line\xff\n"[..]));
        assert!(next().unwrap().is_none());
    }

    #[test]
    fn wrong_frames_are_errors() {
        for stream in [
            &[1, 0, 0][..],
            &[0, 0, 0, 0],
            &[255, 255, 255, 255, 0],
            &[5, 0, 0, 0, 0],
            &[1, 0, 0, 0, 9],
            &[1, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, b'{', b'}'],
            &[4, 0, 0, 0, 1, 0, 0, 0],
            &[5, 0, 0, 0, 1, 0, 0, 0, 0],
        ] {
            assert!(read::<ToLauncher>(&mut &*stream, LARGEST).is_err(), "{stream:?}");
        }
    }
}
