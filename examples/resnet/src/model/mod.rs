//! ResNets: their parameters, forward, and backward by segments.
//!
//! A model is a row of *segments*: the stem, each residual block, the head. What goes into a
//! segment is detached from what computed it, so that each is differentiated by itself, from the
//! last to the first, and the gradients of one are on their way to the other ranks while the next
//! is computed. The bits are those of going back through all at once.

pub(crate) mod architecture;
mod build;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod torchvision;

use kolo::ddp::{BufferSync, Reducer, Step};

use crate::engine::Engine;
use crate::rule::Rule;
use architecture::Shape;

/// The share of a running statistic that each batch replaces, as in PyTorch.
const MOMENTUM: f32 = 0.1;

/// The name and the shape of a parameter or a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// The name in torchvision.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

impl Name {
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A convolution and the normalisation after it.
struct Conv {
    /// The number of the parameter, or the weights in a shortcut without parameters.
    weight: Weight,
    stride: usize,
    padding: usize,
    norm: Option<Norm>,
}

enum Weight {
    Parameter(usize),
    /// The number of weights that are not trained: 1 where the channels in and out are the same.
    Constant(usize),
}

/// Batch normalisation.
struct Norm {
    /// The number of the scale among the parameters; that of the shift is the next.
    parameter: usize,
    /// The number of the running mean among the buffers; that of the variance is the next.
    buffer: usize,
}

/// A part of the model whose gradients are computed by themselves.
enum Segment {
    Stem { conv: Conv, pools: bool },
    Block { convs: Vec<Conv>, shortcut: Option<Conv> },
    Head { weight: usize, bias: usize },
}

/// A ResNet with its weights, on one rank.
pub(crate) struct Model<E: Engine> {
    engine: E,
    segments: Vec<Segment>,
    names: Vec<Name>,
    parameters: Vec<E::Tensor>,
    buffer_names: Vec<Name>,
    /// Running means and variances, which have no gradients.
    buffers: Vec<E::Tensor>,
    /// Weights that are not trained.
    constants: Vec<E::Tensor>,
    classes: usize,
}

/// A batch of images.
pub(crate) struct Batch {
    /// `[images, 3, height, width]`, normalised.
    pub(crate) pixels: Vec<f32>,
    pub(crate) labels: Vec<usize>,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

impl Batch {
    fn shape(&self) -> [usize; 4] {
        [self.labels.len(), 3, self.height, self.width]
    }
}

/// The mode of a forward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Normalises by the batch, and records what the gradients of parameters need.
    Training,
    /// Normalises by the running statistics.
    Evaluation,
}

/// The forward pass of one segment, as its backward pass needs it.
struct Tape<E: Engine> {
    /// Parameters by number, as leaves.
    leaves: Vec<(usize, E::Tensor)>,
    /// The number of the buffer, the mean and biased variance of the batch, and how many values
    /// these are of.
    statistics: Vec<(usize, E::Tensor, E::Tensor, usize)>,
}

impl<E: Engine> Model<E> {
    /// Makes a model with weights from the seed, initialised as PyTorch does.
    pub(crate) fn new(engine: E, shape: &Shape, classes: usize, seed: u64) -> Model<E> {
        let build::Parts { segments, parameters: names, buffers: buffer_names, constants } = build::parts(shape, classes);
        let parameters = (0..names.len()).map(|i| engine.constant(build::initial(&names, i, seed), &names[i].shape)).collect();
        let buffer = |name: &Name| {
            let first = if name.name.ends_with("running_var") { 1.0 } else { 0.0 };
            engine.constant(vec![first; name.count()], &name.shape)
        };
        let buffers = buffer_names.iter().map(buffer).collect();
        let constants = constants.into_iter().map(|(values, shape)| engine.constant(values, &shape)).collect();
        Model { engine, segments, names, parameters, buffer_names, buffers, constants, classes }
    }

    pub(crate) fn engine(&self) -> &E {
        &self.engine
    }

    pub(crate) fn classes(&self) -> usize {
        self.classes
    }

    /// Returns the parameters, in the order of the forward pass.
    pub(crate) fn names(&self) -> &[Name] {
        &self.names
    }

    pub(crate) fn buffer_names(&self) -> &[Name] {
        &self.buffer_names
    }

    /// Copies a parameter to the host.
    pub(crate) fn parameter(&self, number: usize) -> Vec<f32> {
        self.read(&self.parameters[number])
    }

    /// Copies a buffer to the host.
    pub(crate) fn buffer(&self, number: usize) -> Vec<f32> {
        self.read(&self.buffers[number])
    }

