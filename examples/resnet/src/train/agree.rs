//! Checks that all ranks have the same arguments and images. Otherwise training would fail later,
//! or be meaningless.

use kolo::Communicator;
use sha2::{Digest, Sha256};

use super::Failure;
use crate::arguments::TrainArgs;
use crate::data::Dataset;

/// An entry to compare: a name, and its value as text.
pub(super) type Entry = (String, String);

/// Returns the arguments that must be the same on all ranks.
pub(super) fn options(args: &TrainArgs) -> Vec<Entry> {
    let TrainArgs { lr, momentum, wd, batch_size, global_batch, seed, epochs, start_epoch, lr_step, .. } = args;
    let entry = |name: &str, value: &dyn std::fmt::Debug| (name.to_owned(), format!("{value:?}"));
    let or_none = |name: &str, value: Option<String>| (name.to_owned(), value.unwrap_or_else(|| "nothing".to_owned()));
    vec![
        ("--arch".to_owned(), args.arch.name()),
        entry("--image-size", &args.size()),
        entry("--augment", &args.augmentation()),
        entry("--batch-size", batch_size),
        or_none("--global-batch", global_batch.map(|batch| batch.to_string())),
        entry("--lr", lr),
        entry("--lr-scale", &args.lr_scale),
        entry("--lr-decay", &args.lr_decay),
        entry("--lr-step", lr_step),
        entry("--warmup", &args.warmup_epochs()),
        entry("--momentum", momentum),
        entry("--wd", wd),
        entry("--epochs", epochs),
        entry("--start-epoch", start_epoch),
        or_none("--seed", seed.map(|seed| seed.to_string())),
        entry("--print-freq", &args.print_freq),
        or_none("--checkpoint-every", args.checkpoint_every.map(|steps| steps.to_string())),
        entry("--elastic", &args.elastic),
        entry("--evaluate", &args.evaluate),
        // The checksum of the checkpoint is compared elsewhere.
        or_none("--resume", args.resume.as_ref().map(|_| "a checkpoint".to_owned())),
        entry("--no-communication", &args.no_communication),
    ]
}

/// Returns the properties of the images that must be the same on all ranks.
pub(super) fn images(train: &dyn Dataset, test: &dyn Dataset) -> Vec<Entry> {
    let mut entries = vec![
        ("images to train on".to_owned(), train.len().to_string()),
        ("images to test on".to_owned(), test.len().to_string()),
        ("classes".to_owned(), train.classes().to_string()),
    ];
    entries.extend(train.names().iter().enumerate().map(|(i, name)| (format!("class {i}"), name.clone())));
    entries
}

/// Compares entries, which have the same order on all ranks. If they are equal, this is one small
/// collective call.
///
/// # Errors
///
/// The first difference, on all ranks.
pub(super) fn agree(comm: &Communicator, mine: &[Entry]) -> Result<(), Failure> {
    let text = serde_json::to_vec(mine).map_err(|error| error.to_string())?;
    let digest: [u8; 32] = Sha256::digest(&text).into();
    let mut digests = vec![0; 32 * comm.world_size()];
    comm.all_gather(&digest, &mut digests)?;
    let Some(other) = digests.chunks_exact(32).position(|other| other != &digests[..32]) else { return Ok(()) };
    // All ranks see the same digests, so all come here, and only these two send their entries.
    let [first, second] = [0, other].map(|rank| told_by(comm, rank, &text));
    Err(difference(&first?, &second?, other).into())
}

/// Broadcasts the entries of a rank.
fn told_by(comm: &Communicator, rank: usize, mine: &[u8]) -> Result<Vec<Entry>, Failure> {
    let mut length = [mine.len() as u64];
    comm.broadcast(&mut length, rank)?;
    let mut text = mine.to_vec();
    text.resize(length[0] as usize, 0);
    comm.broadcast(&mut text, rank)?;
    serde_json::from_slice(&text).map_err(|error| format!("the arguments of rank {rank} cannot be compared: {error}").into())
}

fn difference(first: &[Entry], second: &[Entry], rank: usize) -> String {
    let pair = first.iter().zip(second).find(|(a, b)| a != b);
    match pair {
        Some(((name, here), (other, there))) if name == other => {
            format!("ranks differ: rank 0 has {name} {here}, and rank {rank} has {name} {there}")
        }
        _ => format!("rank 0 and rank {rank} differ: is the same program installed everywhere?"),
    }
}
