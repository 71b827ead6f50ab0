//! What the file contains.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use crate::error::StoreError;
use crate::sys;
use crate::types::mix;
use crate::wire::{Reader, Writer};

const MAGIC: &[u8] = b"kolo-store 1\n";

/// The largest file that is read, in bytes.
const LARGEST_FILE: u64 = 256 << 20;

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(bytes.len() as u64, |hash, &byte| mix(hash, byte.into()))
}

pub(super) fn header(generation: [u8; 16], job: &str) -> Vec<u8> {
    let mut writer = Writer([MAGIC, &generation].concat());
    writer.text(job);
    let hash = hash(&writer.0);
    writer.number(hash);
    writer.0
}

pub(super) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let mut payload = Writer::default();
    payload.text(key).bytes(value);
    let mut record = Writer::default();
    record.number(hash(&payload.0));
    record.0.extend(payload.0);
    record.0
}

/// The part of a file that has been read.
#[derive(Debug, Default, PartialEq)]
pub(super) struct View {
    /// The bytes of the header, which distinguish this file from one that replaces it. Empty until
    /// they have been read.
    pub(super) header: Vec<u8>,
    pub(super) job: String,
    pub(super) values: HashMap<String, Vec<u8>>,
    /// Where the last complete record ends.
    pub(super) end: u64,
}

impl View {
    pub(super) fn is_started(&self) -> bool {
        !self.header.is_empty()
    }

    /// Reads what was appended since the last call. If the file has been replaced, reads all of it.
    pub(super) fn read(&mut self, file: &mut File) -> Result<(), StoreError> {
        let failed = || StoreError::io("reading it");
        let len = file.metadata().map_err(failed())?.len();
        if len > LARGEST_FILE {
            return Err(StoreError::Foreign(format!("the file has {len} bytes")));
        }
        // A file that other users can read is not used: rank 0 replaces it.
        let is_open = sys::is_open_to_others(file).map_err(failed())?;
        if is_open || len < self.end || !self.is_of(file).map_err(failed())? {
            *self = View::default();
        }
        if is_open && len == 0 {
            return Ok(());
        }
        let mut bytes = Vec::new();
        let appended = file.seek(SeekFrom::Start(self.end)).and_then(|_| file.take(LARGEST_FILE).read_to_end(&mut bytes));
        appended.map_err(failed())?;
        if !self.is_started() && !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(StoreError::Foreign("the file has other contents, which are not changed".to_owned()));
        }
        if !is_open {
            self.take_in(&bytes);
        }
        Ok(())
    }

    /// Returns whether a file begins with the header that was read before.
    fn is_of(&self, file: &mut File) -> io::Result<bool> {
        let mut header = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(self.header.len() as u64).read_to_end(&mut header)?;
        Ok(header == self.header)
    }

    /// Decodes the bytes that follow [`View::end`], up to the first record that is not complete.
    pub(super) fn take_in(&mut self, bytes: &[u8]) {
        let mut reader = Reader::new(bytes);
        if !self.is_started() {
            let Some(job) = next_header(bytes, &mut reader) else { return };
            (self.job, self.header) = (job, bytes[..reader.at()].to_vec());
        }
        let mut complete = reader.at();
        while let Some((key, value)) = next_record(bytes, &mut reader) {
            self.values.insert(key, value);
            complete = reader.at();
        }
        self.end += complete as u64;
    }
}

fn next_header(bytes: &[u8], reader: &mut Reader<'_>) -> Option<String> {
    reader.take(MAGIC.len()).filter(|&magic| magic == MAGIC)?;
    reader.take(16)?;
    let job = reader.text()?;
    let hashed = hash(&bytes[..reader.at()]);
    (reader.number()? == hashed).then_some(job)
}

fn next_record(bytes: &[u8], reader: &mut Reader<'_>) -> Option<(String, Vec<u8>)> {
    let expected = reader.number()?;
    let start = reader.at();
    let (key, value) = (reader.text()?, reader.bytes()?);
    (hash(&bytes[start..reader.at()]) == expected).then(|| (key, value.to_vec()))
}

/// Decodes a file at once and in two parts: the results are equal, and nothing is read that is not
/// in the file.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut view = View::default();
    view.take_in(bytes);
    assert!(view.end <= bytes.len() as u64, "a record extends beyond the file");
    let held: usize = view.values.iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(held + view.job.len() <= bytes.len(), "more is decoded than the file contains");
    let mut in_two = View::default();
    in_two.take_in(&bytes[..bytes.len() / 2]);
    in_two.take_in(&bytes[in_two.end as usize..]);
    assert_eq!(in_two, view, "the result depends on how the file is divided");
}

/// Returns a file with records.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample() -> Vec<u8> {
    [header([3; 16], "job"), record("generation", b"12"), record("12/rank/0", &[7; 40])].concat()
}
