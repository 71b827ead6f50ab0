use super::architecture::Architecture;
use super::*;
use crate::engine::Flex;
use crate::random::{Purpose, Random};

fn batch(images: usize, size: usize) -> Batch {
    let mut random = Random::new(1, Purpose::Image, &[size as u64]);
    let pixels = (0..images * 3 * size * size).map(|_| random.normal() as f32).collect();
    Batch { pixels, labels: (0..images).map(|image| image % 10).collect(), height: size, width: size }
}

fn gradients_of<E: Engine>(model: &mut Model<E>, images: usize, size: usize) -> Vec<Vec<f32>> {
    let batch = batch(images, size);
    let mut gradients: Vec<Vec<f32>> = model.names().iter().map(|name| vec![f32::NAN; name.count()]).collect();
    let mut order = Vec::new();
    let ready = |number: usize, gradient: Gradient<'_, E>| {
        order.push(number);
        gradient.read(&mut gradients[number]);
        Ok::<_, ()>(())
    };
    model.train(batch, ready).unwrap();
    order.reverse();
    assert_eq!(order, (0..model.names().len()).collect::<Vec<_>>());
    gradients
}

#[test]
fn models_are_as_large_as_in_torchvision_and_in_the_paper() {
    use Architecture::*;
    let parameters = |architecture: Architecture, classes| -> usize {
        build::parts(&architecture.shape(), classes).parameters.iter().map(Name::count).sum()
    };
    let large = [ResNet18, ResNet34, ResNet50, ResNet101, ResNet152].map(|architecture| parameters(architecture, 1000));
    assert_eq!(large, [11_689_512, 21_797_672, 25_557_032, 44_549_160, 60_192_808]);
    assert_eq!([ResNet20, ResNet32, ResNet56].map(|architecture| parameters(architecture, 10)), [269_722, 464_154, 853_018]);
    // ResNet-n of the paper's section 4.2 has 6 n + 2 layers.
    let build::Parts { parameters: names, buffers, .. } = build::parts(&ResNet20.shape(), 10);
    assert_eq!(names.iter().filter(|name| name.shape.len() > 1).count(), 20);
    assert_eq!(
        (&names[0].name[..], &names[3].name[..], &buffers[0].name[..]),
        ("conv1.weight", "layer1.0.conv1.weight", "bn1.running_mean")
    );
}

#[test]
fn going_back_by_segments_gives_the_bits_of_going_back_through_all() {
    for (architecture, size) in [(Architecture::ResNet20, 16), (Architecture::ResNet18, 32), (Architecture::ResNet50, 32)] {
        let mut model = Model::new(Flex, &architecture.shape(), 10, 1);
        let by_segments = gradients_of(&mut model, 4, size);
        // Another forward pass, in which nothing is detached.
        let (batch, engine) = (batch(4, size), &model.engine);
        let mut x = engine.constant(batch.pixels.clone(), &batch.shape());
        let mut tape = Tape { leaves: Vec::new(), statistics: Vec::new() };
        for segment in &model.segments {
            x = model.forward(segment, x, Mode::Training, &mut tape);
        }
        let gradient = engine.cross_entropy(&x, &batch.labels).1;
        let mut gradients = engine.backward(x, gradient);
        for (number, leaf) in &tape.leaves {
            let mut whole = vec![0.0; model.names[*number].count()];
            engine.read(&engine.gradient(&mut gradients, leaf).unwrap(), &mut whole);
            assert!(whole.iter().any(|&value| value != 0.0));
            let same = whole.iter().zip(&by_segments[*number]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{architecture:?}: {}", model.names[*number].name);
        }
    }
}

#[test]
fn gradients_are_slopes() {
    let shape = Shape { normalises: false, ..Architecture::ResNet20.shape() };
    let mut model = Model::new(Flex, &shape, 10, 5);
    let gradients = gradients_of(&mut model, 2, 8);
    let loss = |model: &Model<Flex>| {
        let batch = batch(2, 8);
        let labels = batch.labels.clone();
        crate::loss::cross_entropy(&model.evaluate(batch), &labels).0.mean_loss()
    };
    // Some parameters of each kind, the one with the largest gradient of each.
    for number in [0, 1, 9, 18, model.names().len() - 2, model.names().len() - 1] {
        let (at, &gradient) = gradients[number].iter().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).unwrap();
        let mut shifted = |by: f32| {
            let values = model.parameter(number);
            let mut shifted = values.clone();
            shifted[at] += by;
            model.set_parameter(number, shifted);
            let loss = loss(&model);
            model.set_parameter(number, values);
            loss
        };
        let step = 1e-3;
        let slope = (shifted(step) - shifted(-step)) / (2.0 * step as f64);
        let name = &model.names()[number].name;
        assert!((slope - gradient as f64).abs() < 0.03 * gradient.abs() as f64 + 1e-3, "{name}: {slope} {gradient}");
    }
}

