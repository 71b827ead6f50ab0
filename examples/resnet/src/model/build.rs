//! Builds the layers of an architecture, with torchvision's names.

use super::architecture::{BlockKind, Shape, Stem};
use super::{Conv, Name, Norm, Segment, Weight};
use crate::random::{Purpose, Random};

/// The parts of a model.
pub(super) struct Parts {
    pub(super) segments: Vec<Segment>,
    /// The parameters, in the order of the forward pass.
    pub(super) parameters: Vec<Name>,
    pub(super) buffers: Vec<Name>,
    /// Weights that are not trained: values and shape.
    pub(super) constants: Vec<(Vec<f32>, [usize; 4])>,
}

/// Returns the parts of a model.
pub(super) fn parts(shape: &Shape, classes: usize) -> Parts {
    let mut builder =
        Builder { normalises: shape.normalises, parameters: Vec::new(), buffers: Vec::new(), constants: Vec::new() };
    let (size, stride, pools) = match shape.stem {
        Stem::Large => (7, 2, true),
        Stem::Small => (3, 1, false),
    };
    let conv = builder.conv("conv1", "bn1", [3, shape.width], size, stride);
    let mut segments = vec![Segment::Stem { conv, pools }];
    let mut channels = shape.width;
    for (stage, &blocks) in shape.stages.iter().enumerate() {
        let width = shape.width << stage;
        for block in 0..blocks {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let prefix = format!("layer{}.{block}.", stage + 1);
            let (segment, out) = builder.block(shape, &prefix, [channels, width], stride);
            segments.push(segment);
            channels = out;
        }
    }
    let weight = builder.parameter("fc.weight".to_owned(), &[classes, channels]);
    let bias = builder.parameter("fc.bias".to_owned(), &[classes]);
    segments.push(Segment::Head { weight, bias });
    let Builder { parameters, buffers, constants, .. } = builder;
    Parts { segments, parameters, buffers, constants }
}

struct Builder {
    normalises: bool,
    parameters: Vec<Name>,
    buffers: Vec<Name>,
    constants: Vec<(Vec<f32>, [usize; 4])>,
}

impl Builder {
    fn parameter(&mut self, name: String, shape: &[usize]) -> usize {
        self.parameters.push(Name { name, shape: shape.to_vec() });
        self.parameters.len() - 1
    }

    fn conv(&mut self, name: &str, norm: &str, [from, to]: [usize; 2], size: usize, stride: usize) -> Conv {
        let weight = Weight::Parameter(self.parameter(format!("{name}.weight"), &[to, from, size, size]));
        let norm = self.normalises.then(|| {
            let parameter = self.parameter(format!("{norm}.weight"), &[to]);
            self.parameter(format!("{norm}.bias"), &[to]);
            for statistic in ["mean", "var"] {
                self.buffers.push(Name { name: format!("{norm}.running_{statistic}"), shape: vec![to] });
            }
            Norm { parameter, buffer: self.buffers.len() - 2 }
        });
        Conv { weight, stride, padding: size / 2, norm }
    }

    /// Adds a block with `from` channels in and `inside` channels inside. Returns the channels that
    /// come out.
    fn block(&mut self, shape: &Shape, prefix: &str, [from, width]: [usize; 2], stride: usize) -> (Segment, usize) {
        // Channels before and after, size and stride of each convolution.
        let (layers, to) = match shape.block {
            BlockKind::Basic => (vec![([from, width], 3, stride), ([width, width], 3, 1)], width),
            BlockKind::Bottleneck => {
                (vec![([from, width], 1, 1), ([width, width], 3, stride), ([width, 4 * width], 1, 1)], 4 * width)
            }
        };
        let convs = layers
            .into_iter()
            .zip(1..)
            .map(|((channels, size, stride), i)| {
                self.conv(&format!("{prefix}conv{i}"), &format!("{prefix}bn{i}"), channels, size, stride)
            })
            .collect();
        let shortcut = (stride != 1 || from != to).then(|| {
            if shape.projects {
                self.conv(&format!("{prefix}downsample.0"), &format!("{prefix}downsample.1"), [from, to], 1, stride)
            } else {
                self.constants.push(identity(from, to));
                Conv { weight: Weight::Constant(self.constants.len() - 1), stride, padding: 0, norm: None }
            }
        });
        (Segment::Block { convs, shortcut }, to)
    }
}

/// Returns the weights of a shortcut without parameters as a convolution: it copies channels, and
/// adds channels of 0 on both sides.
fn identity(from: usize, to: usize) -> (Vec<f32>, [usize; 4]) {
    let mut values = vec![0.0; to * from];
    for channel in 0..from {
        values[(channel + (to - from) / 2) * from + channel] = 1.0;
    }
    (values, [to, from, 1, 1])
}

/// Returns the initial values of a parameter: torchvision's for convolutions (He et al.: Delving
/// Deep into Rectifiers, 2015; normal, by fan-out) and normalisation, PyTorch's for the linear
/// layer.
pub(super) fn initial(names: &[Name], number: usize, seed: u64) -> Vec<f32> {
    let name = &names[number];
    let mut random = Random::new(seed, Purpose::Weights, &[number as u64]);
    let count = name.count();
    match (&name.shape[..], name.name.as_str()) {
        ([to, _, height, width], _) => {
            let deviation = (2.0 / (to * height * width) as f64).sqrt();
            (0..count).map(|_| (deviation * random.normal()) as f32).collect()
        }
        (_, linear @ ("fc.weight" | "fc.bias")) => {
            // The bias comes after its weights.
            let inputs = if linear == "fc.weight" { name.shape[1] } else { names[number - 1].shape[1] };
            let bound = 1.0 / (inputs as f64).sqrt();
            (0..count).map(|_| random.between(-bound, bound) as f32).collect()
        }
        (_, scale) if scale.ends_with("weight") => vec![1.0; count],
        _ => vec![0.0; count],
    }
}
