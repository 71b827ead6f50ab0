//! A link over one TCP connection that is encrypted, and whose ends show each other certificates: TLS 1.3 (RFC 8446).
//!
//! The certificates say who belongs to the job, beside its secret: both ends show one that the job's authority has signed, for
//! the name `kolo`. Ranks are told apart by the handshake before, so that one certificate may serve all.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::UnixTime;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    ServerConnection, SignatureScheme, version,
};

use super::tcp::{Arrived, BUFFER};
use super::{Link, cause_of};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::types::Rank;

/// The name for which certificates are made out.
const NAME: &str = "kolo";

/// Bytes that are encrypted before any of them leaves.
const AHEAD: usize = 256 << 10;

/// What this rank shows, and whom it believes.
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Which end of a connection a rank is.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// It made the connection.
    Caller,
    /// It took it.
    Called,
}

impl Tls {
    /// From PEM files: with the certificate of the job's authority, with the one that this rank shows, and with its key.
    pub(crate) fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Tls> {
        let wrong = |name: &str, path: &Path, why: String| Error::setting(name, path.display().to_string(), why);
        let certificates = |name: &str, path: &Path| {
            let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
            match read {
                Ok(certificates) if !certificates.is_empty() => Ok(certificates),
                Ok(_) => Err(wrong(name, path, "a PEM file with certificates, and it has none".to_owned())),
                Err(error) => Err(wrong(name, path, format!("a PEM file with certificates: {error}"))),
            }
        };
        let mut believed = RootCertStore::empty();
        for certificate in certificates("KOLO_TLS_CA", authority)? {
            let refused = |error| wrong("KOLO_TLS_CA", authority, format!("the job's authority: {error}"));
            believed.add(certificate).map_err(refused)?;
        }
        let believed = Arc::new(believed);
        let own = certificates("KOLO_TLS_CERT", certificate)?;
        let private = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| wrong("KOLO_TLS_KEY", key, format!("a PEM file with a private key: {error}")))?;

        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let mismatch = |error: rustls::Error| wrong("KOLO_TLS_KEY", key, format!("the certificate's key: {error}"));
        let unusable = |error: String| Error::Unsupported { what: "TLS", why: error };
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_root_certificates(believed.clone())
            .with_client_auth_cert(own.clone(), private.clone_key())
            .map_err(mismatch)?;
        let guard = WebPkiClientVerifier::builder_with_provider(believed, provider.clone())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_client_cert_verifier(Arc::new(Named(guard)))
            .with_single_cert(own, private)
            .map_err(mismatch)?;
        // Links are not resumed.
        server.send_tls13_tickets = 0;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The link over a connection. Its ends shake hands when they first use it.
    pub(crate) fn link(&self, stream: TcpStream, end: End, between: [Rank; 2]) -> std::result::Result<Box<dyn Link>, Cause> {
        let failed = |error: rustls::Error| failed(between, &error);
        let mut session: Connection = match end {
            End::Caller => {
                let name = ServerName::try_from(NAME).expect("it is a name");
                ClientConnection::new(self.client.clone(), name).map_err(failed)?.into()
            }
            End::Called => ServerConnection::new(self.server.clone()).map_err(failed)?.into(),
        };
        session.set_buffer_limit(Some(2 * AHEAD));
        Ok(Box::new(TlsLink { stream, session, between, arrived: Arrived::new(), clear: Vec::new(), taken: 0 }))
    }
}

