//! The file by which `kolo top` finds a job of this user and proves that it may ask the ranks.
//!
//! It holds the secret of the run and the peer infos of all ranks, and only its owner can open it.
//! Such a process could read the secret in the memory of a rank as well. The lowest rank of each
//! machine writes one after the rendezvous, and removes it when it ends.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::network::identity::{Identity, Run};
use crate::network::peer_info::PeerInfo;
use crate::sys::{self, NotOpened};
use crate::timeouts::FILE_SYSTEM;
use crate::types::Rank;
use crate::wire::{Reader, Writer, hexadecimal};

/// The file begins with this.
const MAGIC: &[u8; 12] = b"kolo-attach\x01";

/// The most bytes of a file that are read.
const LONGEST: u64 = 16 << 20;

/// What the names of the files end with.
const SUFFIX: &str = ".attach";

/// What it takes to ask the ranks of a run.
#[derive(Clone)]
pub(crate) struct Attachment {
    pub(crate) job: String,
    pub(crate) run: Run,
    pub(crate) secret: [u8; 32],
    pub(crate) peers: Vec<PeerInfo>,
}

impl Attachment {
    /// Returns what it takes to ask the ranks of a run; `None` if they share no secret.
    pub(crate) fn new(identity: &Identity, peers: &[PeerInfo]) -> Option<Attachment> {
        let (job, run, secret) = (identity.job().to_owned(), identity.run(), identity.secret()?);
        Some(Attachment { job, run, secret, peers: peers.to_vec() })
    }

    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer(MAGIC.to_vec());
        writer.text(&self.job).bytes(&self.run).bytes(&self.secret);
        writer.list(&self.peers, |writer, peer| _ = writer.bytes(&peer.encode()));
        writer.0
    }

    fn decode(bytes: &[u8]) -> Option<Attachment> {
        let mut reader = Reader::new(bytes.strip_prefix(MAGIC)?);
        let attachment = Attachment {
            job: reader.text()?,
            run: reader.bytes()?.try_into().ok()?,
            secret: reader.bytes()?.try_into().ok()?,
            peers: reader.list(|reader| PeerInfo::decode(reader.bytes()?))?,
        };
        let in_order = attachment.peers.iter().enumerate().all(|(rank, peer)| peer.rank == rank);
        (in_order && !attachment.peers.is_empty() && reader.is_at_end()).then_some(attachment)
    }

    /// Returns the files of a folder, in the order of their names.
    pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(SUFFIX.as_bytes())) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Reads a file, which must belong to this user and be closed to others.
    pub(crate) fn read(path: &Path) -> io::Result<Attachment> {
        let file = sys::open_own(OpenOptions::new().read(true), path).map_err(NotOpened::into_error)?;
        if sys::is_open_to_others(&file)? {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "other users can open it"));
        }
        let mut bytes = Vec::new();
        file.take(LONGEST).read_to_end(&mut bytes)?;
        let foreign = || io::Error::new(io::ErrorKind::InvalidData, "no rank of this version of kolo has written it");
        Attachment::decode(&bytes).ok_or_else(foreign)
    }

    /// Writes the file of a rank to a folder. No other user can open it.
    pub(crate) fn write(&self, folder: &Path, rank: Rank) -> io::Result<AttachmentFile> {
        let letter = |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '_' };
        let job: String = self.job.chars().map(letter).take(64).collect();
        let path = folder.join(format!("kolo-{job}-{}-rank{rank}{SUFFIX}", hexadecimal(&self.run[..4])));
        sys::write_file(&path, &self.encode())?;
        Ok(AttachmentFile { path, owner: std::process::id() })
    }
}

/// A file that is removed when it is dropped.
pub(crate) struct AttachmentFile {
    path: PathBuf,
    /// The process that wrote it. A forked child also has this value.
    owner: u32,
}

impl Drop for AttachmentFile {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        let (folder, path) = (self.path.parent().unwrap_or(&self.path).display().to_string(), self.path.clone());
        let (kind, until) = (format!("write {folder}"), Instant::now() + FILE_SYSTEM);
        let removed = sys::by_deadline(kind, until, sys::SILENT_FILE, move || sys::remove(&path), |error| error);
        // It holds a secret: without a thread for that, this one removes it.
        if let Err(error) = removed
            && (error.kind() == io::ErrorKind::TimedOut || sys::remove(&self.path).is_err())
        {
            crate::log::debug!(%error, path = %self.path.display(), "cannot remove the file for `kolo top`");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::peer_info::sample;

    fn attachment() -> Attachment {
        let identity = Identity::new("a job/1", None).of_run([3; 16], [9; 32]);
        Attachment::new(&identity, &[sample(0), sample(1)]).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no files")]
    fn a_file_lives_as_long_as_its_rank_and_belongs_to_its_user() {
        let folder = std::env::temp_dir().join(format!("kolo-attach-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let file = attachment().write(&folder, 0).unwrap();
        assert_eq!(Attachment::files(&folder).unwrap(), [folder.join("kolo-a_job_1-03030303-rank0.attach")]);
        let read = Attachment::read(&file.path).unwrap();
        assert_eq!((&*read.job, read.run, read.secret, read.peers), ("a job/1", [3; 16], [9; 32], vec![sample(0), sample(1)]));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(file.path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            std::fs::set_permissions(&file.path, PermissionsExt::from_mode(0o640)).unwrap();
            assert!(Attachment::read(&file.path).is_err(), "others can read the secret");
        }
        drop(file);
        assert!(Attachment::files(&folder).unwrap().is_empty());
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn what_no_rank_wrote_is_refused() {
        let bytes = attachment().encode();
        assert!(Attachment::decode(&bytes).is_some());
        for cut in 0..bytes.len() {
            assert!(Attachment::decode(&bytes[..cut]).is_none(), "cut at {cut}");
        }
        assert!(Attachment::decode(&[&bytes[..], &[0]].concat()).is_none());
        let mut disordered = attachment();
        disordered.peers.swap(0, 1);
        assert!(Attachment::decode(&disordered.encode()).is_none());
    }
}
