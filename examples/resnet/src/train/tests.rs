//! Ranks as threads: the result does not depend on the number of ranks.

use std::path::PathBuf;

use clap::Parser;
use kolo::Communicator;

use super::*;
use crate::arguments::Cli;
use crate::data::loader::{Loader, Source};
use crate::data::sampler::Sampler;

/// Returns a run on small images, with 16 images in a step of all ranks. It has no batch
/// normalisation, because that depends on the division of images.
fn arguments(name: &str, more: &str) -> (TrainArgs, PathBuf) {
    let folder = std::env::temp_dir().join(format!("kolo-resnet-{name}-{}", std::process::id()));
    let line = format!(
        "resnet --shapes --images 160 -a resnet20 --image-size 8 --no-norm --global-batch 16 --lr 0.001 --seed 3 -j 1 -p 1 --output {} {more}",
        folder.display()
    );
    (Cli::parse_from(line.split_whitespace()).train, folder)
}

/// Runs a function on each rank and returns the results in order.
fn on_ranks<R: Send>(world: usize, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let comms = Communicator::in_process(world).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn bits<E: Engine>(run: &Run<'_, E>) -> Vec<u32> {
    (0..run.model.names().len()).flat_map(|i| run.model.parameter(i)).map(f32::to_bits).collect()
}

/// Makes steps as an epoch does, and calls `look` after each.
fn train<E: Engine>(run: &mut Run<'_, E>, steps: usize, mut look: impl FnMut(&Run<'_, E>, f64)) {
    let place = [run.comm.rank(), run.comm.world_size()];
    let mut made = 0;
    for epoch in 0.. {
        let sampler = Sampler::new(run.train.len(), run.state.seed, epoch, 0, place, run.batch);
        let source = Source { dataset: run.train.clone(), transform: run.transform, variation: Some((run.state.seed, epoch)) };
        for batch in Loader::start(&source, (0..sampler.steps()).map(|step| sampler.step(step)).collect(), 1).unwrap() {
            if made == steps {
                return;
            }
            made += 1;
            run.step(batch.unwrap(), 0.001).unwrap_or_else(|failure| panic!("{failure}"));
            let outcome = run.outcome();
            look(run, outcome.mean_loss());
        }
    }
}

#[test]
fn gradients_and_losses_are_the_same_however_many_ranks_and_parameters_are_bit_equal_on_all() {
    const STEPS: usize = 50;
    let mut reference: Option<(Vec<f32>, Vec<f64>)> = None;
    for world in [1, 2, 4] {
        let (args, folder) = arguments(&format!("divided-{world}"), "");
        // The first gradients, the loss of each step, and a digest of the parameters after each
        // step.
        let ranks = on_ranks(world, |comm| {
            let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
            let (mut gradients, mut losses, mut parameters) = (Vec::new(), Vec::new(), Vec::new());
            train(&mut run, STEPS, |run, loss| {
                if gradients.is_empty() {
                    let each = 0..run.model.names().len();
                    gradients = each.flat_map(|i| run.reducer.gradient::<f32>(i).unwrap().to_vec()).collect();
                }
                losses.push(loss);
                parameters.push(bits(run).iter().fold(0u64, |hash, &bits| hash.wrapping_mul(0x100_0000_01b3) ^ u64::from(bits)));
            });
            (gradients, losses, parameters)
        });
        std::fs::remove_dir_all(folder).unwrap();
        assert!(ranks.iter().all(|rank| rank.2 == ranks[0].2), "{world} ranks: parameters differ in some bit");
        assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0));
        let losses: Vec<f64> = (0..STEPS).map(|step| ranks.iter().map(|rank| rank.1[step]).sum::<f64>() / world as f64).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[STEPS - 1] < losses[0], "{losses:?}");
        let gradients = ranks.into_iter().next().unwrap().0;
        let Some((first_gradients, first_losses)) = &reference else {
            reference = Some((gradients, losses));
            continue;
        };
        let largest = first_gradients.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let difference = first_gradients.iter().zip(&gradients).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(difference <= 1e-5 * largest, "{world} ranks: gradients differ by {difference}, of {largest}");
        for (step, (a, b)) in first_losses.iter().zip(&losses).enumerate() {
            assert!((a - b).abs() <= 1e-3 * a.abs(), "{world} ranks, step {step}: {a} {b}");
        }
    }
}

