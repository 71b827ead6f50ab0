//! A rank that advertises loopback to another host, where something else listens at its address.

use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;

use kolo::Communicator;

const PORT: u16 = 20_000;

/// The role says which ranks advertise loopback: `1`, the rank on the second host, while rank 0 holds
/// a socket at that address on its own host, and never answers there; or `all`, and then the own
/// listener of rank 0 is at the address of rank 1; or `2`, and then rank 1 of its host reaches rank 0.
pub(crate) fn rank() -> ExitCode {
    let role = std::env::var("KOLO_TEST_ROLE").unwrap();
    let rank = std::env::var("KOLO_RANK").unwrap();
    let _stranger =
        (role == "1" && rank == "0").then(|| TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).expect("the port is free"));
    let mut builder = Communicator::builder();
    if role == "all" || role == rank {
        builder = builder.interface("lo").ports(PORT..=PORT);
    }
    if role == "2" {
        return receive_from_any(&builder.connect().unwrap());
    }
    let error = builder.connect().and_then(|comm| comm.barrier()).unwrap_err().to_string();
    // Either rank may notice it first, and then tells the other one.
    let is_why = error.contains("cannot be reached at 127.0.0.1:20000") || error.contains("advertises a loopback address");
    assert!(is_why && !error.contains("rank 0 "), "rank {rank}: {error}");
    assert!(rank == "1" || error.contains("rank 1 "), "rank {rank}: {error}");
    println!("{error}");
    ExitCode::SUCCESS
}

/// Rank 2 cannot send to rank 0. Another rank may.
fn receive_from_any(comm: &Communicator) -> ExitCode {
    let mut received = [0];
    match comm.rank() {
        0 => assert_eq!(comm.recv_any(&mut received).unwrap(), 1),
        1 => comm.send(&[7], 0).unwrap(),
        _ => {}
    }
    println!("{received:?}");
    ExitCode::SUCCESS
}
