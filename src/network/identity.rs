//! What makes a process part of a run of a job, and the keys that follow from the secret.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Bytes of a MAC.
pub(crate) const MAC: usize = 32;

/// The number of a run of a job. A store server outlives runs and uses zeros.
pub(crate) type Run = [u8; 16];

/// What a process must share with its peers: the job, the run and the secret.
#[derive(Clone)]
pub(crate) struct Identity {
    job: String,
    digest: [u8; 16],
    run: Run,
    secret: Option<[u8; 32]>,
    /// The ranks agreed on the secret through a store to which other processes can write.
    is_agreed: bool,
    insecure: bool,
}

/// How two processes are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    Network,
    /// A socket that only processes of one host can reach.
    Local,
}

impl Identity {
    pub(crate) fn new(job: &str, secret: Option<[u8; 32]>) -> Identity {
        let mut digest = [0; 16];
        digest.copy_from_slice(&Sha256::digest(job.as_bytes())[..16]);
        Identity { job: job.to_owned(), digest, run: [0; 16], secret, is_agreed: false, insecure: false }
    }

    /// Sets whether a process without a secret may listen to other machines.
    pub(crate) fn insecure(self, insecure: bool) -> Identity {
        Identity { insecure, ..self }
    }

    /// Returns the identity within one run of the job, whose ranks share this secret.
    pub(crate) fn of_run(self, run: Run, secret: [u8; 32]) -> Identity {
        Identity { run, secret: Some(secret), ..self }
    }

    /// Returns the identity of a process that knows the run, but perhaps not its secret.
    #[cfg(test)]
    pub(crate) fn in_run(self, run: Run) -> Identity {
        Identity { run, ..self }
    }

    /// Marks the secret as agreed on through a store to which other processes can write.
    pub(crate) fn agreed(self) -> Identity {
        Identity { is_agreed: true, ..self }
    }

    /// Returns whether processes of other users of this host are strangers even if they know the
    /// secret. They may have obtained it through the store.
    pub(crate) fn is_of_one_user(&self) -> bool {
        self.secret.is_none() || self.is_agreed
    }

    pub(crate) fn run(&self) -> Run {
        self.run
    }

    pub(crate) fn secret(&self) -> Option<[u8; 32]> {
        self.secret
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns whether this process may listen where other machines reach it.
    pub(crate) fn may_listen(&self) -> bool {
        if self.secret.is_none() && self.insecure {
            crate::log::warn!(
                "without a secret, every process that reaches this one can join or disturb the job (KOLO_INSECURE)"
            );
        }
        self.secret.is_some() || self.insecure
    }

    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    /// Returns a digest of the job's name, which has a fixed length.
    pub(crate) fn digest(&self) -> [u8; 16] {
        self.digest
    }

    /// Returns the key for values in a store.
    pub(crate) fn store_key(&self) -> Key {
        Key::derive(self.secret.as_ref(), "kolo store")
    }

    /// Returns the key for handshakes over one medium.
    pub(crate) fn handshake_key(&self, medium: Medium) -> Key {
        let label = match medium {
            Medium::Network => "kolo handshake in the network",
            Medium::Local => "kolo handshake inside a host",
        };
        Key::derive(self.secret.as_ref(), label)
    }
}

/// A key for one purpose, derived from the secret. What is computed with it reveals nothing about
/// the keys for other purposes.
#[derive(Clone)]
pub(crate) struct Key([u8; MAC]);

impl Key {
    pub(crate) fn derive(secret: Option<&[u8; 32]>, purpose: &str) -> Key {
        let secret = secret.map_or(&[][..], |secret| secret);
        Key(mac(secret, &[purpose.as_bytes()]).finalize().into_bytes().into())
    }

    /// Returns the MAC of `parts`, laid end to end. All parts but one have a fixed length or
    /// contain their own length.
    pub(crate) fn sign(&self, parts: &[&[u8]]) -> [u8; MAC] {
        mac(&self.0, parts).finalize().into_bytes().into()
    }

    /// Returns whether `signature` is the MAC of `parts`, in constant time.
    pub(crate) fn is_signed(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        mac(&self.0, parts).verify_slice(signature).is_ok()
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// Returns 16 unpredictable bytes.
pub(crate) fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system provides random numbers");
    bytes
}

/// Returns an unpredictable number.
pub(crate) fn random_number() -> u64 {
    u128::from_le_bytes(random()) as u64
}

/// Returns a secret for a run whose ranks were given none.
pub(crate) fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).expect("the system provides random numbers");
    secret
}
