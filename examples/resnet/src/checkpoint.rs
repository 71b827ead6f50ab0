//! Checkpoints: a run that resumes from one continues as if it had not been interrupted.
//!
//! A file has a magic line, the length and the SHA-256 of the body, and the body: safetensors, with
//! the state in its metadata. It is written under another name and then renamed, so that there is a
//! complete file at any moment.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, View, serialize};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::Engine;
use crate::model::{Model, Name};
use crate::optimizer::Sgd;

const MAGIC: &[u8; 26] = b"kolo resnet checkpoint v1\n";
const HEADER: usize = MAGIC.len() + 8 + 32;

/// The position of a run, and what its numbers depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) arch: String,
    pub(crate) classes: usize,
    pub(crate) image_size: usize,
    /// All random numbers follow from the seed and the position.
    pub(crate) seed: u64,
    pub(crate) epoch: usize,
    /// Images of this epoch that all ranks together have seen.
    pub(crate) seen: usize,
    /// Steps since the beginning of the run.
    pub(crate) step: u64,
    /// The best accuracy in a test so far, from 0 to 1.
    pub(crate) best: f64,
}

/// An array in a safetensors file.
struct Array<'a> {
    shape: &'a [usize],
    values: Vec<f32>,
}

impl View for Array<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn data_len(&self) -> usize {
        4 * self.values.len()
    }
}

const METADATA: &str = "kolo-resnet";

/// Returns the path of the checkpoint in a run's folder.
pub(crate) fn place(run: &Path) -> PathBuf {
    run.join("checkpoint")
}

/// Writes a checkpoint. If it fails, the previous one is still there.
pub(crate) fn save<E: Engine>(path: &Path, state: &State, model: &Model<E>, optimizer: &Sgd<E>) -> Result<(), String> {
    let mut arrays = weights(model, "model.");
    for (name, velocity) in model.names().iter().zip(&optimizer.velocities) {
        arrays.push((format!("velocity.{}", name.name), Array { shape: &name.shape, values: model.read(velocity) }));
    }
    let state = serde_json::to_string(state).map_err(|error| error.to_string())?;
    let body = encode(arrays, HashMap::from([(METADATA.to_owned(), state)]))?;
    let mut header = MAGIC.to_vec();
    header.extend((body.len() as u64).to_le_bytes());
    header.extend(Sha256::digest(&body));
    write_whole(path, &[&header, &body])
}

/// Reads a checkpoint into a model and its optimiser. If it does not fit, nothing changes.
pub(crate) fn load<E: Engine>(path: &Path, model: &mut Model<E>, optimizer: &mut Sgd<E>) -> Result<(), String> {
    let body = body(path)?;
    let failed = |problem: String| format!("{}: {problem}", path.display());
    let tensors = SafeTensors::deserialize(&body).map_err(|error| failed(format!("no safetensors: {error}")))?;
    let values = read_weights(&tensors, "model.", model).map_err(failed)?;
    let velocity = |name: &Name| Ok(model.engine().constant(array(&tensors, "velocity.", name)?, &name.shape));
    let velocities = model.names().iter().map(velocity).collect::<Result<_, _>>().map_err(failed)?;
    set_weights(model, values);
    optimizer.velocities = velocities;
    Ok(())
}

/// Reads the state of a checkpoint and its checksum, after checking the whole file.
pub(crate) fn state(path: &Path) -> Result<(State, [u8; 32]), String> {
    let body = body(path)?;
    let failed = |problem: &dyn std::fmt::Display| format!("{} has no state: {problem}", path.display());
    let (_, metadata) = SafeTensors::read_metadata(&body).map_err(|error| failed(&error))?;
    let text =
        metadata.metadata().as_ref().and_then(|metadata| metadata.get(METADATA)).ok_or_else(|| failed(&"it is missing"))?;
    let state = serde_json::from_str(text).map_err(|error| failed(&error))?;
    Ok((state, Sha256::digest(&body).into()))
}

