//! What only a GPU can show of the calls on cudarc's slices; see the tests of the same name of the
//! driver.

use cudarc::driver::{CudaContext, CudaSlice};

use crate::communicator::Communicator;
use crate::error::{ArgumentError, Error, Result};
use crate::types::ReduceOp;

/// Set in the processes that are the ranks of a test.
const IS_RANK: &str = "KOLO_TEST_IS_RANK";

/// Runs `body` on two ranks that share a GPU, or says that there is none. The ranks are processes,
/// which run the test of this name again: to make a stream or load a kernel waits for all streams of
/// a process.
pub(crate) fn on_one_gpu(test: &str, body: impl Fn(&Communicator) -> Result<()>) -> Result<()> {
    if std::env::var_os(IS_RANK).is_some() {
        return body(&Communicator::builder().devices(true).connect()?);
    }
    let [comm] = Communicator::builder().devices(true).connect_in_process(1)?.try_into().expect("there is one rank");
    if !comm.has_devices() {
        let is_wanted = std::env::var_os("KOLO_TEST_GPU").is_some();
        assert!(!is_wanted, "there is no CUDA driver, though KOLO_TEST_GPU says that there is a GPU");
        std::io::Write::write_all(&mut std::io::stderr(), b"NOT RUN: a test on a GPU: there is no CUDA driver\n").unwrap();
        return Ok(());
    }
    let folder = std::env::temp_dir().join(format!("kolo-gpu-{}-{}", std::process::id(), test.replace(':', "-")));
    std::fs::create_dir_all(&folder).unwrap();
    let start = |rank: usize| {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        program.args([test, "--exact", "--nocapture"]).env(IS_RANK, "1");
        program.env("KOLO_RANK", rank.to_string()).env("KOLO_WORLD_SIZE", "2");
        program.env("KOLO_STORE", format!("file://{}", folder.join("store").display()));
        program.spawn().unwrap()
    };
    let ranks = [0, 1].map(start);
    let ended = ranks.map(|mut rank| rank.wait().unwrap().success());
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(ended, [true; 2], "whether the ranks have passed");
    Ok(())
}

#[test]
fn calls_with_counts_take_slices_of_cudarc() -> Result<()> {
    on_one_gpu("communicator::stream::on_a_gpu_tests::calls_with_counts_take_slices_of_cudarc", call)
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
