//! The start of a run: ranks connect, check that their arguments agree, and get the same weights.
//! A process that joins later does the same with the ranks of the run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kolo::ddp::{Compress, ErrorFeedback, Parameter, PowerSgd, Reducer};
use kolo::{Communicator, DType};

use super::agree::{agree, images, options};
use super::epoch::{SoFar, Window};
use super::host::Here;
use super::{Failure, Output, Run};
use crate::arguments::{Compression, ENVIRONMENT, TrainArgs};
use crate::checkpoint::{self, State};
use crate::data::Data;
use crate::data::generated::{Noise, Shapes};
use crate::data::transform::Transform;
use crate::engine::Engine;
use crate::metrics::{self, Event, Start};
use crate::model::{Model, Name};
use crate::optimizer::{Rate, Sgd};
use crate::progress::{Progress, say};

/// The default numbers of generated images to train on.
const SHAPES: usize = 2560;
const NOISE: usize = 1_281_167;

/// Connects to the other ranks.
pub(super) fn connect(args: &TrainArgs) -> Result<Communicator, String> {
    let mut builder = Communicator::builder();
    // With --nproc these count nodes, and the launcher has set the variables of this rank.
    if args.nproc.is_none() && !args.multiprocessing_distributed {
        match (args.rank, args.world_size) {
            (Some(rank), Some(world)) => builder = builder.rank(rank).world_size(world),
            (None, None) => {}
            (None, Some(1)) => builder = builder.rank(0).world_size(1),
            _ => return Err("--rank and --world-size go together (with --nproc they count nodes)".to_owned()),
        }
    }
    if args.dist_url != ENVIRONMENT {
        builder = builder.store(&args.dist_url);
    }
    builder.connect().map_err(|error| error.to_string())
}

