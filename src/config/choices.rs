//! The settings that are one of several names. The crate exports them all.

use crate::types::{DType, numbered};

numbered! {
    /// The transport between ranks.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Transport {
        /// Shared memory inside a host, TCP between hosts.
        #[default]
        Auto = 0, "auto";
        /// TCP, inside a host as well.
        Tcp = 1, "tcp";
        /// Shared memory only: ranks on several hosts refuse to connect. If the system grants no
        /// shared memory, the ranks log a warning and exchange messages.
        Shm = 2, "shm";
    }
}

numbered! {
    /// How private memory of 32 KiB or more passes from one process of a host to another, in all-reduce,
    /// reduce-scatter, broadcast, scatter, all-gather and all-to-all. What is streamed is so from 4 KiB on.
    /// Messages of 4 KiB or more are staged or streamed; with `Cma` as with `Auto`.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum CopyMode {
        /// The fastest mode, which the first such operations measure.
        #[default]
        Auto = 0, "auto";
        /// Through shared memory.
        Staged = 1, "staged";
        /// Through shared memory, past the caches.
        Streamed = 2, "streamed";
        /// The system copies it from the other process (`process_vm_readv`), where kolo may do so;
        /// otherwise staged.
        Cma = 3, "cma";
    }
}

numbered! {
    /// How ranks of a host learn that all have reached a phase.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum FlagLayout {
        /// The layout whose cache lines cost less, by the caches that ranks share.
        #[default]
        Auto = 0, "auto";
        /// Every rank reads the flags of every other rank.
        Flat = 1, "flat";
        /// Ranks form groups. The leaders of groups read the flags of their members and of each
        /// other.
        Hierarchy = 2, "hierarchy";
    }
}

numbered! {
    /// How data in the memory of GPUs passes from one rank to another.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum DevicePath {
        /// In place, if all ranks can reach all buffers of an operation; otherwise through pinned
        /// host memory.
        #[default]
        Auto = 0, "auto";
        /// Through pinned host memory.
        Staged = 1, "staged";
    }
}

numbered! {
    /// Where ranks that each have a GPU of their own wait for each other, in a large operation on
    /// buffers that are open to all of them. Data that passes through areas waits on the host in any
    /// case.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum DeviceWaits {
        /// In the kernels, if no GPU limits the time of a kernel; otherwise on the host. This also
        /// allows one-shot all-reduces.
        #[default]
        Kernels = 0, "kernels";
        /// On the host.
        Host = 1, "host";
    }
}

numbered! {
    /// How the elements of messages between hosts are written, in sums and averages of floats.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum WireDType {
        /// As in the buffers.
        #[default]
        F32 = 0, "f32";
        /// `f32` with half the bytes and 11 significant bits: an element beyond 65504 becomes infinite.
        F16 = 1, "f16";
        /// `f32` with half the bytes, 8 significant bits and the range of `f32`.
        BF16 = 2, "bf16";
        /// A byte for each element of `f32`, `f16` or `bf16`, and four for each 128: an element is a whole
        /// number from -127 to 127, times the scale of its block.
        Int8 = 3, "int8";
        /// As `int8`, but an element is a float of 4 significant bits times the scale: small elements beside
        /// large ones keep more, and all others lose 1 bit or more.
        F8E4M3 = 4, "f8e4m3";
    }
}

impl WireDType {
    /// Returns the type as which elements are packed, if they are.
    pub(crate) const fn packed(self) -> Option<DType> {
        match self {
            WireDType::F32 => None,
            WireDType::F16 => Some(DType::F16),
            WireDType::BF16 => Some(DType::BF16),
            WireDType::Int8 => Some(DType::I8),
            WireDType::F8E4M3 => Some(DType::F8E4M3),
        }
    }
}
