use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::SOON;
use crate::rendezvous::store::Store;

/// Forwards a client's bytes to a server. It can hold them back as if the server were paused, and
/// end as if the server's process ended.
pub(super) struct Relay {
    pub(super) port: u16,
    gate: Arc<Mutex<()>>,
    ends: Arc<AtomicBool>,
}

impl Relay {
    /// Starts a relay for one client.
    pub(super) fn to(server: u16) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let gate = Arc::<Mutex<()>>::default();
        let ends = Arc::<AtomicBool>::default();
        let (passes, must_end) = (gate.clone(), ends.clone());
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
            let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let answering = std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let mut bytes = [0; 4096];
            while let Ok(1..) = client.peek(&mut bytes)
                && !must_end.load(Ordering::Relaxed)
                && let Ok(count @ 1..) = client.read(&mut bytes)
            {
                drop(passes.lock().unwrap());
                (&server).write_all(&bytes[..count]).unwrap();
            }
            // The connection closes when the last descriptor does. If bytes of the client are unread
            // then, the system resets it.
            let _ = server.shutdown(Shutdown::Both);
            answering.join().unwrap().ok();
        });
        Relay { port, gate, ends }
    }

    /// Ends at the next request, which it does not read.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Pauses the server while the store waits for a response, for longer than it would wait after
    /// the deadline.
    pub(super) fn pause(&self, store: &dyn Store) {
        let paused = self.gate.lock().unwrap();
        std::thread::scope(|scope| {
            let (answered, answer) = mpsc::channel();
            scope.spawn(move || answered.send(store.get("absent", SOON)).unwrap());
            let early = answer.recv_timeout(Duration::from_secs(6));
            drop(paused);
            assert!(early.is_err(), "while the server was paused: {early:?}");
            assert_eq!(answer.recv().unwrap().unwrap(), None);
        });
    }
}
