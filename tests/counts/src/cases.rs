//! What is counted: operations, sizes, numbers of ranks, and the memory of the buffers.

use std::fmt;

/// Through which interface an operation is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    C,
    Rust,
}

/// The setting `KOLO_COPY_MODE`, which leaves nothing to a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Staged,
    Cma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Barrier,
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// From rank 0 to rank 1.
    Message,
}

const KINDS: [Kind; 8] = [
    Kind::Barrier,
    Kind::AllReduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Message,
];

impl Kind {
    pub(crate) fn number(self) -> u64 {
        self as u64
    }

    pub(crate) fn from_number(number: u64) -> Kind {
        KINDS[number as usize]
    }
}

/// Which ranks run first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum First {
    /// The peers, as far as they come.
    Peers,
    /// The rank that is counted: it waits for no peer.
    This,
}

/// The memory of the buffers, and how the operation moves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Private,
    Registered,
    /// Private, and read by `process_vm_readv`.
    Cma,
}

/// The forms of docs/architecture.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Inline,
    OneShot,
    TwoShot,
    CmaReduce,
    CmaCopy,
    RegisteredReduce,
    Registered,
    Staged,
    Message,
}

impl Form {
    /// How its row in docs/architecture.md begins, and what that says of the bytes.
    pub(crate) fn row(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Form::Inline => ("in the flag line", "the line"),
            Form::OneShot => ("one-shot", "(N + 3) S"),
            Form::TwoShot => ("two-shot", "(5 - 1/N) S"),
            Form::CmaReduce => ("cma, all-reduce", "(5 - 3/N) S"),
            Form::CmaCopy => ("cma, broadcast, scatter, all-gather and all-to-all", "2 S"),
            Form::RegisteredReduce => ("registered, all-reduce", "(3 - 1/N) S"),
            Form::Registered => ("registered, others", "at most 2 S"),
            Form::Staged => ("staged", "at most 4 S"),
            Form::Message => return None,
        })
    }

    /// The bytes in that row: the fewest and the most. Flags come in addition.
    pub(crate) fn bytes(self, ranks: usize, bytes: usize) -> (usize, usize) {
        let exactly = |bytes| (bytes, bytes);
        match self {
            // The value itself, in private memory.
            Form::Inline => (0, 2 * bytes),
            Form::OneShot => exactly((ranks + 3) * bytes),
            Form::TwoShot => exactly(5 * bytes - bytes / ranks),
            Form::CmaReduce => exactly(5 * bytes - 3 * bytes / ranks),
            Form::CmaCopy => exactly(2 * bytes),
            Form::RegisteredReduce => exactly(3 * bytes - bytes / ranks),
            Form::Registered => (bytes, 2 * bytes),
            Form::Staged => (bytes, 4 * bytes),
            Form::Message => (2 * bytes, 2 * bytes),
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) form: Form,
    pub(crate) ranks: usize,
    /// The rank that is counted.
    pub(crate) rank: usize,
    pub(crate) first: First,
    pub(crate) memory: Memory,
    /// Bytes of the buffer, or of all blocks together.
    pub(crate) bytes: usize,
}

impl Case {
    pub(crate) fn mode(&self) -> Mode {
        if self.memory == Memory::Cma { Mode::Cma } else { Mode::Staged }
    }

    /// Whether it is counted through this interface. What an operation does with much data does not
    /// depend on the interface.
    pub(crate) fn is_counted(&self, api: Api) -> bool {
        api == Api::C || self.bytes <= 64 << 10
    }

    /// Whether it moves at most what a flag line holds, or a message of 8 bytes: its instructions are what it
    /// costs.
    pub(crate) fn is_short(&self) -> bool {
        self.form == Form::Inline || (self.form == Form::Message && self.bytes == 8)
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.memory == Memory::Registered
    }

    /// Whether all ranks do the same in both cases.
    pub(crate) fn is_same_call(&self, other: &Case) -> bool {
        Case { name: "", rank: 0, first: First::This, ..*self } == Case { name: "", rank: 0, first: First::This, ..*other }
    }

    /// The first columns of its row.
    pub(crate) fn key(&self) -> String {
        let bytes = match self.bytes {
            0 => "0 B".to_owned(),
            bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
            bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
            bytes => format!("{bytes} B"),
        };
        format!("{} | {} | {bytes} | {}", self.name, self.ranks, self.memory)
    }
}