impl<'a, E: Engine> Run<'a, E> {
    /// Opens the images and makes a model that is the same on all ranks: new, or from a checkpoint.
    pub(super) fn prepare(args: &'a TrainArgs, comm: Communicator, engine: E) -> Result<Run<'a, E>, Failure> {
        Run::make(args, comm, engine, false)
    }

    /// Prepares a process that the ranks of a run have admitted: it takes the state of rank 0. The
    /// other ranks call [`Run::welcome`].
    pub(super) fn join(args: &'a TrainArgs, comm: Communicator, engine: E) -> Result<Run<'a, E>, Failure> {
        let mut run = Run::make(args, comm, engine, true)?;
        run.agree()?;
        Ok(run)
    }

    fn make(args: &'a TrainArgs, comm: Communicator, engine: E, joins: bool) -> Result<Run<'a, E>, Failure> {
        if let Some(plot) = args.plot.as_deref().filter(|_| comm.rank() == 0) {
            // Check now, and not after all epochs.
            crate::plot::check(plot)?;
        }
        agree(&comm, &options(args))?;
        // Each rank has the same number of images, also on machines with fewer ranks.
        let local = Here::find(&comm)?.most;
        let (resumed, seed, batch) = if joins {
            let [seed, batch] = numbers_of_rank_0(&comm, [0; 2])?;
            (None, seed, batch as usize)
        } else {
            let batch = batch(args, comm.world_size(), local)?;
            let resumed = args.resume.as_deref().map(|path| resume(args, &comm, path)).transpose()?;
            let seed = match &resumed {
                Some((state, _)) => state.seed,
                None => agree_on_seed(args, &comm)?,
            };
            (resumed, seed, batch)
        };
        let Data { train, test } = agree_on_images(args, &comm, seed)?;

        let name = engine.name();
        let mut model = Model::new(engine, &args.shape(), train.classes(), seed);
        let mut optimizer = Sgd::new(&model, args.momentum as f32, args.wd as f32);
        let mut reducer = reducer(args, &comm, &model)?;
        let state = load(args, resumed.as_ref(), &mut model, &mut optimizer, seed)?;
        if !joins {
            broadcast(&mut reducer, &mut model)?;
        }

        let (global, outcomes) = (batch * comm.world_size(), model.engine().no_outcomes());
        if comm.rank() == 0 && !args.evaluate && global > train.len() {
            let images = train.len();
            tracing::warn!(
                "a step takes {global} images, and there are {images}: each epoch is one step of {images} images; give a smaller \
                 {}",
                if args.global_batch.is_some() { "--global-batch" } else { "--batch-size (-b)" }
            );
        }
        let start = Start {
            arch: args.arch.name(),
            engine: name,
            transport: comm.transport_name().to_owned(),
            ranks: comm.world_size(),
            hosts: comm.host_count(),
            global_batch: global,
            images: train.len(),
            image_size: args.size(),
            seed,
            step: state.step,
        };
        let (mut folder, mut output) = (PathBuf::new(), None);
        if comm.rank() == 0 && !args.evaluate {
            folder = place(args, &start, resumed.as_ref().map(|(_, path)| path))?;
            output = Some(begin(args, start, state.epoch, &folder)?);
        }
        Ok(Run {
            folder: agree_on_folder(&folder, &comm)?,
            args,
            comm,
            reducer,
            model,
            optimizer,
            rate: rate(args, global),
            state,
            batch,
            workers: args.workers.div_ceil(local),
            train: Arc::from(train),
            test: Arc::from(test),
            transform: Transform { size: args.size(), augmentation: args.augmentation() },
            output,
            refusal: None,
            so_far: SoFar::default(),
            outcomes,
            window: Window::default(),
        })
    }

    /// Makes the same collective calls as processes that [`join`](Run::join): checks that they have
    /// the same arguments and images, and sends them the state of rank 0.
    ///
    /// # Errors
    ///
    /// If a process has other arguments or images, all ranks get [`Failure::Here`].
    pub(super) fn welcome(&mut self) -> Result<(), Failure> {
        // A newcomer finds its place when it starts its threads, and again when it prepares.
        Here::find(&self.comm)?;
        agree(&self.comm, &options(self.args))?;
        Here::find(&self.comm)?;
        numbers_of_rank_0(&self.comm, [self.state.seed, self.batch as u64])?;
        agree(&self.comm, &images(&*self.train, &*self.test))?;
        drop(reducer(self.args, &self.comm, &self.model)?);
        agree_on_folder(&self.folder, &self.comm)?;
        self.agree()
    }
}

/// Returns rank 0's numbers: the seed, and the images in a step of each rank.
fn numbers_of_rank_0(comm: &Communicator, mut numbers: [u64; 2]) -> kolo::Result<[u64; 2]> {
    comm.broadcast(&mut numbers, 0)?;
    Ok(numbers)
}

/// Returns the images in a step of each rank, if there are `local` ranks on a machine.
fn batch(args: &TrainArgs, world: usize, local: usize) -> Result<usize, String> {
    let batch = match args.global_batch {
        Some(all) if all % world == 0 => all / world,
        Some(all) => return Err(format!("--global-batch {all} cannot be divided among {world} ranks")),
        None => args.batch_size / local,
    };
    if batch == 0 {
        return Err(format!("--batch-size {} is less than one image for each of {local} ranks", args.batch_size));
    }
    Ok(batch)
}

/// Opens the images, which must be the same on all ranks.
fn agree_on_images(args: &TrainArgs, comm: &Communicator, seed: u64) -> Result<Data, Failure> {
    let data = open(args, seed)?;
    agree(comm, &images(&*data.train, &*data.test))?;
    if data.train.len() == 0 || data.test.len() == 0 {
        return Err("there are no images".to_owned().into());
    }
    Ok(data)
}

/// Reads the weights or the checkpoint that the arguments name into the model and the optimiser.
/// Returns the state of the checkpoint, or that of a new run.
fn load<E: Engine>(
    args: &TrainArgs,
    resumed: Option<&(State, PathBuf)>,
    model: &mut Model<E>,
    optimizer: &mut Sgd<E>,
    seed: u64,
) -> Result<State, Failure> {
    if let Some(path) = &args.weights {
        checkpoint::import(path, model)?;
    }
    let Some((state, path)) = resumed else {
        return Ok(State {
            arch: args.arch.name(),
            classes: model.classes(),
            image_size: args.size(),
            seed,
            epoch: args.start_epoch,
            seen: 0,
            step: 0,
            best: 0.0,
        });
    };
    if state.classes != model.classes() {
        let (there, here) = (state.classes, model.classes());
        return Err(format!("{} is of {there} classes, and there are {here} here", path.display()).into());
    }
    checkpoint::load(path, model, optimizer)?;
    Ok(state.clone())
}

/// Returns the learning rate for a batch of all ranks.
fn rate(args: &TrainArgs, global_batch: usize) -> Rate {
    Rate {
        base: args.lr,
        factor: args.lr_scale.factor(global_batch),
        decay: args.lr_decay,
        step: args.lr_step,
        epochs: args.epochs,
        warmup: args.warmup_epochs(),
    }
}

/// Opens the images that the arguments name.
fn open(args: &TrainArgs, seed: u64) -> Result<Data, String> {
    if let Some(folder) = &args.dir {
        return Data::open(folder);
    }
    let images = args.images.unwrap_or(if args.shapes { SHAPES } else { NOISE });
    let tests = (images / 4).max(1);
    Ok(if args.shapes {
        // The shapes are a fixed data set, so they do not depend on the seed of the run.
        let shapes = |first, images| Box::new(Shapes { images, first, seed: 0 });
        Data { train: shapes(0, images), test: shapes(images.next_multiple_of(10), tests) }
    } else {
        let classes = if args.size() <= 32 { 10 } else { 1000 };
        let noise = |images, seed| Box::new(Noise { images, classes, size: args.size(), seed });
        Data { train: noise(images, seed), test: noise(tests, !seed) }
    })
}

/// Returns the seed of all ranks: the argument of rank 0, or a random one.
fn agree_on_seed(args: &TrainArgs, comm: &Communicator) -> Result<u64, Failure> {
    let mut seed = [args.seed.unwrap_or_else(|| {
        let mut bytes = [0; 4];
        // Short, so that a user can type it. Without random numbers the seed is 0.
        let _ = getrandom::fill(&mut bytes);
        u32::from_le_bytes(bytes).into()
    })];
    comm.broadcast(&mut seed, 0)?;
    Ok(seed[0])
}

/// Returns the state and the path of a checkpoint. Returns an error unless it fits the arguments
/// and is the same on all ranks.
fn resume(args: &TrainArgs, comm: &Communicator, path: &Path) -> Result<(State, PathBuf), Failure> {
    let path = if path.is_dir() { checkpoint::place(path) } else { path.to_owned() };
    let (state, digest) = checkpoint::state(&path)?;
    let refuse = |what: &str, there: &dyn std::fmt::Display, here: &dyn std::fmt::Display| {
        Err(format!("{} has {what} {there}, and the command line says {here}", path.display()).into())
    };
    if state.arch != args.arch.name() {
        return refuse("--arch", &state.arch, &args.arch.name());
    }
    if state.image_size != args.size() {
        return refuse("--image-size", &state.image_size, &args.size());
    }
    if let Some(seed) = args.seed.filter(|&seed| seed != state.seed) {
        return refuse("--seed", &state.seed, &seed);
    }
    let mut all = vec![0; digest.len() * comm.world_size()];
    comm.all_gather(&digest, &mut all)?;
    if let Some(rank) = all.chunks_exact(digest.len()).position(|other| other != &all[..digest.len()]) {
        return Err(format!("{} on rank {rank} is not the checkpoint of rank 0", path.display()).into());
    }
    Ok((state, path))
}

/// Makes the reducer of a model's gradients.
pub(super) fn reducer<E: Engine>(args: &TrainArgs, comm: &Communicator, model: &Model<E>) -> Result<Reducer, Failure> {
    let engine = model.engine();
    let one = |name: &Name| engine.place_one(Parameter::new(name.name.clone(), name.shape.clone(), DType::F32));
    let describe = |names: &[Name]| names.iter().map(one).collect::<Vec<_>>();
    let bucket_bytes = (args.bucket_mb * f64::from(1 << 20)) as usize;
    let builder = engine
        .place(Reducer::builder())
        .parameters(describe(model.names()))
        .buffers(describe(model.buffer_names()))
        .bucket_bytes(bucket_bytes)
        // The first bucket is always small, so that communication starts early.
        .first_bucket_bytes(bucket_bytes.min(1 << 20))
        .overlap(!args.no_overlap);
    let builder = match args.compress {
        Compression::None => builder,
        Compression::F16 => builder.hook(Compress::f16()),
        Compression::Bf16 => builder.hook(Compress::bf16()),
        Compression::ErrorFeedback => builder.hook(ErrorFeedback::new()),
        Compression::PowerSgd1 => builder.hook(PowerSgd::new(1)),
        Compression::PowerSgd2 => builder.hook(PowerSgd::new(2)),
        Compression::PowerSgd4 => builder.hook(PowerSgd::new(4)),
    };
    Ok(if args.no_communication { builder.build(&comm.split(comm.rank(), 0)?)? } else { builder.build(comm)? })
}

/// Copies the weights of rank 0 to all ranks.
pub(super) fn broadcast<E: Engine>(reducer: &mut Reducer, model: &mut Model<E>) -> Result<(), Failure> {
    let parameters = model.parameters_of_rank_0(reducer)?;
    model.take_parameters(parameters);
    Ok(())
}

/// Returns the folder of the run: that of the checkpoint, or a new one.
fn place(args: &TrainArgs, start: &Start, checkpoint: Option<&PathBuf>) -> Result<PathBuf, String> {
    let folder = match (&args.output, checkpoint.and_then(|path| path.parent())) {
        (Some(folder), _) => folder.clone(),
        (None, Some(folder)) => folder.to_owned(),
        (None, None) => unused(&format!("{}-{}", start.arch, start.ranks)),
    };
    let is_taken = checkpoint::place(&folder).exists() || metrics::place(&folder).exists();
    let is_same = |other: &PathBuf| other.parent().is_some_and(|other| folder.canonicalize().ok() == other.canonicalize().ok());
    if is_taken && !checkpoint.is_some_and(is_same) {
        let name = folder.display();
        return Err(format!("{name} has a run already: continue it with --resume {name}, or name another folder with --output"));
    }
    std::fs::create_dir_all(&folder).map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
    Ok(folder)
}

/// Copies the folder of rank 0 to all ranks, because the rank that writes may be lost.
fn agree_on_folder(folder: &Path, comm: &Communicator) -> Result<PathBuf, Failure> {
    let mut name = folder.display().to_string().into_bytes();
    let mut length = [name.len() as u64];
    comm.broadcast(&mut length, 0)?;
    name.resize(length[0] as usize, 0);
    comm.broadcast(&mut name, 0)?;
    Ok(PathBuf::from(String::from_utf8_lossy(&name).into_owned()))
}

/// Writes the start of the run to the metrics and to standard output.
fn begin(args: &TrainArgs, start: Start, epochs: usize, folder: &Path) -> Result<Output, Failure> {
    let Start { arch, engine, transport, ranks, hosts, global_batch, images, seed, .. } = &start;
    say(&format!(
        "{arch} on {ranks} ranks, {hosts} hosts ({transport}); {engine} a rank; {global_batch} of {images} images a step; seed {seed}; {}",
        folder.display()
    ));
    let mut metrics = metrics::Writer::open(folder, start.step, epochs)?;
    metrics.write(&Event::Start(start))?;
    Ok(Output { metrics, progress: Progress::new(args.epochs) })
}

/// Returns a folder below `runs/` that does not exist yet.
fn unused(name: &str) -> PathBuf {
    let with = |suffix: String| Path::new("runs").join(format!("{name}{suffix}"));
    (1..)
        .map(|i| if i == 1 { with(String::new()) } else { with(format!("-run{i}")) })
        .find(|folder| !folder.exists())
        .unwrap_or_default()
}
