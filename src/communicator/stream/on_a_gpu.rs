//! What only a GPU can show of the calls on cudarc's slices; see the tests of the same name of the
//! driver.

use cudarc::driver::{CudaContext, CudaSlice};

use crate::communicator::Communicator;
use crate::error::{ArgumentError, Error, Result};
use crate::types::ReduceOp;

/// Runs `body` on two ranks that share a GPU, or says that there is none.
pub(crate) fn on_one_gpu(body: impl Fn(&Communicator) -> Result<()> + Sync) -> Result<()> {
    let comms = Communicator::builder().devices(true).connect_in_process(2)?;
    if !comms[0].has_devices() {
        let is_wanted = std::env::var_os("KOLO_TEST_GPU").is_some();
        assert!(!is_wanted, "there is no CUDA driver, though KOLO_TEST_GPU says that there is a GPU");
        std::io::Write::write_all(&mut std::io::stderr(), b"NOT RUN: a test on a GPU: there is no CUDA driver\n").unwrap();
        return Ok(());
    }
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.iter().map(|comm| scope.spawn(|| body(comm))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
}

#[test]
fn calls_with_counts_take_slices_of_cudarc() -> Result<()> {
    on_one_gpu(call)
}

fn call(comm: &Communicator) -> Result<()> {
    let (rank, other) = (comm.rank(), 1 - comm.rank());
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let on = comm.on(&stream);
    // Whole and short, and long enough to be reduced where they are.
    for counts in [[3, 5], [40_000, 50_001]] {
        let (own, all) = (counts[rank], counts[0] + counts[1]);
        let filled = |count: usize, value: f32| stream.clone_htod(&vec![value; count]).unwrap();
        let read = |slice: &CudaSlice<f32>| stream.clone_dtoh(slice).unwrap();
        let mut gathered = filled(all, -1.0);
        on.all_gather_v(&filled(own, rank as f32), &mut gathered, &counts)?;
        let content = read(&gathered);
        assert!(content.iter().enumerate().all(|(i, &x)| x == if i < counts[0] { 0.0 } else { 1.0 }));
        let mut block = filled(own, -1.0);
        on.reduce_scatter_v(&filled(all, rank as f32 + 1.0), &mut block, &counts, ReduceOp::Sum)?;
        assert!(read(&block).iter().all(|&x| x == 3.0));
        let mut exchanged = filled(2 * own, -1.0);
        on.all_to_all_v(&filled(all, rank as f32), &counts, &mut exchanged, &[own; 2])?;
        let content = read(&exchanged);
        assert!(content.iter().enumerate().all(|(i, &x)| x == if i < own { 0.0 } else { 1.0 }));
        let mut received = filled(counts[other], -1.0);
        on.send_recv(&filled(own, rank as f32), other, &mut received, other)?;
        assert!(read(&received).iter().all(|&x| x == other as f32));
        // Wrong arguments are refused before the call is sent.
        let refused = on.all_gather_v(&block, &mut gathered, &[own]);
        assert!(matches!(refused, Err(Error::Argument { problem: ArgumentError::Counts { given: 1, .. }, .. })), "{refused:?}");
        let refused = on.all_gather_v(&filled(own + 1, 0.0), &mut gathered, &counts);
        assert!(matches!(refused, Err(Error::Argument { problem: ArgumentError::Length { .. }, .. })), "{refused:?}");
    }
    Ok(())
}
