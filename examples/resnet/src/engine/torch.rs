//! PyTorch's kernels, through libtorch: on the CPU, or on a GPU.
//!
//! On a GPU, parameters, their gradients and velocities, running statistics and the sums of outcomes
//! stay there: kolo gets the addresses of tensors. Images and labels are copied to the GPU. Only
//! [`read`](Engine::read) and [`outcome`](Engine::outcome) copy to the host, for checkpoints and
//! reports.

use std::marker::PhantomData;
use std::sync::Arc;

use kolo::cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use kolo::ddp::{Parameter, Reducer, ReducerBuilder, Step, TensorMut};
use kolo::{Communicator, Element, ReduceOp};
use tch::{Device, Kind, Tensor};

use super::{EPSILON, Engine};
use crate::loss::Outcome;
use crate::rule::Rule;

/// Tensors of libtorch on one device.
pub(crate) struct Torch {
    device: Device,
    /// The stream of a GPU in whose order libtorch works: the default stream, because no call
    /// chooses another one.
    stream: Option<Arc<CudaStream>>,
}

impl Torch {
    /// Makes the engine on a GPU of this machine, or on the CPU with `threads` threads for each
    /// operation.
    pub(crate) fn new(gpu: Option<usize>, threads: usize) -> Result<Torch, String> {
        let Some(gpu) = gpu else {
            tch::set_num_threads(threads as i32);
            return Ok(Torch { device: Device::Cpu, stream: None });
        };
        match tch::Cuda::device_count() {
            0 => Err("libtorch finds no GPU; --engine torch needs none".to_owned()),
            // Ranks may share a GPU.
            count => {
                let gpu = gpu % count as usize;
                let context = CudaContext::new(gpu).map_err(|error| format!("GPU {gpu} cannot be opened: {error}"))?;
                Ok(Torch { device: Device::Cuda(gpu), stream: Some(context.default_stream()) })
            }
        }
    }
}

impl Torch {
    /// Makes a tensor of a gradient in a reducer's memory, without a copy.
    ///
    /// # Safety
    ///
    /// The reducer begins no step as long as the tensor lives, and the tensor is not changed.
    unsafe fn average(&self, reducer: &Reducer, number: usize) -> kolo::Result<Tensor> {
        let address = match &self.stream {
            None => reducer.gradient::<f32>(number)?.as_ptr().cast::<u8>(),
            Some(stream) => {
                let gradient = reducer.gradient_on_device::<f32>(number)?;
                std::ptr::without_provenance(gradient.device_ptr(stream).0 as usize)
            }
        };
        let shape: Vec<i64> = reducer.parameters()[number].shape.iter().map(|&size| size as i64).collect();
        // SAFETY: the reducer has as many values of f32 there, by rows, and the caller promises the
        // rest.
        Ok(unsafe { Tensor::from_blob(address, &shape, &[], Kind::Float, self.device) })
    }
}

/// Borrows the values of a tensor in host memory.
///
/// # Safety
///
/// The tensor is contiguous, has elements of this type, and is on the CPU. Nothing else uses its
/// memory.
unsafe fn on_host<T>(tensor: &mut Tensor) -> &mut [T] {
    debug_assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu);
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), tensor.numel()) }
}

/// The values of a contiguous tensor on a GPU, as kolo accepts them. The tensor must live as long.
struct OnDevice<'a, T> {
    address: u64,
    count: usize,
    stream: &'a Arc<CudaStream>,
    elements: PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> OnDevice<'a, T> {
    fn of(tensor: &'a Tensor, stream: &'a Arc<CudaStream>) -> OnDevice<'a, T> {
        assert!(tensor.is_contiguous() && tensor.kind().elt_size_in_bytes() == size_of::<T>());
        OnDevice { address: tensor.data_ptr().addr() as u64, count: tensor.numel(), stream, elements: PhantomData }
    }
}

impl<T: Element> DeviceSlice<T> for OnDevice<'_, T> {
    fn len(&self) -> usize {
        self.count
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream
    }
}

impl<T: Element> DevicePtr<T> for OnDevice<'_, T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        // kolo works in the order of the stream that libtorch uses, so nothing has to wait.
        (self.address, SyncOnDrop::Sync(None))
    }
}