/// Accepts a caller's certificate if the job's authority has signed it for [`NAME`], as callers do with a listener's.
#[derive(Debug)]
struct Named(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Named {
    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(own, others, now)?;
        let name = ServerName::try_from(NAME).expect("it is a name");
        verify_server_name(&ParsedCertificate::try_from(own)?, &name).map(|()| verified)
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Whose certificate is wrong is more than the two can know: others name the same, so both are said.
fn failed([caller, called]: [Rank; 2], error: &rustls::Error) -> Cause {
    Cause::Tls(format!("between ranks {caller} and {called}: {error}"))
}

struct TlsLink {
    stream: TcpStream,
    session: Connection,
    /// The caller's rank, and that of who was called.
    between: [Rank; 2],
    arrived: Arrived,
    /// Where the caller's bytes are encrypted: their own memory may be one that other processes see, which is no slice.
    clear: Vec<u8>,
    /// Bytes that the session has taken from the caller and of which some may not have left yet. Nobody would see to it that they
    /// do once the caller believed them sent, so they count as sent only then.
    taken: usize,
}

impl TlsLink {
    /// Whether the two ends have shown each other who they are, as far as this one can go on.
    fn shake_hands(&mut self) -> std::result::Result<bool, Cause> {
        while self.session.is_handshaking() {
            if !self.flush()? || (self.session.is_handshaking() && !self.hear()?) {
                return Ok(false);
            }
        }
        // The last word of the handshake may be this end's, and nobody else would see to it that it leaves.
        self.flush().map(|_| true)
    }

    /// Sends what has been encrypted; whether all of it has left.
    fn flush(&mut self) -> std::result::Result<bool, Cause> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(cause_of(&error)),
            }
        }
        Ok(true)
    }

    /// Takes in what the socket has; whether that was anything.
    fn hear(&mut self) -> std::result::Result<bool, Cause> {
        match self.session.read_tls(&mut self.stream) {
            Ok(0) => return Err(Cause::Closed),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(cause_of(&error)),
        }
        match self.session.process_new_packets() {
            Ok(_) => Ok(true),
            Err(error) => {
                // The peer is told why, if it can be.
                let _ = self.flush();
                Err(failed(self.between, &error))
            }
        }
    }

    /// Decrypts what has come; 0 if nothing has.
    fn read(&mut self, into: &mut [u8]) -> std::result::Result<usize, Cause> {
        if into.is_empty() || !self.shake_hands()? {
            return Ok(0);
        }
        loop {
            match self.session.reader().read(into) {
                Ok(0) => return Err(Cause::Closed),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(cause_of(&error)),
            }
            if !self.hear()? {
                return Ok(0);
            }
        }
    }
}

impl Link for TlsLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> std::result::Result<usize, Cause> {
        if !self.shake_hands()? {
            return Ok(0);
        }
        if self.taken == 0 {
            for part in parts {
                let wanted = part.len.min(AHEAD - self.taken);
                self.clear.clear();
                self.clear.reserve(wanted);
                // SAFETY: the caller vouches for the part, and there is room for it in the vector, which is this link's own.
                unsafe {
                    std::ptr::copy_nonoverlapping(part.ptr, self.clear.as_mut_ptr(), wanted);
                    self.clear.set_len(wanted);
                }
                let count = self.session.writer().write(&self.clear).map_err(|error| cause_of(&error))?;
                self.taken += count;
                if count < part.len {
                    break;
                }
            }
        }
        Ok(if self.flush()? { std::mem::take(&mut self.taken) } else { 0 })
    }

    fn has_begun(&self) -> bool {
        self.taken > 0
    }

    fn peek(&mut self, want: usize) -> std::result::Result<RawSlice, Cause> {
        while self.arrived.len() < want.min(BUFFER) {
            let room = self.arrived.room()[0];
            // SAFETY: the room is of the buffer, which is this link's own, and which holds bytes from the start.
            let into = unsafe { std::slice::from_raw_parts_mut(room.ptr, room.len) };
            let count = self.read(into)?;
            if count == 0 {
                break;
            }
            self.arrived.filled(count);
        }
        Ok(self.arrived.front(want))
    }

    fn consume(&mut self, count: usize) {
        self.arrived.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> std::result::Result<usize, Cause> {
        self.peek(into.len)?;
        Ok(self.arrived.take(into))
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.stream, token, Interest::READABLE | Interest::WRITABLE)
    }
}

impl Drop for TlsLink {
    fn drop(&mut self) {
        if self.taken == 0 {
            self.session.send_close_notify();
            let _ = self.flush();
        }
    }
}
