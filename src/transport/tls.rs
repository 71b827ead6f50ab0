//! A link over one encrypted TCP connection, whose ends show each other certificates: TLS 1.3 (RFC
//! 8446).
//!
//! In addition to the secret, certificates prove that a process belongs to the job. Each end shows
//! a certificate for the name `kolo` that the job's authority has signed. The handshake before TLS
//! identifies the ranks, so all ranks may use the same certificate.

use std::io::{self, IoSlice, Read, Write};
use std::path::Path;
use std::sync::Arc;

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

use smallvec::SmallVec;

use super::receive_buffer::{BUFFER, ReceiveBuffer};
use super::{Link, cause_of};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::sys::{self, SocketWatch, TcpStream};
use crate::trace::Traffic;
use crate::types::Rank;

/// The name in the certificates.
const NAME: &str = "kolo";

/// Bytes that are encrypted before any of them is sent.
const AHEAD: usize = 256 << 10;

/// The certificates of this rank, and those that it trusts.
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Which end of a connection a rank is.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// The rank that connected.
    Initiator,
    /// The rank that accepted.
    Acceptor,
}

impl Tls {
    /// Loads PEM files: the certificate of the job's authority, the certificate of this rank, and
    /// its private key.
    pub(crate) fn load(authority: &Path, certificate: &Path, key: &Path) -> Result<Tls> {
        let wrong = |name: &str, path: &Path, why: String| Error::setting(name, path.display().to_string(), why);
        let certificates = |name: &str, path: &Path| {
            let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
            match read {
                Ok(certificates) if !certificates.is_empty() => Ok(certificates),
                Ok(_) => Err(wrong(name, path, "a PEM file with certificates, but it contains none".to_owned())),
                Err(error) => Err(wrong(name, path, format!("a PEM file with certificates: {error}"))),
            }
        };
        let mut trusted = RootCertStore::empty();
        for certificate in certificates("KOLO_TLS_CA", authority)? {
            let refused = |error| wrong("KOLO_TLS_CA", authority, format!("the job's authority: {error}"));
            trusted.add(certificate).map_err(refused)?;
        }
        let trusted = Arc::new(trusted);
        let own = certificates("KOLO_TLS_CERT", certificate)?;
        let private = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| wrong("KOLO_TLS_KEY", key, format!("a PEM file with a private key: {error}")))?;

        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let mismatch = |error: rustls::Error| wrong("KOLO_TLS_KEY", key, format!("the certificate's key: {error}"));
        let unusable = |error: String| Error::Unsupported { what: "TLS", why: error };
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_root_certificates(trusted.clone())
            .with_client_auth_cert(own.clone(), private.clone_key())
            .map_err(mismatch)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(trusted, provider.clone())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_client_cert_verifier(Arc::new(Named(verifier)))
            .with_single_cert(own, private)
            .map_err(mismatch)?;
        // Sessions of links are not resumed.
        server.send_tls13_tickets = 0;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }

    /// Makes the link over a connection. Its ends shake hands when they first use it.
    pub(crate) fn link(&self, stream: TcpStream, end: End, between: [Rank; 2]) -> std::result::Result<Box<dyn Link>, Cause> {
        let failed = |error: rustls::Error| failed(between, &error);
        let mut session: Connection = match end {
            End::Initiator => {
                let name = ServerName::try_from(NAME).expect("`kolo` is a valid name");
                ClientConnection::new(self.client.clone(), name).map_err(failed)?.into()
            }
            End::Acceptor => ServerConnection::new(self.server.clone()).map_err(failed)?.into(),
        };
        session.set_buffer_limit(Some(2 * AHEAD));
        let traffic = Traffic::of_sockets(vec![SocketWatch::new(&stream)]);
        Ok(Box::new(TlsLink { stream, session, between, arrived: ReceiveBuffer::new(), clear: Vec::new(), taken: 0, traffic }))
    }
}

