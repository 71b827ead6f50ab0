//! Weights interchange with torchvision: equal weights give equal scores.
//! `tests/torchvision/logits.py` is the other half.

use std::path::Path;
use std::process::Command;

use clap::ValueEnum;

use super::architecture::Architecture;
use super::*;
use crate::checkpoint;
use crate::engine::Flex;

const CLASSES: usize = 10;
const SIZE: usize = 64;

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torchvision"))
}

/// From -0.5 to 0.5, by the name (FNV-1a) and the place.
fn numbers(name: &str, count: usize) -> impl Iterator<Item = f64> {
    let seed = name.bytes().fold(2_166_136_261u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    (0..count as u64).map(move |place| {
        let mixed = (place * 2_654_435_761 + u64::from(seed) * 40_503) % (1 << 32);
        let mixed = ((mixed * 2_246_822_519) >> 7) % (1 << 24);
        mixed as f64 / f64::from(1 << 24) - 0.5
    })
}

fn values(Name { name, shape }: &Name) -> Vec<f32> {
    let change: Box<dyn Fn(f64) -> f64> = match shape[..] {
        _ if name.ends_with("running_var") => Box::new(|x| 1.0 + 0.5 * x),
        [_] if name.ends_with("weight") => Box::new(|x| 1.0 + 0.5 * x),
        [_] => Box::new(|x| 0.25 * x),
        [_, from, height, width] => {
            let scale = 2f64.powi(2 - (from * height * width).ilog2() as i32 / 2);
            Box::new(move |x| scale * x)
        }
        _ => Box::new(|x| x),
    };
    numbers(name, shape.iter().product()).map(|x| change(x) as f32).collect()
}

fn images() -> Batch {
    let pixels = values(&Name { name: "images".to_owned(), shape: vec![2, 3, SIZE, SIZE] });
    Batch { pixels: pixels.iter().map(|x| 4.0 * x).collect(), labels: vec![0; 2], height: SIZE, width: SIZE }
}

fn check(architecture: Architecture, model: &Model<Flex>) {
    let text = std::fs::read_to_string(folder().join("logits.json")).unwrap();
    let all: std::collections::HashMap<String, Vec<Vec<f64>>> = serde_json::from_str(&text).unwrap();
    let expected = all[&architecture.name()].concat();
    let scores = model.evaluate(images());
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let difference = scores.iter().zip(&expected).fold(0.0f64, |most, (a, b)| most.max((f64::from(*a) - b).abs()));
    println!("{}: scores up to {largest}, which differ by at most {difference:e}", architecture.name());
    assert!(difference <= 2e-5 * largest, "{}: {scores:?} {expected:?}", architecture.name());
}

#[test]
fn scores_are_those_of_torchvision() {
    for name in ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] {
        let architecture = Architecture::from_str(name, false).unwrap();
        let mut model = Model::new(Flex, &architecture.shape(), CLASSES, 1);
        for i in 0..model.names().len() {
            let new = values(&model.names()[i]);
            model.set_parameter(i, new);
        }
        let buffers: Vec<Vec<f32>> = model.buffer_names().iter().map(values).collect();
        buffers.into_iter().enumerate().for_each(|(i, values)| model.set_buffer(i, values));
        check(architecture, &model);
    }
}

#[test]
#[ignore = "needs KOLO_RESNET_PYTHON, a Python with torch, torchvision and safetensors"]
fn weights_that_torchvision_wrote_are_read_and_ours_by_torchvision() {
    let python = std::env::var_os("KOLO_RESNET_PYTHON").expect("KOLO_RESNET_PYTHON names a Python");
    let run = |arguments: &[&str]| {
        let output = Command::new(&python).arg(folder().join("logits.py")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let place = std::env::temp_dir().join(format!("kolo-resnet-torchvision-{}", std::process::id()));
    let file = |kind: &str| place.with_extension(kind).display().to_string();
    for architecture in [Architecture::ResNet18, Architecture::ResNet50] {
        let (theirs, ours) = (file("theirs"), file("ours"));
        run(&["weights", &architecture.name(), &theirs]);
        let mut model = Model::new(Flex, &architecture.shape(), CLASSES, 1);
        checkpoint::import(Path::new(&theirs), &mut model).unwrap();
        check(architecture, &model);
        checkpoint::export(Path::new(&ours), &model).unwrap();
        assert_eq!(run(&["same", &architecture.name(), &ours]).trim(), "same");
        [theirs, ours].iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
    // The committed scores are what this torchvision gives.
    let again: serde_json::Value = serde_json::from_str(&run(&["scores", "resnet18"])).unwrap();
    let committed: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder().join("logits.json")).unwrap()).unwrap();
    for (a, b) in again.as_array().unwrap().iter().zip(committed["resnet18"].as_array().unwrap()) {
        for (a, b) in a.as_array().unwrap().iter().zip(b.as_array().unwrap()) {
            assert!((a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-3);
        }
    }
}
