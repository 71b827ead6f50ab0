//! The reductions that run on a GPU.
