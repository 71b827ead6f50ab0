//! Encrypted links, with certificates that the commands in `docs/settings.md` create.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;

use crate::common;
use crate::common::{Case, DEADLINE, PATIENCE, check, ops, run};
use kolo::{Builder, Cause, Communicator, DType, Error, ReduceOp};

/// Returns a folder with an authority, a certificate and its key; `None` if they cannot be created
/// here.
fn certificates(name: &str) -> Option<PathBuf> {
    let is_signalled = std::env::var_os(SIGNALLED).is_some();
    #[cfg(unix)]
    if is_signalled {
        // SAFETY: no handler is replaced.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    // Not the folder of the process that has started this one.
    let folder = if is_signalled { "tls-signalled" } else { "tls" };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let guide = include_str!("../../docs/settings.md").split("## Encrypted links").nth(1).unwrap();
    let commands = guide.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    match Command::new("sh").args(["-e", "-c", commands]).current_dir(&folder).output() {
        Ok(output) if output.status.success() => Some(folder),
        Ok(output) if Command::new("openssl").arg("version").output().is_ok() => {
            panic!("the commands of docs/settings.md fail: {}", String::from_utf8_lossy(&output.stderr))
        }
        _ => {
            common::not_run("encrypted links: there is no openssl to make certificates");
            None
        }
    }
}

/// Puts each rank on its own host, so that links use the network.
fn apart(folder: &Path, rank: usize, builder: Builder) -> Builder {
    let file = |name| folder.join(name);
    builder.host(format!("host{rank}")).tls(file("ca.pem"), file("rank.pem"), file("rank.key"))
}

#[test]
fn every_operation_computes_what_it_should() {
    let Some(folder) = certificates("every") else { return };
    run(
        3,
        |rank, builder| apart(&folder, rank, builder).sockets(4),
        |comm| {
            let mut seed = 0;
            for op in ops() {
                // One record, several records, and more than is encrypted at once.
                for count in [1, 5000, 300_001] {
                    seed += 1;
                    let root = seed as usize % 3;
                    let case = Case { op, dtype: DType::F32, redop: ReduceOp::Sum, count, root, in_place: false, seed };
                    check(&comm, case).unwrap_or_else(|error| panic!("{error} in {case:?}"));
                }
            }
        },
    );
}

/// Messages in both directions at once, each larger than all buffers between the ranks.
#[test]
fn both_ranks_can_send_at_once() {
    let Some(folder) = certificates("both") else { return };
    run(
        2,
        |rank, builder| apart(&folder, rank, builder),
        |comm| {
            let other = 1 - comm.rank();
            let mine: Vec<u32> = (0..8 << 20).map(|i| i * 7 + comm.rank() as u32).collect();
            let mut theirs = vec![0; mine.len()];
            comm.send_recv(&mine, other, &mut theirs, other).unwrap();
            assert!(theirs.iter().enumerate().all(|(i, &x)| x == i as u32 * 7 + other as u32));
        },
    );
}

/// A peer that has closed its end is an error, also in a program that gets SIGPIPE.
#[cfg(unix)]
#[test]
fn a_program_that_does_not_ignore_a_signal_lives_on() {
    common::in_a_process("tls::both_ranks_can_send_at_once", SIGNALLED);
}

/// Set in a process that gets SIGPIPE.
const SIGNALLED: &str = "KOLO_TEST_SIGNALLED";

/// After encrypted bytes that were not sent, a rank must not write a goodbye.
#[test]
fn nothing_follows_a_truncated_message() {
    let Some(folder) = certificates("cut") else { return };
    let has_failed = Barrier::new(2);
    run(
        2,
        |rank, builder| apart(&folder, rank, builder).timeout(if rank == 0 { DEADLINE } else { PATIENCE }),
        |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 0 {
                comm.send(&vec![7u8; 64 << 20], 1).unwrap_err();
                has_failed.wait();
            } else {
                has_failed.wait();
                match comm.recv(&mut vec![0u8; 64 << 20], 0) {
                    Err(Error::Peer { rank: 0 | 1, .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
        },
    );
}

#[test]
fn a_certificate_of_another_authority_is_rejected() {
    let (Some(ours), Some(others)) = (certificates("ours"), certificates("others")) else { return };
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let builder = Communicator::builder().rank(rank).world_size(3).store("hash://believes");
            let builder = apart(if rank == 1 { &others } else { &ours }, rank, builder);
            scope.spawn(move || match builder.connect() {
                // No rank can know which of the two is wrong, but the error names both.
                Err(Error::Peer { cause: Cause::Tls(why), .. }) => assert!(why.contains(" 1"), "{why}"),
                other => panic!("{other:?}"),
            });
        }
    });
}

/// The rank with the wrong name connects or accepts.
#[test]
fn a_certificate_for_another_name_is_rejected() {
    let Some(folder) = certificates("names") else { return };
    let commands = r#"
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=kolo" -keyout other.key -out other.csr
        printf "subjectAltName=DNS:elsewhere" > other.ext
        openssl x509 -req -in other.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile other.ext -out other.pem"#;
    let output = Command::new("sh").args(["-e", "-c", commands]).current_dir(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for misnamed in 0..2 {
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let builder = Communicator::builder().rank(rank).world_size(2).store(format!("hash://names-{misnamed}"));
                let file = |name| folder.join(name);
                let builder = match rank == misnamed {
                    true => builder.host(format!("host{rank}")).tls(file("ca.pem"), file("other.pem"), file("other.key")),
                    false => apart(&folder, rank, builder),
                };
                scope.spawn(move || match builder.connect() {
                    Err(Error::Peer { cause: Cause::Tls(_), .. }) => {}
                    other => panic!("rank {rank}, misnamed {misnamed}: {other:?}"),
                });
            }
        });
    }
}

#[test]
fn all_ranks_encrypt_or_none() {
    let Some(folder) = certificates("some") else { return };
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let builder = Communicator::builder().rank(rank).world_size(2).store("hash://encrypts");
            let builder = if rank == 0 { apart(&folder, rank, builder) } else { builder.host("host1") };
            scope.spawn(move || {
                let error = builder.connect().unwrap_err().to_string();
                assert!(error.contains("rank 0") && error.contains("rank 1 (host1) has none"), "{error}");
            });
        }
    });
}

#[test]
fn invalid_files_are_named() {
    let Some(folder) = certificates("wrong") else { return };
    let file = |name| folder.join(name);
    for (files, named) in [
        (["nothing.pem", "rank.pem", "rank.key"], "KOLO_TLS_CA"),
        (["ca.pem", "rank.key", "rank.key"], "KOLO_TLS_CERT"),
        (["ca.pem", "rank.pem", "rank.pem"], "KOLO_TLS_KEY"),
        (["ca.pem", "rank.pem", "ca.key"], "KOLO_TLS_KEY"),
    ] {
        let [authority, certificate, key] = files.map(file);
        let builder = Communicator::builder().rank(0).world_size(2).store("hash://wrong");
        let error = builder.tls(authority, certificate, key).connect().unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
