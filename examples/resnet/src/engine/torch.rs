//! PyTorch's kernels, through libtorch: on the CPU, or on a GPU.

use tch::{Device, Kind, Tensor};

use super::{EPSILON, Engine};

/// Tensors of libtorch on one device.
pub(crate) struct Torch {
    device: Device,
}

impl Torch {
    /// Makes the engine on a GPU of this machine, or on the CPU with `threads` threads for each
    /// operation.
    pub(crate) fn new(gpu: Option<usize>, threads: usize) -> Result<Torch, String> {
        let Some(gpu) = gpu else {
            tch::set_num_threads(threads as i32);
            return Ok(Torch { device: Device::Cpu });
        };
        match tch::Cuda::device_count() {
            0 => Err("libtorch finds no GPU; --engine torch needs none".to_owned()),
            // Ranks may share a GPU.
            count => Ok(Torch { device: Device::Cuda(gpu % count as usize) }),
        }
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

    fn change<R>(&self, tensor: &mut Handle, change: impl FnOnce(&mut [f32]) -> R) -> R {
        if self.device == Device::Cpu && tensor.0.is_contiguous() {
            // SAFETY: the tensor is contiguous f32 memory of this process and is borrowed mutably.
            // Other handles on it are leaves of steps that have ended, and no thread of libtorch
            // computes between calls.
            let values = unsafe { std::slice::from_raw_parts_mut(tensor.0.data_ptr().cast::<f32>(), tensor.0.numel()) };
            return change(values);
        }
        let mut values = vec![0.0; tensor.0.numel()];
        self.read(tensor, &mut values);
        let result = change(&mut values);
        let changed = Tensor::from_slice(&values).reshape(tensor.0.size());
        tch::no_grad(|| tensor.0.copy_(&changed));
        result
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
}