/// Accepts an initiator's certificate if the job's authority has signed it for [`NAME`]. Initiators
/// check the acceptor's in the same way.
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
        let name = ServerName::try_from(NAME).expect("`kolo` is a valid name");
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

/// Returns the cause that all ranks report. It names both ranks, because neither end knows whose
/// certificate is wrong.
fn failed([initiator, acceptor]: [Rank; 2], error: &rustls::Error) -> Cause {
    Cause::Tls(format!("between ranks {initiator} and {acceptor}: {error}"))
}

struct TlsLink {
    stream: TcpStream,
    session: Connection,
    /// The ranks of the initiator and of the acceptor.
    between: [Rank; 2],
    arrived: ReceiveBuffer,
    /// A copy of the bytes to encrypt. Other processes may change the caller's memory, so it cannot
    /// be a slice.
    clear: Vec<u8>,
    /// Bytes that the session has taken and of which some may not have been sent. The caller of
    /// [`Link::send`] keeps calling only for bytes that were not taken, so they count as taken only
    /// when all of them have been sent.
    taken: usize,
    traffic: Arc<Traffic>,
}

/// The socket as the session writes to it: if the peer has closed it, the program gets no SIGPIPE, which
/// it may not ignore.
struct WithoutSignal<'a>(&'a TcpStream);

impl Write for WithoutSignal<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let parts: SmallVec<[RawSlice; sys::PARTS]> = from.iter().take(sys::PARTS).map(|part| RawSlice::of(part)).collect();
        // SAFETY: the slices are borrowed for the call.
        self.0.try_io(|| unsafe { sys::send(self.0, &parts) })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsLink {
    /// Continues the handshake; returns whether it is complete.
    fn shake_hands(&mut self) -> std::result::Result<bool, Cause> {
        while self.session.is_handshaking() {
            if !self.flush()? || (self.session.is_handshaking() && !self.receive_packets()?) {
                return Ok(false);
            }
        }
        // This end may send the last message of the handshake, and no later call would send it.
        self.flush().map(|_| true)
    }

    /// Sends the encrypted bytes; returns whether all of them have been sent.
    fn flush(&mut self) -> std::result::Result<bool, Cause> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut WithoutSignal(&self.stream)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(cause_of(&error)),
            }
        }
        Ok(true)
    }

    /// Reads what the socket has; returns whether there was anything.
    fn receive_packets(&mut self) -> std::result::Result<bool, Cause> {
        match self.session.read_tls(&mut *self.stream) {
            Ok(0) => return Err(Cause::Closed),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(cause_of(&error)),
        }
        match self.session.process_new_packets() {
            Ok(_) => Ok(true),
            Err(error) => {
                // Tells the peer why, if possible.
                let _ = self.flush();
                Err(failed(self.between, &error))
            }
        }
    }

    /// Decrypts what has arrived; 0 if nothing has.
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
            if !self.receive_packets()? {
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
                // SAFETY: the caller vouches for the part. The vector, which is this link's own,
                // has room for `wanted` bytes.
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
        let count = if self.flush()? { std::mem::take(&mut self.taken) } else { 0 };
        self.traffic.sent(count);
        Ok(count)
    }

    fn has_begun(&self) -> bool {
        self.taken > 0
    }

    fn peek(&mut self, want: usize) -> std::result::Result<RawSlice, Cause> {
        while self.arrived.len() < want.min(BUFFER) {
            let room = self.arrived.room()[0];
            // SAFETY: the room belongs to the buffer, which is this link's own and always
            // initialised.
            let into = unsafe { std::slice::from_raw_parts_mut(room.ptr, room.len) };
            let count = self.read(into)?;
            if count == 0 {
                break;
            }
            self.arrived.filled(count);
            self.traffic.received(count);
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

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some(("tls", self.traffic.clone()))
    }

    fn is_intact(&self) -> bool {
        self.stream.is_intact()
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
        self.traffic.close();
    }
}