/// Returns the body of the file, after checking its length and checksum.
fn body(path: &Path) -> Result<Vec<u8>, String> {
    let name = path.display();
    let mut bytes = fs::read(path).map_err(|error| format!("the checkpoint {name} cannot be read: {error}"))?;
    let version = MAGIC.len() - 2;
    if bytes.len() < version || bytes[..version] != MAGIC[..version] {
        return Err(format!("{name} is not a checkpoint of this program (weights alone are given with --weights)"));
    }
    if bytes.len() >= MAGIC.len() && bytes[..MAGIC.len()] != MAGIC[..] {
        return Err(format!("{name} is a checkpoint of another version of this program"));
    }
    let header = bytes.get(MAGIC.len()..HEADER).ok_or_else(|| format!("{name} is damaged: it ends within its header"))?;
    let expected = u64::from_le_bytes(header[..8].try_into().unwrap_or_default());
    let digest = header[8..].to_owned();
    let body = bytes.split_off(HEADER);
    if body.len() as u64 != expected {
        return Err(format!("{name} is damaged: it has {} bytes of the {expected} that were written", body.len()));
    }
    if Sha256::digest(&body)[..] != digest[..] {
        return Err(format!("{name} is damaged: its checksum is wrong"));
    }
    Ok(body)
}

/// Writes a model's weights alone, in safetensors with torchvision's names.
pub(crate) fn export<E: Engine>(path: &Path, model: &Model<E>) -> Result<(), String> {
    write_whole(path, &[&encode(weights(model, ""), HashMap::from([("format".to_owned(), "pt".to_owned())]))?])
}

/// Reads weights that [`export`] or torchvision wrote.
pub(crate) fn import<E: Engine>(path: &Path, model: &mut Model<E>) -> Result<(), String> {
    let failed = |problem: String| format!("{}: {problem}", path.display());
    let bytes = fs::read(path).map_err(|error| format!("the weights {} cannot be read: {error}", path.display()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| failed(format!("no safetensors: {error}")))?;
    let values = read_weights(&tensors, "", model).map_err(failed)?;
    // PyTorch's counter of batches.
    let known = |name: &str| {
        name.ends_with("num_batches_tracked") || model.names().iter().chain(model.buffer_names()).any(|known| known.name == name)
    };
    if let Some(strange) = tensors.names().into_iter().find(|name| !known(name)) {
        return Err(failed(format!("{strange} is not part of this architecture")));
    }
    set_weights(model, values);
    Ok(())
}

fn weights<'m, E: Engine>(model: &'m Model<E>, prefix: &str) -> Vec<(String, Array<'m>)> {
    let array = |name: &'m Name, values| (format!("{prefix}{}", name.name), Array { shape: &name.shape, values });
    let parameters = model.names().iter().enumerate().map(|(i, name)| array(name, model.parameter(i)));
    let buffers = model.buffer_names().iter().enumerate().map(|(i, name)| array(name, model.buffer(i)));
    parameters.chain(buffers).collect()
}

/// Returns the values of all parameters and buffers.
fn read_weights<E: Engine>(tensors: &SafeTensors<'_>, prefix: &str, model: &Model<E>) -> Result<Vec<Vec<f32>>, String> {
    model.names().iter().chain(model.buffer_names()).map(|name| array(tensors, prefix, name)).collect()
}

fn set_weights<E: Engine>(model: &mut Model<E>, mut values: Vec<Vec<f32>>) {
    let buffers = values.split_off(model.names().len());
    for (i, new) in values.into_iter().enumerate() {
        model.set_parameter(i, new);
    }
    buffers.into_iter().enumerate().for_each(|(i, values)| model.set_buffer(i, values));
}

