//! Finds the tensors of a module, reads them, and replaces them.

use std::collections::{HashMap, HashSet};

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Bool, BoolStore, DType, Device, Int, Tensor, TensorData};
use kolo::ddp::Parameter;

use crate::error::{Error, MOST_DIMENSIONS, Result};

/// A tensor of a module.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) id: ParamId,
    /// As the ranks exchange it, with its path in the module as name.
    pub(crate) described: Parameter,
    /// Its element type in burn.
    pub(crate) dtype: DType,
    /// The device of its values, without autodiff.
    pub(crate) device: Device,
}

/// The tensors of a module, each once, in the order in which the module visits them.
#[derive(Debug, Default)]
pub(crate) struct Tensors {
    /// Those that require a gradient.
    pub(crate) parameters: Vec<Found>,
    /// The others: frozen parameters, and buffers such as the running mean of batch normalisation.
    pub(crate) buffers: Vec<Found>,
}

impl Tensors {
    /// Finds the tensors of a module. Initializes parameters that are not initialized yet.
    pub(crate) fn of<M: Module>(module: &M) -> Result<Tensors> {
        let mut search = Search::default();
        module.visit(&mut search);
        match search.error {
            Some(error) => Err(error),
            None => Ok(search.tensors),
        }
    }
}

#[derive(Default)]
struct Search {
    path: Vec<String>,
    seen: HashSet<ParamId>,
    tensors: Tensors,
    /// The first one.
    error: Option<Error>,
}

impl Search {
    fn add(&mut self, id: ParamId, shape: Vec<usize>, dtype: DType, device: Device, requires_gradient: bool) {
        if !self.seen.insert(id) || self.error.is_some() {
            return;
        }
        let name = self.path.join(".");
        if shape.len() > MOST_DIMENSIONS {
            self.error = Some(Error::Dimensions { name, dimensions: shape.len() });
            return;
        }
        let Some(exchanged) = exchanged_as(dtype) else {
            self.error = Some(Error::Elements { name, dtype });
            return;
        };
        let found = Found { id, described: Parameter::new(name, shape, exchanged), dtype, device: device.inner() };
        let list = if requires_gradient { &mut self.tensors.parameters } else { &mut self.tensors.buffers };
        list.push(found);
    }
}

impl ModuleVisitor for Search {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        self.add(param.id, tensor.dims().to_vec(), tensor.dtype(), tensor.device(), tensor.is_require_grad());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.base();
        self.add(param.id, tensor.dims().to_vec(), tensor.dtype(), tensor.device(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.base();
        self.add(param.id, tensor.dims().to_vec(), tensor.dtype(), tensor.device(), false);
    }
}

/// Returns the type in which ranks exchange elements, if there is one.
fn exchanged_as(dtype: DType) -> Option<kolo::DType> {
    Some(match dtype {
        DType::F64 => kolo::DType::F64,
        DType::F32 | DType::Flex32 => kolo::DType::F32,
        DType::F16 => kolo::DType::F16,
        DType::BF16 => kolo::DType::BF16,
        DType::I64 => kolo::DType::I64,
        DType::I32 => kolo::DType::I32,
        DType::I16 => kolo::DType::I16,
        DType::I8 => kolo::DType::I8,
        DType::U64 => kolo::DType::U64,
        DType::U32 => kolo::DType::U32,
        DType::U16 => kolo::DType::U16,
        DType::U8 => kolo::DType::U8,
        DType::Bool(_) => kolo::DType::Bool,
        DType::QFloat(_) => return None,
    })
}

/// Returns burn's name for the type in which ranks exchange elements.
pub(crate) fn read_as(dtype: DType) -> DType {
    match dtype {
        DType::Flex32 => DType::F32,
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        other => other,
    }
}

/// Reads the tensors of a module.
pub(crate) struct Values {
    found: HashMap<ParamId, Result<TensorData, String>>,
}

impl Values {
    pub(crate) fn of<M: Module>(module: &M) -> Values {
        let mut values = Values { found: HashMap::new() };
        module.visit(&mut values);
        values
    }

    /// Takes the values of these tensors.
    pub(crate) fn take(&mut self, what: &'static str, tensors: &[Found]) -> Result<Vec<TensorData>> {
        let values: Vec<_> = tensors.iter().filter_map(|one| Some((one, self.found.remove(&one.id)?))).collect();
        if values.len() != tensors.len() {
            return Err(Error::Model { what, expected: tensors.len(), given: values.len() });
        }
        let read = |(one, value): (&Found, Result<TensorData, String>)| {
            value.map_err(|why| Error::Read { name: one.described.name.clone(), why })
        };
        values.into_iter().map(read).collect()
    }
}

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = || {
            let tensor = param.base();
            let dtype = read_as(tensor.dtype());
            tensor.try_into_data_dtype(dtype).map_err(|error| error.to_string())
        };
        self.found.entry(param.id).or_insert_with(value);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.found.entry(param.id).or_insert_with(|| param.base().try_into_data().map_err(|error| error.to_string()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let value = || {
            let tensor = param.base();
            let dtype = read_as(tensor.dtype());
            tensor.try_into_data_dtype(dtype).map_err(|error| error.to_string())
        };
        self.found.entry(param.id).or_insert_with(value);
    }
}

/// Replaces the values of tensors. Autodiff, devices and element types stay as they are.
pub(crate) struct Replace {
    pub(crate) values: HashMap<ParamId, TensorData>,
}

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&param.id).cloned() {
            Some(value) => param.map(|old| {
                let new = Tensor::<D>::from_data(value, (&old.device(), old.dtype()));
                new.set_require_grad(old.is_require_grad())
            }),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.values.get(&param.id).cloned() {
            Some(value) => param.map(|old| Tensor::from_data(value, (&old.device(), old.dtype()))),
            None => param,
        }
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        match self.values.get(&param.id).cloned() {
            Some(value) => param.map(|old| Tensor::from_data(value, (&old.device(), old.dtype()))),
            None => param,
        }
    }
}