    /// Copies a tensor to the host.
    pub(crate) fn read(&self, tensor: &E::Tensor) -> Vec<f32> {
        let mut values = vec![0.0; self.engine.count(tensor)];
        self.engine.read(tensor, &mut values);
        values
    }

    /// Replaces a parameter.
    pub(crate) fn set_parameter(&mut self, number: usize, values: Vec<f32>) {
        self.parameters[number] = self.engine.constant(values, &self.names[number].shape);
    }

    /// Replaces a buffer.
    pub(crate) fn set_buffer(&mut self, number: usize, values: Vec<f32>) {
        self.buffers[number] = self.engine.constant(values, &self.buffer_names[number].shape);
    }

    /// Returns the parameters of rank 0. They replace those of this model with
    /// [`take_parameters`](Model::take_parameters), so that a failure does not change the model.
    pub(crate) fn parameters_of_rank_0(&self, reducer: &mut Reducer) -> kolo::Result<Vec<E::Tensor>> {
        self.of_rank_0(reducer, &self.parameters)
    }

    /// Returns rank 0's copies of tensors that have the shapes of the parameters.
    pub(crate) fn of_rank_0(&self, reducer: &mut Reducer, tensors: &[E::Tensor]) -> kolo::Result<Vec<E::Tensor>> {
        let mut copies: Vec<E::Tensor> = tensors.iter().map(|tensor| self.engine.copy(tensor)).collect();
        self.engine.lend(&mut copies, |values| reducer.broadcast_parameters(values))?;
        Ok(copies)
    }

    /// As [`parameters_of_rank_0`](Model::parameters_of_rank_0), for the buffers.
    pub(crate) fn buffers_of_rank_0(&self, reducer: &mut Reducer) -> kolo::Result<Vec<E::Tensor>> {
        let mut copies: Vec<E::Tensor> = self.buffers.iter().map(|tensor| self.engine.copy(tensor)).collect();
        self.engine.lend(&mut copies, |values| reducer.sync_buffers(values, BufferSync::Broadcast(0)))?;
        Ok(copies)
    }

    pub(crate) fn take_parameters(&mut self, parameters: Vec<E::Tensor>) {
        self.parameters = parameters;
    }

    pub(crate) fn take_buffers(&mut self, buffers: Vec<E::Tensor>) {
        self.buffers = buffers;
    }

    /// Averages the running statistics over all ranks.
    pub(crate) fn average_buffers(&mut self, reducer: &mut Reducer) -> kolo::Result<()> {
        self.engine.lend(&mut self.buffers, |values| reducer.sync_buffers(values, BufferSync::Average))
    }

    /// Updates a parameter and its velocity by the average of its gradient.
    pub(crate) fn descend(
        &mut self,
        rule: &Rule,
        reducer: &Reducer,
        number: usize,
        velocity: &mut E::Tensor,
    ) -> kolo::Result<()> {
        self.engine.descend(rule, reducer, number, &mut self.parameters[number], velocity)
    }

    /// Returns the outcome of images, by the running statistics.
    pub(crate) fn test(&self, batch: Batch) -> E::Outcomes {
        let labels = batch.labels.clone();
        self.engine.cross_entropy(&self.infer(batch), &labels).0
    }

    /// Returns the scores of the classes for each image, `[images, classes]`, by the running
    /// statistics.
    #[cfg(test)]
    pub(crate) fn evaluate(&self, batch: Batch) -> Vec<f32> {
        self.read(&self.infer(batch))
    }

    fn infer(&self, batch: Batch) -> E::Tensor {
        let shape = batch.shape();
        let mut x = self.engine.constant(batch.pixels, &shape);
        for segment in &self.segments {
            let mut tape = Tape { leaves: Vec::new(), statistics: Vec::new() };
            x = self.forward(segment, x, Mode::Evaluation, &mut tape);
        }
        x
    }

