//! A program that continues where it was when its launcher starts it again, with as many ranks or
//! with others: its state is in a file, which rank 0 writes after every step.
//!
//! `cargo build --release --examples`, then `torchrun --nproc-per-node 4 --max-restarts 3 --no-python
//! target/release/examples/resume FILE [STEPS [MILLISECONDS]]` with the number of steps, and how long
//! each of them works.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use kolo::{Communicator, ReduceOp};

/// How many parts of work a step has, which the ranks share.
const PARTS: u64 = 64;

/// The number of steps done, and what they have added up to.
type State = [u64; 2];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("give the file of the state: resume FILE [STEPS [MILLISECONDS]]")?;
    let number = |text: String| text.parse().map_err(|_| format!("{text}: give a whole number"));
    let steps = arguments.next().map_or(Ok(100), number)?;
    let pause = Duration::from_millis(arguments.next().map_or(Ok(0), number)?);
    let comm = Communicator::from_env()?;
    let (rank, ranks) = (comm.rank() as u64, comm.world_size() as u64);

    // Rank 0 alone reads the file, so that all ranks continue from the same state.
    let mut state = if rank == 0 { read(Path::new(&file))? } else { State::default() };
    comm.broadcast(&mut state, 0)?;
    if rank == 0 {
        println!("from step {} on with {ranks} ranks on {} hosts", state[0], comm.host_count());
    }
    while state[0] < steps {
        let mut sum: [u64; 1] = [(rank..PARTS).step_by(ranks as usize).map(|part| work(state[0], part)).sum()];
        std::thread::sleep(pause);
        // If a rank has failed, this is an error on all others: they end, and the launcher starts all
        // of them again.
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        state = [state[0] + 1, state[1] + sum[0]];
        if rank == 0 {
            write(Path::new(&file), state)?;
        }
    }
    let expected = (0..steps).flat_map(|step| (0..PARTS).map(move |part| work(step, part))).sum::<u64>();
    assert_eq!(state, [steps, expected], "parts of the work are lost, or were done twice");
    if rank == 0 {
        println!("{steps} steps: all parts done once");
    }
    comm.barrier()?;
    Ok(())
}

/// One part of a step's work.
fn work(step: u64, part: u64) -> u64 {
    (step * PARTS + part).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

fn read(file: &Path) -> Result<State, Box<dyn std::error::Error>> {
    if !file.exists() {
        return Ok(State::default());
    }
    let text = std::fs::read_to_string(file)?;
    let (step, sum) = text.trim().split_once(' ').ok_or("the file has no state of this program")?;
    Ok([step.parse()?, sum.parse()?])
}

/// Writes beside the file first: a rank 0 that is killed while it writes leaves the state before.
fn write(file: &Path, [step, sum]: State) -> std::io::Result<()> {
    let beside = file.with_extension("new");
    std::fs::write(&beside, format!("{step} {sum}\n"))?;
    std::fs::rename(&beside, file)
}
