//! The layers of each ResNet.
//!
//! resnet18 to resnet152 are those of He et al. (Deep Residual Learning for Image Recognition,
//! 2015) as torchvision has them: the stride of a bottleneck is in its 3 x 3 convolution, and
//! shortcuts that change the shape are projections. resnet20, 32 and 56 are the same paper's for
//! CIFAR-10 (section 4.2), whose shortcuts have no parameters (option A).

use clap::ValueEnum;

/// A ResNet by its usual name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Architecture {
    #[value(name = "resnet18")]
    ResNet18,
    #[value(name = "resnet34")]
    ResNet34,
    #[value(name = "resnet50")]
    ResNet50,
    #[value(name = "resnet101")]
    ResNet101,
    #[value(name = "resnet152")]
    ResNet152,
    #[value(name = "resnet20")]
    ResNet20,
    #[value(name = "resnet32")]
    ResNet32,
    #[value(name = "resnet56")]
    ResNet56,
}

/// The layers of a block's main path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// Two 3 x 3 convolutions.
    Basic,
    /// 1 x 1, 3 x 3 and 1 x 1, of which the last has four times as many channels.
    Bottleneck,
}

/// The layers before the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stem {
    /// 7 x 7 with stride 2, then max pooling: for images of some hundred pixels.
    Large,
    /// 3 x 3: for images of 32 pixels.
    Small,
}

/// The layers of an [`Architecture`].
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) stem: Stem,
    pub(crate) block: BlockKind,
    /// Channels of the stem and of the first stage; each later stage has twice as many.
    pub(crate) width: usize,
    /// Blocks of each stage.
    pub(crate) stages: Vec<usize>,
    /// Whether shortcuts that change the shape are convolutions with weights. Otherwise they skip
    /// pixels and add channels of 0.
    pub(crate) projects: bool,
    /// Whether convolutions are followed by batch normalisation.
    pub(crate) normalises: bool,
}

impl Architecture {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns the image size that the architecture is made for, in pixels.
    pub(crate) fn image_size(self) -> usize {
        match self.shape().stem {
            Stem::Large => 224,
            Stem::Small => 32,
        }
    }

    pub(crate) fn shape(self) -> Shape {
        use Architecture::*;
        let (block, stages): (_, &[usize]) = match self {
            ResNet18 => (BlockKind::Basic, &[2, 2, 2, 2]),
            ResNet34 => (BlockKind::Basic, &[3, 4, 6, 3]),
            ResNet50 => (BlockKind::Bottleneck, &[3, 4, 6, 3]),
            ResNet101 => (BlockKind::Bottleneck, &[3, 4, 23, 3]),
            ResNet152 => (BlockKind::Bottleneck, &[3, 8, 36, 3]),
            ResNet20 => (BlockKind::Basic, &[3, 3, 3]),
            ResNet32 => (BlockKind::Basic, &[5, 5, 5]),
            ResNet56 => (BlockKind::Basic, &[9, 9, 9]),
        };
        let is_small = matches!(self, ResNet20 | ResNet32 | ResNet56);
        Shape {
            stem: if is_small { Stem::Small } else { Stem::Large },
            block,
            width: if is_small { 16 } else { 64 },
            stages: stages.to_vec(),
            projects: !is_small,
            normalises: true,
        }
    }
}