    /// Runs the forward pass, then the backward pass of the mean loss by segments. `ready` receives
    /// the number and the gradient of each parameter as soon as it is computed: in reverse order, one
    /// segment at a time. Returns the outcome of the batch.
    ///
    /// # Errors
    ///
    /// Those of `ready`, which end the pass.
    pub(crate) fn train<Error>(
        &mut self,
        batch: Batch,
        mut ready: impl FnMut(usize, Gradient<'_, E>) -> Result<(), Error>,
    ) -> Result<E::Outcomes, Error> {
        let (shape, labels) = (batch.shape(), batch.labels.clone());
        let mut x = self.engine.constant(batch.pixels, &shape);
        let mut tapes = Vec::with_capacity(self.segments.len());
        let mut statistics = Vec::new();
        for (i, segment) in self.segments.iter().enumerate() {
            // The gradient with respect to the images is not needed.
            let input = if i == 0 { x } else { self.engine.leaf(x) };
            let mut tape = Tape { leaves: Vec::new(), statistics: Vec::new() };
            let output = self.forward(segment, input.clone(), Mode::Training, &mut tape);
            x = self.engine.detach(output.clone());
            statistics.append(&mut tape.statistics);
            tapes.push((input, output, tape.leaves));
        }
        let (outcome, mut gradient) = self.engine.cross_entropy(&x, &labels);
        while let Some((input, output, leaves)) = tapes.pop() {
            let mut gradients = self.engine.backward(output, gradient.clone());
            for (number, leaf) in leaves.iter().rev() {
                let tensor = self.engine.gradient(&mut gradients, leaf).expect("every parameter takes part");
                ready(*number, Gradient { engine: &self.engine, tensor })?;
            }
            if !tapes.is_empty() {
                gradient = self.engine.gradient(&mut gradients, &input).expect("every segment depends on its input");
            }
        }
        self.keep_account(&statistics);
        Ok(outcome)
    }

    fn forward(&self, segment: &Segment, x: E::Tensor, mode: Mode, tape: &mut Tape<E>) -> E::Tensor {
        let engine = &self.engine;
        match segment {
            Segment::Stem { conv, pools } => {
                let x = engine.relu(self.conv(conv, x, mode, tape));
                if *pools { engine.max_pool(x) } else { x }
            }
            Segment::Block { convs, shortcut } => {
                let mut y = x.clone();
                for (i, conv) in convs.iter().enumerate() {
                    y = self.conv(conv, y, mode, tape);
                    if i + 1 < convs.len() {
                        y = engine.relu(y);
                    }
                }
                let x = match shortcut {
                    Some(conv) => self.conv(conv, x, mode, tape),
                    None => x,
                };
                engine.relu(engine.add(y, x))
            }
            Segment::Head { weight, bias } => {
                let x = engine.mean_pool(x);
                let (weight, bias) = (self.leaf(*weight, mode, tape), self.leaf(*bias, mode, tape));
                engine.linear(x, weight, bias)
            }
        }
    }

    fn conv(&self, conv: &Conv, x: E::Tensor, mode: Mode, tape: &mut Tape<E>) -> E::Tensor {
        let weight = match &conv.weight {
            Weight::Parameter(number) => self.leaf(*number, mode, tape),
            Weight::Constant(number) => self.constants[*number].clone(),
        };
        let x = self.engine.conv2d(x, weight, conv.stride, conv.padding);
        let Some(Norm { parameter, buffer }) = conv.norm else { return x };
        let (scale, shift) = (self.leaf(parameter, mode, tape), self.leaf(parameter + 1, mode, tape));
        match mode {
            Mode::Training => {
                let values = self.engine.count(&x) / self.buffer_names[buffer].count();
                let [x, mean, variance] = self.engine.batch_norm(x, scale, shift);
                tape.statistics.push((buffer, mean, variance, values));
                x
            }
            Mode::Evaluation => {
                let by = [buffer, buffer + 1].map(|i| self.buffers[i].clone());
                self.engine.batch_norm_by(x, scale, shift, by)
            }
        }
    }

    fn leaf(&self, number: usize, mode: Mode, tape: &mut Tape<E>) -> E::Tensor {
        let parameter = self.parameters[number].clone();
        if mode == Mode::Evaluation {
            return parameter;
        }
        let leaf = self.engine.leaf(parameter);
        tape.leaves.push((number, leaf.clone()));
        leaf
    }

    /// Moves the running statistics towards those of a batch. Keeps the unbiased variance, as in
    /// PyTorch.
    fn keep_account(&mut self, statistics: &[(usize, E::Tensor, E::Tensor, usize)]) {
        for (buffer, mean, variance, values) in statistics {
            let unbias = *values as f32 / (values - 1).max(1) as f32;
            for (buffer, batch, scale) in [(*buffer, mean, 1.0), (buffer + 1, variance, unbias)] {
                self.engine.follow(&mut self.buffers[buffer], batch, scale, MOMENTUM);
            }
        }
    }
}

/// The gradient of a parameter in the engine's memory.
pub(crate) struct Gradient<'a, E: Engine> {
    engine: &'a E,
    tensor: E::Tensor,
}

impl<E: Engine> Gradient<'_, E> {
    /// Gives the gradient to a reducer.
    pub(crate) fn put(&self, step: &Step<'_>, number: usize) -> kolo::Result<()> {
        self.engine.put(step, number, &self.tensor)
    }

    /// Copies the gradient by rows to the host.
    #[cfg(test)]
    pub(crate) fn read(&self, into: &mut [f32]) {
        self.engine.read(&self.tensor, into);
    }
}