impl<T: Element> DevicePtrMut<T> for OnDevice<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Sync(None))
    }
}

/// A handle on a tensor.
pub(crate) struct Handle(Tensor);

impl Clone for Handle {
    fn clone(&self) -> Handle {
        Handle(self.0.shallow_clone())
    }
}

impl Engine for Torch {
    type Tensor = Handle;
    /// libtorch keeps them in the leaves, which are new in each step.
    type Gradients = ();
    /// Loss, correct and images, in f64 on the device.
    type Outcomes = Handle;

    fn name(&self) -> String {
        match self.device {
            Device::Cpu => format!("libtorch, {} threads", tch::get_num_threads()),
            device => format!("libtorch, {device:?}"),
        }
    }

    fn constant(&self, values: Vec<f32>, shape: &[usize]) -> Handle {
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        Handle(Tensor::from_slice(&values).reshape(shape).to_device(self.device))
    }

    fn leaf(&self, tensor: Handle) -> Handle {
        Handle(tensor.0.detach().set_requires_grad(true))
    }

    fn detach(&self, tensor: Handle) -> Handle {
        Handle(tensor.0.detach())
    }

    fn count(&self, tensor: &Handle) -> usize {
        tensor.0.numel()
    }

    fn copy(&self, tensor: &Handle) -> Handle {
        Handle(tensor.0.detach().copy())
    }

    fn read(&self, tensor: &Handle, into: &mut [f32]) {
        tensor.0.detach().to_device(Device::Cpu).contiguous().copy_data(into, into.len());
    }

    fn conv2d(&self, x: Handle, weight: Handle, stride: usize, padding: usize) -> Handle {
        let [stride, padding] = [stride, padding].map(|number| [number as i64; 2]);
        Handle(x.0.conv2d(&weight.0, None::<Tensor>, stride, padding, [1; 2], 1))
    }

    fn batch_norm(&self, x: Handle, scale: Handle, shift: Handle) -> [Handle; 3] {
        let none = || None::<Tensor>;
        let (x, mean, inverse) = x.0.native_batch_norm(Some(scale.0), Some(shift.0), none(), none(), true, 0.0, EPSILON);
        // The inverse of the square root of the variance plus EPSILON.
        let variance = inverse.detach().pow_tensor_scalar(-2.0) - EPSILON;
        [x, mean.detach(), variance].map(Handle)
    }

    fn batch_norm_by(&self, x: Handle, scale: Handle, shift: Handle, [mean, variance]: [Handle; 2]) -> Handle {
        let is_cudnn_allowed = true;
        Handle(x.0.batch_norm(
            Some(scale.0),
            Some(shift.0),
            Some(mean.0),
            Some(variance.0),
            false,
            0.0,
            EPSILON,
            is_cudnn_allowed,
        ))
    }

    fn relu(&self, x: Handle) -> Handle {
        Handle(x.0.relu())
    }

    fn add(&self, x: Handle, y: Handle) -> Handle {
        Handle(x.0 + y.0)
    }

    fn max_pool(&self, x: Handle) -> Handle {
        Handle(x.0.max_pool2d([3; 2], [2; 2], [1; 2], [1; 2], false))
    }

    fn mean_pool(&self, x: Handle) -> Handle {
        Handle(x.0.mean_dim([2i64, 3].as_slice(), false, Kind::Float))
    }

    fn linear(&self, x: Handle, weight: Handle, bias: Handle) -> Handle {
        Handle(x.0.linear(&weight.0, Some(bias.0)))
    }

    fn backward(&self, of: Handle, gradient: Handle) {
        (of.0 * gradient.0).sum(Kind::Float).backward();
    }

    fn gradient(&self, (): &mut (), leaf: &Handle) -> Option<Handle> {
        let gradient = leaf.0.grad();
        gradient.defined().then(|| Handle(gradient))
    }

    fn follow(&self, running: &mut Handle, batch: &Handle, scale: f32, share: f32) {
        tch::no_grad(|| {
            let way = &batch.0 * f64::from(scale) - &running.0;
            running.0 += way * f64::from(share);
        });
    }

