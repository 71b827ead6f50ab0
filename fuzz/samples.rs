//! Writes the inputs with which the fuzzers begin: a folder for each target in `corpus`.
#![no_main]
#![allow(unreachable_code, reason = "the program ends before it fuzzes")]

use std::path::Path;

use kolo::{Communicator, ReduceOp};

// A fuzz target itself, because the instrumentation of its code calls into libFuzzer.
libfuzzer_sys::fuzz_target!(
    init: {
        let written = samples(Path::new("corpus"));
        written.expect("cannot write the samples");
        std::process::exit(0)
    },
    |_bytes: &[u8]| {}
);

fn samples(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for target in &kolo::fuzzing::TARGETS {
        write(&folder.join(target.name), &(target.samples)())?;
    }
    write(&folder.join("trace"), &traces()?)
}

fn write(folder: &Path, samples: &[Vec<u8>]) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    for (number, sample) in samples.iter().enumerate() {
        std::fs::write(folder.join(format!("sample-{number}")), sample)?;
    }
    Ok(())
}

/// Returns the trace files of two ranks, separately and together.
fn traces() -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("kolo-samples-{}", std::process::id()));
    let comms = Communicator::in_process(2)?;
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(|| {
                let other = 1 - comm.rank();
                let done = comm.all_reduce(&mut [1.0f32], ReduceOp::Sum);
                done.and_then(|()| comm.send_recv(&[1u8], other, &mut [0u8], other)).expect("two healthy ranks exchange data");
            });
        }
    });
    let mut samples = Vec::new();
    for comm in &comms {
        comm.dump_trace(&path)?;
        samples.push(std::fs::read(&path)?);
    }
    std::fs::remove_file(&path)?;
    samples.push([&samples[0][..], &samples[1]].join(&0));
    Ok(samples)
}