#[test]
fn running_statistics_approach_those_of_the_batches() {
    let mut model = Model::new(Flex, &Architecture::ResNet20.shape(), 10, 1);
    for _ in 0..80 {
        gradients_of(&mut model, 4, 8);
    }
    // What the stem normalises has the same mean and variance each time. After 80 batches 0.9^80 of
    // the first values is left.
    let statistics = [model.buffer(0), model.buffer(1)];
    let batch = batch(4, 8);
    let x = model.engine.constant(batch.pixels.clone(), &batch.shape());
    let weight = model.parameters[0].clone();
    let x = model.engine.conv2d(x, weight, 1, 1);
    let mut values = vec![0.0; 4 * 16 * 64];
    model.engine.read(&x, &mut values);
    for channel in 0..16 {
        let of_channel: Vec<f64> =
            (0..4).flat_map(|image| &values[(image * 16 + channel) * 64..][..64]).map(|&value| value as f64).collect();
        let mean = of_channel.iter().sum::<f64>() / 256.0;
        let variance = of_channel.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 255.0;
        assert!((statistics[0][channel] as f64 - mean).abs() < 1e-2, "{} {mean}", statistics[0][channel]);
        assert!((statistics[1][channel] as f64 / variance - 1.0).abs() < 1e-2, "{} {variance}", statistics[1][channel]);
    }
}

/// The other engine computes the same, up to rounding.
#[cfg(feature = "tch")]
#[test]
fn engines_agree() {
    use crate::engine::Torch;
    for (architecture, size) in [(Architecture::ResNet20, 16), (Architecture::ResNet18, 64)] {
        let mut flex = Model::new(Flex, &architecture.shape(), 10, 1);
        let mut torch = Model::new(Torch::new(None, 2).unwrap(), &architecture.shape(), 10, 1);
        let close = |a: &[f32], b: &[f32], what: &str| {
            let largest = a.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let difference = a.iter().zip(b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(difference <= 2e-3 * largest, "{architecture:?}, {what}: {difference} of {largest}");
        };
        let gradients = [gradients_of(&mut flex, 8, size), gradients_of(&mut torch, 8, size)];
        for (i, name) in flex.names().iter().enumerate() {
            close(&gradients[0][i], &gradients[1][i], &name.name);
        }
        for (i, name) in flex.buffer_names().iter().enumerate() {
            close(&flex.buffer(i), &torch.buffer(i), &name.name);
        }
        close(&flex.evaluate(batch(8, size)), &torch.evaluate(batch(8, size)), "scores");
        let mut values = torch.parameter(0);
        values[1] += 0.5;
        torch.set_parameter(0, values.clone());
        assert_eq!(torch.parameter(0), values);
    }
}

/// What an engine makes of two steps of one parameter, of a running statistic, and of scores.
#[cfg(feature = "tch")]
fn small_steps<E: Engine>(engine: &E) -> (Vec<u32>, crate::loss::Outcome, Vec<f32>) {
    use kolo::ddp::{Parameter, Reducer};

    let mut random = Random::new(2, Purpose::Image, &[]);
    let mut tensor = |shape: &[usize]| {
        let values = (0..shape.iter().product()).map(|_| random.normal() as f32).collect();
        engine.constant(values, shape)
    };
    let comm = kolo::Communicator::in_process(1).unwrap().remove(0);
    let parameter = engine.place_one(Parameter::new("weight", [7, 11], kolo::DType::F32));
    let mut reducer = engine.place(Reducer::builder()).parameters([parameter]).build(&comm).unwrap();
    let rule = Rule { rate: 0.1, momentum: 0.9, weight_decay: 1e-4 };
    let (mut values, mut velocity) = (tensor(&[7, 11]), tensor(&[7, 11]));
    for _ in 0..2 {
        let step = reducer.begin().unwrap();
        engine.put(&step, 0, &tensor(&[7, 11])).unwrap();
        step.finish().unwrap();
        engine.descend(&rule, &reducer, 0, &mut values, &mut velocity).unwrap();
    }
    let (mut running, batch) = (tensor(&[9]), tensor(&[9]));
    engine.follow(&mut running, &batch, 8.0 / 7.0, MOMENTUM);
    let read = |tensor: &E::Tensor| {
        let mut values = vec![0.0; engine.count(tensor)];
        engine.read(tensor, &mut values);
        values
    };
    let bits = [&values, &velocity, &running].into_iter().flat_map(&read).map(f32::to_bits).collect();
    let mut outcomes = engine.no_outcomes();
    let scores = tensor(&[3, 5]);
    let (outcome, gradient) = engine.cross_entropy(&scores, &[0, 4, 2]);
    engine.add_outcomes(&mut outcomes, outcome);
    engine.add_outcomes(&mut outcomes, engine.cross_entropy(&tensor(&[2, 5]), &[1, 1]).0);
    engine.all_reduce(&comm, &mut outcomes).unwrap();
    (bits, engine.outcome(&outcomes), read(&gradient))
}

/// The optimiser and the running statistics have the same bits with both engines.
#[cfg(feature = "tch")]
#[test]
fn engines_update_with_the_same_bits() {
    let (flex, torch) = (small_steps(&Flex), small_steps(&crate::engine::Torch::new(None, 1).unwrap()));
    assert_eq!(flex.0, torch.0);
    assert_eq!((flex.1.images, flex.1.correct), (torch.1.images, torch.1.correct));
    assert!((flex.1.loss - torch.1.loss).abs() < 1e-6, "{:?} {:?}", flex.1, torch.1);
    assert!(flex.2.iter().zip(&torch.2).all(|(a, b)| (a - b).abs() < 1e-6), "{:?} {:?}", flex.2, torch.2);
}
