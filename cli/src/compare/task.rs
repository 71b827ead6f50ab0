//! What can be compared.

use crate::bench::operation::Operation;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// From the start of the launcher to the end of the last rank, with one barrier.
    Start,
    Question(Subject),
}

/// What the ranks are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Operation(Operation),
    /// Nonblocking all-reduces, [`IN_FLIGHT`] at once.
    InFlight,
    /// A nonblocking all-reduce, and a computation that takes as long.
    Overlap,
    /// A message and its answer.
    PingPong,
    /// Messages in one direction, [`MESSAGES`] before an answer.
    Bandwidth,
}

/// How many nonblocking all-reduces `in_flight` starts before it waits for the first.
pub(super) const IN_FLIGHT: u32 = 10;
/// How many messages `bandwidth` sends before it waits for an answer, as `osu_bw` does.
pub(super) const MESSAGES: u32 = 64;

use Subject::{Bandwidth, InFlight, Overlap, PingPong};

/// All of them: other operations cannot be compared.
pub(super) const TASKS: [Task; 11] = [
    Task::Question(Subject::Operation(Operation::AllReduce)),
    Task::Question(Subject::Operation(Operation::Broadcast)),
    Task::Question(Subject::Operation(Operation::Barrier)),
    Task::Question(Subject::Operation(Operation::AllGather)),
    Task::Question(Subject::Operation(Operation::ReduceScatter)),
    Task::Question(Subject::Operation(Operation::AllToAll)),
    Task::Question(InFlight),
    Task::Question(Overlap),
    Task::Question(PingPong),
    Task::Question(Bandwidth),
    Task::Start,
];

impl Subject {
    pub(super) fn name(self) -> &'static str {
        match self {
            Subject::Operation(op) => op.name(),
            InFlight => "in_flight",
            Overlap => "overlap",
            PingPong => "ping_pong",
            Bandwidth => "bandwidth",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Subject> {
        TASKS.into_iter().find_map(|task| match task {
            Task::Question(subject) if subject.name() == name => Some(subject),
            _ => None,
        })
    }

    /// How many operations one call consists of. Times are those of one operation.
    pub(super) fn operations(self) -> u32 {
        match self {
            Subject::Operation(_) | Overlap => 1,
            InFlight => IN_FLIGHT,
            PingPong => 2,
            Bandwidth => MESSAGES,
        }
    }

    /// Returns whether only two ranks take part.
    pub(super) fn is_messages(self) -> bool {
        matches!(self, PingPong | Bandwidth)
    }

    /// The bytes that are measured for a size, as in `kolo bench`.
    pub(super) fn bytes(self, size: u64, ranks: usize) -> usize {
        let op = match self {
            Subject::Operation(op) => op,
            InFlight | Overlap => Operation::AllReduce,
            PingPong | Bandwidth => Operation::SendRecv,
        };
        op.elements(size, size_of::<f32>(), ranks) * size_of::<f32>()
    }
}

impl Task {
    pub(super) fn name(self) -> &'static str {
        match self {
            Task::Start => "start",
            Task::Question(subject) => subject.name(),
        }
    }

    pub(super) fn has_sizes(self) -> bool {
        !matches!(self, Task::Start | Task::Question(Subject::Operation(Operation::Barrier)))
    }
}
