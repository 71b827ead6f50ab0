//! Ranks as processes, one of which is killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use kolo::Communicator;
use kolo_burn::{DataParallel, Error};

const WORLD_SIZE: usize = 3;
/// Is set in the processes that are ranks.
const IS_RANK: &str = "KOLO_BURN_TEST_RANK";

/// The program of a rank: it trains until a rank fails.
#[test]
#[ignore = "a rank of the other test"]
fn rank() {
    if std::env::var_os(IS_RANK).is_none() {
        return;
    }
    println!("error: {}", train().unwrap_err());
}

fn train() -> Result<(), Error> {
    let comm = Communicator::from_env()?;
    let device = Device::flex().autodiff();
    let (mut parallel, mut model) = DataParallel::new(&comm, LinearConfig::new(64, 64).init(&device))?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0.. {
        let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).powi_scalar(2).mean();
        let gradients = parallel.average(GradientsParams::from_grads(loss.backward(), &model))?;
        model = optimizer.step(0.01, model, gradients);
        if step == 5 {
            println!("trains");
        }
    }
    Ok(())
}

/// Ends the processes when the test ends, however it ends.
struct Job(Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn all_ranks_name_the_rank_that_was_killed() {
    let store = std::env::temp_dir().join(format!("kolo-burn-{}", std::process::id()));
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--ignored", "--nocapture"])
            .env(IS_RANK, "1")
            .env("KOLO_STORE", format!("file://{}", store.display()))
            .env("KOLO_RANK", rank.to_string())
            .env("KOLO_WORLD_SIZE", WORLD_SIZE.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut job = Job((0..WORLD_SIZE).map(start).collect());
    let mut outputs: Vec<_> = job.0.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap()).lines()).collect();
    let mut hear = |rank: usize, word: &str| {
        let line = outputs[rank].find(|line| line.as_ref().unwrap().contains(word));
        line.unwrap_or_else(|| panic!("rank {rank} ended without {word}")).unwrap()
    };
    for rank in 0..WORLD_SIZE {
        hear(rank, "trains");
    }
    job.0[1].kill().unwrap();
    for rank in [0, 2] {
        let error = hear(rank, "error: ");
        assert!(error.contains("rank 1") && error.contains("died"), "{error}");
    }
    drop(job);
    let _ = std::fs::remove_dir_all(store);
}
