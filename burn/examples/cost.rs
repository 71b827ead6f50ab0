//! Measures what kolo-burn adds to the reducer beneath it: copies of the gradients from burn's
//! tensors, and of their averages to new tensors.
//!
//! `cargo build --release --example cost`, then `kolo run -n 2 -- target/release/examples/cost
//! [LAYERS]`. A layer has 512 x 512 parameters.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use kolo::Communicator;
use kolo::ddp::{Parameter, Reducer};
use kolo_burn::DataParallel;

type Error = Box<dyn std::error::Error + Send + Sync>;

const WIDTH: usize = 512;
const ROUNDS: usize = 21;

#[derive(Module, Debug)]
struct Network {
    layers: Vec<Linear>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let layers = std::env::args()
        .nth(1)
        .map_or(Ok(40), |layers| layers.parse::<usize>().map_err(|_| format!("{layers}: give a number of layers")))?;
    let comm = Communicator::from_env()?;
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device);
    let (mut parallel, network) = DataParallel::new(&comm, Network { layers: (0..layers).map(|_| linear()).collect() })?;

    let parameters = (0..layers).map(|layer| Parameter::new(format!("layer {layer}"), vec![WIDTH, WIDTH], kolo::DType::F32));
    let mut reducer = Reducer::builder().parameters(parameters.collect::<Vec<_>>()).build(&comm)?;
    let values = vec![1.0f32; WIDTH * WIDTH];

    let (mut above, mut beneath, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let input = Tensor::<2>::ones([8, WIDTH], &device);
        let output = network.layers.iter().fold(input, |x, layer| layer.forward(x));
        let gradients = GradientsParams::from_grads(output.mean().backward(), &network);
        comm.barrier()?;
        let began = Instant::now();
        let averages = parallel.average(gradients)?;
        above.push(began.elapsed());
        if averages.len() != layers {
            return Err(format!("{} of {layers} parameters have a gradient", averages.len()).into());
        }

        comm.barrier()?;
        let began = Instant::now();
        let step = reducer.begin()?;
        // The buckets are filled from the last parameter to the first.
        (0..layers).rev().try_for_each(|layer| step.put(layer, &values))?;
        step.finish()?;
        beneath.push(began.elapsed());
        ratios.push(above[above.len() - 1].as_secs_f64() / beneath[beneath.len() - 1].as_secs_f64());
    }
    if comm.rank() == 0 {
        ratios.sort_by(f64::total_cmp);
        let parameters = layers * WIDTH * WIDTH;
        println!(
            "{} ranks, {parameters} parameters, medians of {ROUNDS} rounds: kolo-burn {:.2?}, the reducer {:.2?}, ratio {:.2}",
            comm.world_size(),
            median(above),
            median(beneath),
            ratios[ROUNDS / 2],
        );
    }
    comm.barrier()?;
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