fn array(tensors: &SafeTensors<'_>, prefix: &str, name: &Name) -> Result<Vec<f32>, String> {
    let full = format!("{prefix}{}", name.name);
    let tensor = tensors.tensor(&full).map_err(|_| format!("{full} is missing"))?;
    if tensor.shape() != name.shape {
        return Err(format!("{full} is {:?}, and should be {:?}", tensor.shape(), name.shape));
    }
    if tensor.dtype() != Dtype::F32 {
        return Err(format!("{full} is of {}, and should be of F32", tensor.dtype()));
    }
    Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn encode(arrays: Vec<(String, Array<'_>)>, metadata: HashMap<String, String>) -> Result<Vec<u8>, String> {
    serialize(arrays, Some(metadata)).map_err(|error| format!("the weights cannot be written as safetensors: {error}"))
}

/// Writes a file as a whole or not at all: under another name, flushed to the disk, and then
/// renamed.
pub(crate) fn write_whole(path: &Path, parts: &[&[u8]]) -> Result<(), String> {
    let beside = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&beside)?;
        parts.iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        // The new name also survives a power failure.
        #[cfg(unix)]
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    };
    write().map_err(|error| format!("{} cannot be written: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Flex;
    use crate::model::architecture::Architecture;

    fn model(seed: u64, classes: usize) -> (Model<Flex>, Sgd<Flex>) {
        let model = Model::new(Flex, &Architecture::ResNet20.shape(), classes, seed);
        let mut sgd = Sgd::new(&model, 0.9, 0.0);
        for (velocity, name) in sgd.velocities.iter_mut().zip(model.names()) {
            let values = (0..name.count()).map(|i| (i as f32 + seed as f32).sin()).collect();
            *velocity = model.engine().constant(values, &name.shape);
        }
        (model, sgd)
    }

    fn all(model: &Model<Flex>, sgd: &Sgd<Flex>) -> Vec<u32> {
        let parameters = (0..model.names().len()).flat_map(|i| model.parameter(i));
        let buffers = (0..model.buffer_names().len()).flat_map(|i| model.buffer(i));
        let velocities = sgd.velocities.iter().flat_map(|velocity| model.read(velocity));
        parameters.chain(buffers).chain(velocities).map(f32::to_bits).collect()
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kolo-resnet-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn what_is_saved_is_what_is_read() {
        let folder = folder("checkpoint");
        let path = place(&folder);
        let state =
            State { arch: "resnet20".to_owned(), classes: 10, image_size: 32, seed: 5, epoch: 2, seen: 640, step: 99, best: 0.5 };
        let (mut saved, sgd) = model(1, 10);
        let mut buffer = saved.buffer(3);
        buffer[1] = 0.75;
        saved.set_buffer(3, buffer);
        save(&path, &state, &saved, &sgd).unwrap();
        assert_eq!(super::state(&path).unwrap().0, state);
        let (mut read, mut read_sgd) = model(2, 10);
        assert_ne!(all(&saved, &sgd), all(&read, &read_sgd));
        load(&path, &mut read, &mut read_sgd).unwrap();
        assert_eq!(all(&saved, &sgd), all(&read, &read_sgd));

        // Weights alone, there and back.
        let weights = folder.join("weights.safetensors");
        export(&weights, &saved).unwrap();
        let (mut imported, _) = model(3, 10);
        import(&weights, &mut imported).unwrap();
        assert_eq!(all(&imported, &sgd), all(&saved, &sgd));
        let refuse = |error: Result<(), String>, hint: &str| {
            let error = error.unwrap_err();
            assert!(error.contains(hint), "{error}");
        };
        refuse(import(&weights, &mut model(1, 7).0), "fc.weight is [10, 64], and should be [7, 64]");
        refuse(import(&path, &mut imported), "no safetensors");
        let mut large = Model::new(Flex, &Architecture::ResNet32.shape(), 10, 0);
        refuse(import(&weights, &mut large), "layer1.3.conv1.weight is missing");

        // Files that are no checkpoint or are damaged.
        let refused = |bytes: &[u8], hint: &str| {
            let path = folder.join("damaged");
            fs::write(&path, bytes).unwrap();
            let error = super::state(&path).unwrap_err();
            assert!(error.contains(hint) && error.contains("damaged"), "{error}");
            let (mut model, mut sgd) = model(4, 10);
            let before = all(&model, &sgd);
            assert!(load(&path, &mut model, &mut sgd).is_err());
            assert_eq!(before, all(&model, &sgd));
        };
        let whole = fs::read(&path).unwrap();
        refused(b"", "is not a checkpoint");
        refused(&fs::read(&weights).unwrap(), "is not a checkpoint");
        refused(&whole[..40], "within its header");
        refused(&whole[..whole.len() - 1], "bytes of the");
        refused(&[&whole[..], &[0]].concat(), "bytes of the");
        for at in [HEADER - 1, HEADER, whole.len() / 2, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            refused(&changed, "checksum");
        }
        let mut newer = whole;
        newer[MAGIC.len() - 2] = b'2';
        refused(&newer, "another version");
        assert!(super::state(&folder.join("none")).unwrap_err().contains("cannot be read"));
        fs::remove_dir_all(folder).unwrap();
    }
}
