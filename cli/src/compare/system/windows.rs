//! Windows: TCP on loopback, and sections of files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::windows::io::AsRawHandle;
use std::path::Path;
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::CloseHandle;
use windows_sys::Win32::System::Memory::{CreateFileMappingW, FILE_MAP_READ, FILE_MAP_WRITE, MapViewOfFile, PAGE_READWRITE};

pub(in crate::compare) use super::no_futex::{bind_thread, check_futex, sleep_on, wake_all};
use crate::random::{hexadecimal, random};

/// A connection between a rank and the comparison.
pub(in crate::compare) type Stream = TcpStream;

/// How long a connected rank may take to send the key. It sends it at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// Accepts the ranks. A connection begins with a key, which is in a file of this user.
pub(in crate::compare) struct Listener {
    listener: TcpListener,
    key: String,
}

impl Listener {
    /// Listens on loopback, and writes the port and the key to the file at `path`.
    pub(in crate::compare) fn bind(path: &Path) -> io::Result<Listener> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let key = hexadecimal(&random::<16>().map_err(io::Error::other)?);
        std::fs::write(path, format!("{} {key}", listener.local_addr()?.port()))?;
        Ok(Listener { listener, key })
    }

    /// Accepts the next rank; `WouldBlock` if there is none.
    pub(in crate::compare) fn accept(&self) -> io::Result<Stream> {
        let admitted = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            self.admits(&stream).map(|is_rank| is_rank.then_some(stream))
        });
        // Another process of the machine may connect, and end its connection.
        admitted.ok().flatten().ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Returns whether the process at the other end sends the key in time.
    fn admits(&self, mut stream: &TcpStream) -> io::Result<bool> {
        let end = Instant::now() + PATIENCE;
        let mut key = vec![0; self.key.len()];
        let mut count = 0;
        while count < key.len() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut key[count..])? {
                0 => return Ok(false),
                more => count += more,
            }
        }
        Ok(key == self.key.as_bytes())
    }
}

pub(in crate::compare) fn connect(path: &Path) -> io::Result<Stream> {
    let text = std::fs::read_to_string(path)?;
    let (port, key) = text.split_once(' ').ok_or(io::ErrorKind::InvalidData)?;
    let port: u16 = port.parse().map_err(|_| io::ErrorKind::InvalidData)?;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    stream.write_all(key.as_bytes())?;
    Ok(stream)
}

pub(in crate::compare) fn check_peers() -> Result<(), String> {
    Err("other libraries are not compared on Windows".to_owned())
}

/// Maps the first `len` bytes of a file until the process ends. Processes that map the file share
/// them.
pub(in crate::compare) fn map(file: &File, len: usize) -> io::Result<*mut u8> {
    let len_low = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the file is open, and the section has no attributes and no name.
    let section =
        unsafe { CreateFileMappingW(file.as_raw_handle(), std::ptr::null(), PAGE_READWRITE, 0, len_low, std::ptr::null()) };
    if section.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the section is open and has `len` bytes. A new view at an address that the system
    // chooses replaces no other.
    let view = unsafe { MapViewOfFile(section, FILE_MAP_READ | FILE_MAP_WRITE, 0, 0, len) };
    let error = io::Error::last_os_error();
    // SAFETY: the handle was opened above, and no other code has it. The view keeps the section.
    unsafe { CloseHandle(section) };
    if view.Value.is_null() { Err(error) } else { Ok(view.Value.cast()) }
}