#[test]
fn ranks_start_with_the_weights_of_rank_0() {
    let (args, folder) = arguments("start", "");
    std::fs::create_dir_all(&folder).unwrap();
    let ranks = on_ranks(4, |comm| {
        // The weights of each rank differ.
        let weights = folder.join(format!("{}.safetensors", comm.rank()));
        checkpoint::export(&weights, &Model::new(Flex, &args.shape(), 10, comm.rank() as u64)).unwrap();
        let args = TrainArgs { weights: Some(weights), ..args.clone() };
        bits(&Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}")))
    });
    assert!(ranks.iter().all(|rank| rank == &ranks[0]));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn buckets_are_as_large_as_asked_for() {
    let buckets = |more: &str| {
        let (args, folder) = arguments("buckets", more);
        let ranks = on_ranks(1, |comm| {
            let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
            train(&mut run, 1, |_, _| {});
            run.reducer.statistics().buckets.iter().map(|bucket| bucket.bytes).collect::<Vec<_>>()
        });
        std::fs::remove_dir_all(folder).unwrap();
        ranks.concat()
    };
    // ResNet-20 has a megabyte of gradients.
    assert_eq!((buckets("").len(), buckets("--bucket-mb 100").len()), (2, 2));
    let small = buckets("--bucket-mb 0.25");
    assert_eq!(small.len(), 4);
    assert!(small[..3].iter().all(|&bytes| bytes >= 1 << 18), "{small:?}");
}

#[test]
fn compressed_gradients_train_too() {
    for compression in ["f16", "bf16", "power-sgd2"] {
        let (args, folder) = arguments(&format!("compressed-{compression}"), &format!("--compress {compression}"));
        let ranks = on_ranks(2, |comm| {
            let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
            let mut losses = Vec::new();
            train(&mut run, 40, |_, loss| losses.push(loss));
            (losses, bits(&run))
        });
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!(ranks[0].1, ranks[1].1);
        let mean = |part: std::ops::Range<usize>| -> f64 { ranks.iter().flat_map(|rank| &rank.0[part.clone()]).sum() };
        assert!(mean(30..40) < mean(0..10), "{compression}: {:?}", ranks[0].0);
    }
}

#[test]
fn a_whole_run_trains_tests_and_goes_on_from_its_checkpoint_with_the_same_losses() {
    let metrics = |folder: &std::path::Path| -> Vec<metrics::Step> {
        let events = metrics::read(folder).unwrap().into_iter();
        events.filter_map(|event| if let metrics::Event::Step(step) = event { Some(step) } else { None }).collect()
    };
    let losses = |steps: &[metrics::Step]| steps.iter().map(|step| (step.step, step.loss.to_bits())).collect::<Vec<_>>();
    let run = |args: &TrainArgs| {
        on_ranks(2, |comm| Run::prepare(args, comm, Flex).and_then(|mut run| run.all().map(|()| bits(&run))))
            .into_iter()
            .map(|rank| rank.unwrap_or_else(|failure| panic!("{failure}")))
            .collect::<Vec<_>>()
    };
    // With batch normalisation, augmentation, momentum and a falling rate.
    let (mut args, whole) = arguments("whole", "--lr-decay cosine --lr 0.05 --epochs 3");
    args.no_norm = false;
    let parameters = run(&args);
    let expected = metrics(&whole);
    assert_eq!(expected.len(), 30);
    // The same in two parts; the second with another number of threads that read images.
    let (_, parts) = arguments("parts", "");
    let first = TrainArgs { output: Some(parts.clone()), epochs: 3, checkpoint_every: Some(4), ..args.clone() };
    on_ranks(2, |comm| {
        let mut run = Run::prepare(&first, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
        run.steps().and_then(|()| run.finish_epoch()).unwrap_or_else(|failure| panic!("{failure}"));
        // Some more steps, whose results are lost: the last checkpoint is at step eight.
        run.steps().unwrap_or_else(|failure| panic!("{failure}"));
    });
    assert_eq!(checkpoint::state(&checkpoint::place(&parts)).unwrap().0.step, 16);
    let second = TrainArgs { output: None, resume: Some(parts.clone()), seed: None, workers: 5, ..first };
    assert_eq!(run(&second), parameters);
    assert_eq!(losses(&metrics(&parts)), losses(&expected));

    let refused = |args: &TrainArgs, hint: &str| {
        let failures = on_ranks(1, |comm| Run::prepare(args, comm, Flex).err().map(|failure| failure.to_string()));
        let text = failures[0].clone().unwrap_or_else(|| panic!("accepted, and not refused for {hint}"));
        assert!(text.contains(hint), "{text}");
    };
    refused(&TrainArgs { seed: Some(4), ..second.clone() }, "--seed 3");
    refused(&TrainArgs { image_size: Some(16), ..second.clone() }, "--image-size 8");
    refused(&TrainArgs { arch: crate::model::architecture::Architecture::ResNet32, ..second.clone() }, "--arch resnet20");
    refused(&TrainArgs { resume: None, output: Some(parts.clone()), ..second }, "has a run already");
    std::fs::remove_dir_all(whole).unwrap();
    std::fs::remove_dir_all(parts).unwrap();
}

/// Returns the metrics of the complete epochs.
fn epochs(folder: &std::path::Path) -> Vec<metrics::Epoch> {
    let events = metrics::read(folder).unwrap().into_iter();
    events.filter_map(|event| if let metrics::Event::Epoch(epoch) = event { Some(epoch) } else { None }).collect()
}

#[test]
fn an_epoch_whose_last_save_lost_a_rank_is_saved_by_the_others() {
    for lost in [2, 0] {
        let (args, folder) = arguments(&format!("last-save-{lost}"), "--elastic --epochs 1 --global-batch 12");
        on_ranks(3, |comm| {
            let rank = comm.rank();
            let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
            if rank == lost {
                // The rank is lost after the test.
                run.steps().and_then(|()| run.evaluate()).unwrap_or_else(|failure| panic!("{failure}"));
            } else {
                run.all().unwrap_or_else(|failure| panic!("{failure}"));
                assert_eq!((run.comm.world_size(), run.state.epoch), (2, 1));
            }
        });
        assert_eq!(checkpoint::state(&checkpoint::place(&folder)).unwrap().0.epoch, 1);
        assert_eq!(epochs(&folder).len(), 1);
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn a_rank_that_is_lost_while_the_others_go_on_is_left_behind_too() {
    for (first, second) in [(3, 2), (0, 1)] {
        let (args, folder) = arguments(&format!("two-lost-{first}"), "--elastic --epochs 2");
        let ranks = on_ranks(4, |comm| {
            let rank = comm.rank();
            let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
            if rank == first {
                train(&mut run, 1, |_, _| {});
                return None;
            }
            if rank == second {
                assert!(matches!(run.steps(), Err(Failure::Communication(_))));
                // The rank finds the survivors and then ends.
                assert_eq!(run.comm.shrink().unwrap().world_size(), 3);
                return None;
            }
            run.all().unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!((run.comm.world_size(), run.state.epoch), (2, 2));
            Some(bits(&run))
        });
        let left: Vec<_> = ranks.into_iter().flatten().collect();
        assert!(left.len() == 2 && left[0] == left[1]);
        assert_eq!(epochs(&folder).len(), 2);
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn a_process_that_joins_gets_the_whole_state_if_its_arguments_fit() {
    let (mut args, folder) = arguments("joins", "--elastic --epochs 3 --lr-scale linear");
    args.no_norm = false;
    let others = TrainArgs { lr: 0.002, ..args.clone() };
    let store = format!("hash://kolo-resnet-joins-{}", std::process::id());
    let builder = || Communicator::builder().store(&store).start_timeout(std::time::Duration::from_secs(600));
    // As a process does before it has threads.
    let join = || {
        let comm = builder().join(true).connect().unwrap();
        host::Here::find(&comm).unwrap();
        comm
    };
    // The state as a checkpoint has it, with running statistics and velocities.
    let state = |run: &Run<'_, Flex>, name: &str| {
        let path = folder.join(format!("{name}-{}", run.comm.rank()));
        checkpoint::save(&path, &run.state, &run.model, &run.optimizer).unwrap();
        std::fs::read(path).unwrap()
    };
    let finish = |mut run: Run<'_, Flex>| {
        assert_eq!((run.comm.world_size(), run.batch, run.state.epoch, run.state.step), (3, 8, 1, 10));
        let (joined, factor) = (state(&run, "joined"), run.rate.factor);
        run.all().unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(run.state.step, 10 + 2 * 160u64.div_ceil(24));
        (joined, factor, state(&run, "ended"))
    };
    let old = |rank: usize| {
        let comm = builder().rank(rank).world_size(2).connect().unwrap();
        let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
        run.steps().and_then(|()| run.finish_epoch()).unwrap_or_else(|failure| panic!("{failure}"));
        // The first newcomer has another rate and is refused, which changes nothing.
        let before = state(&run, "before");
        while run.comm.world_size() < 3 {
            run.admit().unwrap_or_else(|failure| panic!("{failure}"));
        }
        assert!(state(&run, "before") == before);
        finish(run)
    };
    let new = || {
        let Err(Failure::Here(problem)) = Run::join(&others, join(), Flex) else { panic!("it was not refused") };
        assert!(problem.contains("--lr 0.001") && problem.contains("rank 2 has --lr 0.002"), "{problem}");
        let mut run = Run::join(&args, join(), Flex).unwrap_or_else(|failure| panic!("{failure}"));
        run.admit().unwrap_or_else(|failure| panic!("{failure}"));
        finish(run)
    };
    let ranks = std::thread::scope(|scope| {
        let threads = [scope.spawn(|| old(0)), scope.spawn(|| old(1)), scope.spawn(new)];
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(ranks[0] == ranks[1] && ranks[0] == ranks[2]);
    assert_eq!(epochs(&folder).len(), 3);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_speed_of_an_epoch_is_that_of_all_its_time() {
    let (args, folder) = arguments("speed", "--elastic --epochs 1 -p 100");
    on_ranks(2, |comm| {
        let rank = comm.rank();
        let mut run = Run::prepare(&args, comm, Flex).unwrap_or_else(|failure| panic!("{failure}"));
        if rank == 1 {
            train(&mut run, 3, |_, _| {});
            return;
        }
        let began = std::time::Instant::now();
        let Err(Failure::Communication(failure)) = run.steps() else { panic!("no rank was missed") };
        let before = run.so_far.seconds;
        assert!(before > 0.0 && before <= began.elapsed().as_secs_f64(), "{before}");
        run.go_on(failure).and_then(|()| run.steps()).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(run.so_far.seconds > before);
        run.finish_epoch().unwrap_or_else(|failure| panic!("{failure}"));
    });
    let [epoch] = &epochs(&folder)[..] else { panic!("one epoch") };
    // The surviving rank's images of the three common steps, and all later images.
    let images = epoch.images_per_s * epoch.seconds;
    assert!((images - (3.0 * 8.0 + 112.0)).abs() < 1e-6, "{images}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// libtorch on the CPU. On a GPU the trainer makes the same calls: only the memory that it lends is
/// elsewhere.
#[cfg(feature = "tch")]
mod torch {
    use super::*;

    fn torch() -> Torch {
        Torch::new(None, 1).unwrap()
    }

    /// Returns the losses of some steps of each rank, the outcome of a test, and the parameters.
    fn trained<E: Engine>(name: &str, engine: impl Fn() -> E + Sync) -> Vec<(Vec<f64>, crate::loss::Outcome, Vec<u32>)> {
        let (args, folder) = arguments(name, "");
        let ranks = on_ranks(2, |comm| {
            let mut run = Run::prepare(&args, comm, engine()).unwrap_or_else(|failure| panic!("{failure}"));
            let mut losses = Vec::new();
            train(&mut run, 20, |_, loss| losses.push(loss));
            let test = run.evaluate().unwrap_or_else(|failure| panic!("{failure}"));
            (losses, test, bits(&run))
        });
        std::fs::remove_dir_all(folder).unwrap();
        ranks
    }

    #[test]
    fn engines_train_alike() {
        let (flex, torch) = (trained("flex", || Flex), trained("torch", torch));
        assert!(torch[0].2 == torch[1].2, "parameters differ between ranks in some bit");
        for (flex, torch) in flex.iter().zip(&torch) {
            assert!(torch.0[19] < torch.0[0], "{:?}", torch.0);
            for (a, b) in flex.0.iter().zip(&torch.0) {
                assert!((a - b).abs() <= 1e-3 * a.abs(), "{a} {b}");
            }
            let (flex, torch) = (flex.1, torch.1);
            assert_eq!((flex.images, torch.images), (40.0, 40.0));
            assert!((flex.mean_loss() - torch.mean_loss()).abs() <= 1e-3 * flex.mean_loss(), "{flex:?} {torch:?}");
            assert!((flex.correct - torch.correct).abs() <= 2.0, "{flex:?} {torch:?}");
        }
    }

    #[test]
    fn engines_go_on_from_their_checkpoints() {
        let run = |args: &TrainArgs| {
            let ranks = on_ranks(2, |comm| {
                let mut run = Run::prepare(args, comm, torch()).unwrap_or_else(|failure| panic!("{failure}"));
                run.all().unwrap_or_else(|failure| panic!("{failure}"));
                let buffers = (0..run.model.buffer_names().len()).flat_map(|i| run.model.buffer(i));
                (bits(&run), buffers.map(f32::to_bits).collect::<Vec<_>>())
            });
            assert!(ranks[0] == ranks[1]);
            ranks.into_iter().next().unwrap()
        };
        let (mut args, whole) = arguments("torch-whole", "--lr-decay cosine --lr 0.05 --epochs 2");
        args.no_norm = false;
        let expected = run(&args);
        let (_, parts) = arguments("torch-parts", "");
        let first = TrainArgs { output: Some(parts.clone()), ..args.clone() };
        on_ranks(2, |comm| {
            let mut run = Run::prepare(&first, comm, torch()).unwrap_or_else(|failure| panic!("{failure}"));
            run.steps().and_then(|()| run.finish_epoch()).unwrap_or_else(|failure| panic!("{failure}"));
        });
        let second = TrainArgs { output: None, resume: Some(parts.clone()), seed: None, ..first };
        assert!(run(&second) == expected);
        std::fs::remove_dir_all(whole).unwrap();
        std::fs::remove_dir_all(parts).unwrap();
    }

    #[test]
    fn engines_go_on_without_a_rank() {
        let (args, folder) = arguments("torch-lost", "--elastic --epochs 1 --global-batch 12");
        let ranks = on_ranks(3, |comm| {
            let rank = comm.rank();
            let mut run = Run::prepare(&args, comm, torch()).unwrap_or_else(|failure| panic!("{failure}"));
            if rank == 0 {
                train(&mut run, 1, |_, _| {});
                return None;
            }
            run.all().unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!((run.comm.world_size(), run.state.epoch), (2, 1));
            Some(bits(&run))
        });
        let left: Vec<_> = ranks.into_iter().flatten().collect();
        assert!(left.len() == 2 && left[0] == left[1]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