/// Every form.
pub(crate) const FORMS: [Form; 9] = [
    Form::Inline,
    Form::OneShot,
    Form::TwoShot,
    Form::CmaReduce,
    Form::CmaCopy,
    Form::RegisteredReduce,
    Form::Registered,
    Form::Staged,
    Form::Message,
];

/// All cases, in the order of the table.
pub(crate) fn all() -> Vec<Case> {
    [2, 4].into_iter().flat_map(of).collect()
}

/// The cases of this many ranks.
fn of(ranks: usize) -> Vec<Case> {
    let case = |name, kind, form, bytes| {
        let memory = match form {
            Form::CmaReduce | Form::CmaCopy => Memory::Cma,
            Form::RegisteredReduce | Form::Registered => Memory::Registered,
            _ => Memory::Private,
        };
        let rank = usize::from(matches!(name, "broadcast, receiver" | "recv"));
        let first = if matches!(name, "broadcast, root" | "send") { First::This } else { First::Peers };
        Case { name, kind, form, ranks, rank, first, memory, bytes }
    };
    const M: usize = 1 << 20;
    // Eight bytes from each rank.
    let blocks = 8 * ranks;
    let mut cases = vec![
        case("barrier", Kind::Barrier, Form::Inline, 0),
        case("all_reduce", Kind::AllReduce, Form::Inline, 8),
        case("all_reduce", Kind::AllReduce, Form::OneShot, 2 << 10),
        case("all_reduce", Kind::AllReduce, Form::TwoShot, 64 << 10),
        case("all_reduce", Kind::AllReduce, Form::TwoShot, M),
        case("all_reduce", Kind::AllReduce, Form::CmaReduce, M),
        case("all_reduce", Kind::AllReduce, Form::RegisteredReduce, M),
        case("broadcast, root", Kind::Broadcast, Form::Inline, 8),
        case("broadcast, receiver", Kind::Broadcast, Form::Inline, 8),
        case("broadcast, receiver", Kind::Broadcast, Form::Staged, M),
        case("broadcast, receiver", Kind::Broadcast, Form::CmaCopy, M),
        case("broadcast, receiver", Kind::Broadcast, Form::Registered, M),
        case("all_gather", Kind::AllGather, Form::Inline, blocks),
        case("all_gather", Kind::AllGather, Form::Staged, M),
        case("all_gather", Kind::AllGather, Form::CmaCopy, M),
        case("all_gather", Kind::AllGather, Form::Registered, M),
        case("reduce_scatter", Kind::ReduceScatter, Form::Inline, blocks),
        case("reduce_scatter", Kind::ReduceScatter, Form::Staged, M),
        case("reduce_scatter", Kind::ReduceScatter, Form::Registered, M),
        case("all_to_all", Kind::AllToAll, Form::Inline, blocks),
        case("all_to_all", Kind::AllToAll, Form::Staged, M),
        case("all_to_all", Kind::AllToAll, Form::CmaCopy, M),
        case("all_to_all", Kind::AllToAll, Form::Registered, M),
        case("reduce, root", Kind::Reduce, Form::Inline, 8),
    ];
    // At 4 ranks, a cma all-reduce checks its deadline about 20 times; each check takes a lock that
    // the failure detector may hold, so the count of locked instructions varies.
    cases.retain(|case| ranks == 2 || case.form != Form::CmaReduce);
    // How often a receiver looks at how far the other receivers have read, none of which it waits
    // for, depends on when they run.
    let is_timed = |case: &Case| case.name == "broadcast, receiver" && case.form == Form::Staged;
    cases.retain(|case| ranks == 2 || !is_timed(case));
    if ranks == 2 {
        cases.push(case("send", Kind::Message, Form::Message, 8));
        cases.push(case("recv", Kind::Message, Form::Message, 8));
        cases.push(case("send", Kind::Message, Form::Message, 4048));
        cases.push(case("recv", Kind::Message, Form::Message, 4048));
    }
    cases
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Api::C => "c",
            Api::Rust => "rust",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Staged => "staged",
            Mode::Cma => "cma",
        })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Memory::Private => "private",
            Memory::Registered => "registered",
            Memory::Cma => "private, cma",
        })
    }
}
