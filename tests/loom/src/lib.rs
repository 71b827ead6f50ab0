//! The protocols in memory that ranks, or a stream and the host, share: kolo's own files, compiled
//! against [loom](https://docs.rs/loom), which runs the tests in every order of memory accesses.
//!
//! They are a crate of their own because the rest of kolo, of which no model has a need, takes much
//! longer to compile.

#![cfg(test)]
// The models take a part of each file.
#![allow(dead_code)]

mod shm;
mod sync;

mod cuda {
    pub(crate) mod device;
    #[path = "../../../../src/cuda/words.rs"]
    mod words;
}

/// The names of kolo's other modules that the files mention.
mod config {
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(crate) enum FlagLayout {
        Auto,
        Flat,
        Hierarchy,
    }
}

mod error {
    pub(crate) type Result<T> = std::result::Result<T, ()>;
}

mod sys {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Domains {
        pub(crate) cache: u32,
        pub(crate) node: u32,
    }

    pub(crate) fn forks() -> u32 {
        0
    }
}

mod types {
    pub(crate) struct Descriptor;

    impl Descriptor {
        pub(crate) const WORDS: usize = 4;
        pub(crate) const SEQ: usize = 3;
    }
}
