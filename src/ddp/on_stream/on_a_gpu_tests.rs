//! What only a GPU can show of the reducer; see the tests of the same name of the driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr};

use crate::communicator::{Communicator, on_one_gpu};
use crate::ddp::{Parameter, Reducer, TensorMut};
use crate::error::Result;
use crate::types::DType;

const LONG: usize = 300_000;
const SHORT: usize = 10;

fn read(stream: &Arc<CudaStream>, slice: &impl DevicePtr<f32>) -> Vec<f32> {
    stream.clone_dtoh(slice).unwrap()
}

#[test]
fn gradients_of_cudarc_are_averaged() -> Result<()> {
    on_one_gpu("ddp::on_stream::on_a_gpu_tests::gradients_of_cudarc_are_averaged", train)
}

fn train(comm: &Communicator) -> Result<()> {
    let rank = comm.rank() as f32;
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let filled = |value: f32, count: usize| stream.clone_htod(&vec![value; count]).unwrap();
    let parameters =
        [("weight", LONG), ("bias", SHORT)].map(|(name, count)| Parameter::new(name, [count], DType::F32).on_device());
    let buffers = [Parameter::new("mean", [SHORT], DType::F32).on_device()];
    let mut reducer = Reducer::builder().parameters(parameters).buffers(buffers).device(&stream).build(comm)?;

    let (mut weight, mut bias) = (filled(rank + 1.0, LONG), filled(rank + 1.0, SHORT));
    reducer.broadcast_parameters(&mut [TensorMut::on_device(&mut weight), TensorMut::on_device(&mut bias)])?;
    assert!(read(&stream, &weight).iter().chain(&read(&stream, &bias)).all(|&x| x == 1.0));
    reducer.average_parameters(&mut [TensorMut::on_device(&mut weight), TensorMut::on_device(&mut bias)])?;
    assert!(read(&stream, &weight).iter().chain(&read(&stream, &bias)).all(|&x| x == 1.0));

    for number in 0..4 {
        let accumulates = number == 2;
        let gradient = filled(rank + number as f32, LONG);
        let step = if accumulates { reducer.accumulate()? } else { reducer.begin()? };
        step.put_on_device(0, &gradient)?;
        if number == 3 {
            step.unused(1)?;
        } else {
            let mut view = step.view_on_device::<f32>(1)?;
            stream.memcpy_htod(&[2.0 * rank; SHORT], &mut view).unwrap();
            view.ready()?;
        }
        step.finish()?;
        if accumulates {
            continue;
        }
        let sum_of_steps = if number == 3 { 2.0 + 3.0 + 1.0 } else { number as f32 + 0.5 };
        assert!(read(&stream, &reducer.gradient_on_device(0)?).iter().all(|&x| x == sum_of_steps), "step {number}");
        assert!(read(&stream, &reducer.gradient_on_device(1)?).iter().all(|&x| x == 1.0), "step {number}");
    }
    // Clipping, as a program does it.
    stream.memcpy_htod(&[7.0f32; SHORT], &mut reducer.gradient_on_device_mut(1)?).unwrap();
    assert!(read(&stream, &reducer.gradient_on_device(1)?).iter().all(|&x| x == 7.0));
    Ok(())
}