    fn cross_entropy(&self, scores: &Handle, labels: &[usize]) -> (Handle, Handle) {
        let images = labels.len() as f64;
        let labels: Vec<i64> = labels.iter().map(|&label| label as i64).collect();
        let labels = Tensor::from_slice(&labels).to_device(self.device);
        tch::no_grad(|| {
            let classes = scores.0.size()[1];
            let logarithms = scores.0.detach().log_softmax(1, Kind::Double);
            let loss = -logarithms.gather(1, &labels.unsqueeze(1), false).sum(Kind::Double);
            let correct = scores.0.argmax(1, false).eq_tensor(&labels).sum(Kind::Double);
            let images_there = loss.full_like(images);
            let gradient = (logarithms.exp() - labels.one_hot(classes)) / images;
            (Handle(Tensor::stack(&[loss, correct, images_there], 0)), Handle(gradient.to_kind(Kind::Float)))
        })
    }

    fn no_outcomes(&self) -> Handle {
        Handle(Tensor::zeros([3], (Kind::Double, self.device)))
    }

    fn add_outcomes(&self, sums: &mut Handle, others: Handle) {
        sums.0 += others.0;
    }

    fn outcome(&self, sums: &Handle) -> Outcome {
        let mut numbers = [0.0; 3];
        sums.0.to_device(Device::Cpu).copy_data(&mut numbers, 3);
        Outcome::of(numbers)
    }

    fn all_reduce(&self, comm: &Communicator, sums: &mut Handle) -> kolo::Result<()> {
        match &self.stream {
            // SAFETY: the tensor has elements of f64 and belongs to the caller alone.
            None => comm.all_reduce(unsafe { on_host::<f64>(&mut sums.0) }, ReduceOp::Sum),
            Some(stream) => comm.on(stream).all_reduce(&mut OnDevice::<f64>::of(&sums.0, stream), ReduceOp::Sum),
        }
    }

    fn place(&self, builder: ReducerBuilder) -> ReducerBuilder {
        match &self.stream {
            None => builder,
            Some(stream) => builder.device(stream),
        }
    }

    fn place_one(&self, parameter: Parameter) -> Parameter {
        if self.stream.is_some() { parameter.on_device() } else { parameter }
    }

    fn lend<R>(&self, tensors: &mut [Handle], call: impl FnOnce(&mut [TensorMut<'_>]) -> R) -> R {
        match &self.stream {
            None => {
                // SAFETY: the tensors are contiguous values of f32 and are borrowed mutably. Other
                // handles on their memory are leaves of steps that have ended.
                let lend = |tensor| TensorMut::from(unsafe { on_host::<f32>(tensor) });
                call(&mut tensors.iter_mut().map(|tensor| &mut tensor.0).map(lend).collect::<Vec<_>>())
            }
            Some(stream) => {
                let mut memory: Vec<OnDevice<'_, f32>> = tensors.iter().map(|tensor| OnDevice::of(&tensor.0, stream)).collect();
                call(&mut memory.iter_mut().map(TensorMut::on_device).collect::<Vec<_>>())
            }
        }
    }

    fn put(&self, step: &Step<'_>, number: usize, gradient: &Handle) -> kolo::Result<()> {
        let mut gradient = gradient.0.detach().contiguous();
        match &self.stream {
            // SAFETY: the tensor has elements of f32, and nothing changes it during the call.
            None => step.put(number, unsafe { on_host::<f32>(&mut gradient) }),
            // libtorch uses freed memory again in the order of the same stream, so after the copy.
            Some(stream) => step.put_on_device(number, &OnDevice::<f32>::of(&gradient, stream)),
        }
    }

    fn descend(
        &self,
        rule: &Rule,
        reducer: &Reducer,
        number: usize,
        values: &mut Handle,
        velocity: &mut Handle,
    ) -> kolo::Result<()> {
        // SAFETY: the tensor is only read, and dropped below, while the reducer is borrowed. The
        // reducer's next step uses the memory in the order of the same stream.
        let gradient = unsafe { self.average(reducer, number)? };
        let [rate, momentum, weight_decay] = [rule.rate, rule.momentum, rule.weight_decay].map(f64::from);
        tch::no_grad(|| {
            velocity.0 *= momentum;
            velocity.0 += gradient + &values.0 * weight_decay;
            values.0 -= &velocity.0 * rate;
        });
        Ok(())
    }
}
