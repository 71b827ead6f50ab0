//! The flight recorder's files: JSON, one for each rank, which `kolo trace` reads.
//!
//! Times are nanoseconds of a clock that all processes with the same `clock.id` share. `clock`
//! holds what that clock and the wall clock showed when the file was written. For an operation that
//! was short and small, the end equals the start.

use std::fmt::{self, Write as _};

use super::log::Operation;
use super::recorder::{Recorder, Recording, choice};
use super::statistics::DeviceStats;
use crate::sys::{self, Timeline};
use crate::types::Op;

/// The version of the format. It changes if readers of the former version would misunderstand the
/// file.
const FORMAT: u32 = 1;

impl Recorder {
    /// Returns the name of this rank's file, which differs for every start of the job.
    pub(super) fn file_name(&self) -> String {
        let letter = |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '_' };
        let job: String = self.who.job.chars().map(letter).take(64).collect();
        format!("kolo-{job}-{:08x}-rank{}.json", self.who.run as u32, self.who.rank)
    }

    /// Returns the records as JSON.
    pub(super) fn report(&self, reason: &str) -> String {
        let timeline = Timeline::up_to_now();
        let who = &self.who;
        let mut json = String::new();
        let mut members = List::default();
        for (rank, member) in who.members.iter().enumerate() {
            members.push(format_args!("{{\"rank\": {rank}, \"host\": {}, \"pid\": {}}}", Text(&member.host), member.pid));
        }
        let mut communicators = List::default();
        for recording in self.recordings() {
            communicators.push(communicator(&recording, &timeline));
        }
        let clock = sys::clock_identity();
        // Writing to a String does not fail.
        let _ = write!(
            json,
            "{{\"kolo_trace\": {FORMAT}, \"version\": {}, \"reason\": {}, \"job\": {}, \"run\": \"{:016x}\", \"rank\": {},\n\
             \"clock\": {{\"id\": {}, \"monotonic_ns\": {}, \"unix_ns\": {}}},\n\
             \"members\": [{members}],\n\"communicators\": [{communicators}]}}\n",
            Text(env!("CARGO_PKG_VERSION")),
            Text(reason),
            Text(&who.job),
            who.run,
            who.rank,
            Text(clock.as_deref().unwrap_or_default()),
            sys::monotonic().as_nanos(),
            sys::wall().as_nanos(),
        );
        json
    }
}

fn communicator(recording: &Recording, timeline: &Timeline) -> String {
    let mut json = String::new();
    let mut operations = List::default();
    for operation in recording.history.operations(timeline) {
        operations.push(Line(&operation));
    }
    let failure = recording
        .failure
        .get()
        .map_or("null".to_owned(), |(text, culprit)| format!("{{\"text\": {}, \"rank\": {}}}", Text(text), Maybe(*culprit)));
    let DeviceStats { whole, staged, in_place, through_areas, one_shot, copied } = recording.counters.device();
    let _ = write!(
        json,
        "{{\"id\": \"{:016x}\", \"rank\": {}, \"ranks\": {:?}, \"begun\": {}, \"failure\": {failure},\n\
         \"devices\": {{\"whole\": {whole}, \"staged\": {staged}, \"in_place\": {in_place}, \"through_areas\": {through_areas}, \
         \"one_shot\": {one_shot}, \"copied\": {copied}}},\n\"operations\": [{operations}]}}",
        recording.comm_id,
        recording.rank,
        &*recording.members,
        recording.history.begun(),
    );
    json
}

/// One operation, in one line.
struct Line<'a>(&'a Operation);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Operation { descriptor, path, bytes, start, end, failed } = self.0;
        let outcome = match (end, failed) {
            (None, _) => "under way",
            (Some(_), false) => "ok",
            (Some(_), true) => "failed",
        };
        let root_key = if matches!(descriptor.op, Op::Send | Op::Recv) { "peer" } else { "root" };
        write!(
            f,
            "{{\"seq\": {}, \"op\": {}, \"dtype\": {}",
            descriptor.seq,
            Text(descriptor.op.name()),
            Text(descriptor.dtype.name())
        )?;
        write!(f, ", \"count\": {}, \"redop\": {}", descriptor.count, Maybe(descriptor.redop.map(|redop| Text(redop.name()))))?;
        write!(f, ", \"{root_key}\": {}, \"counts\": {}", Maybe(descriptor.root), descriptor.shape)?;
        let algorithm = choice(*path).map(|choice| choice.to_string());
        write!(f, ", \"bytes\": {bytes}, \"algorithm\": {}", Maybe(algorithm.as_deref().map(Text)))?;
        let end = end.map(|end| end.as_nanos());
        write!(f, ", \"start_ns\": {}, \"end_ns\": {}, \"outcome\": {}}}", start.as_nanos(), Maybe(end), Text(outcome))
    }
}

/// The items between brackets, one on each line.
#[derive(Default)]
struct List(String);

impl List {
    fn push(&mut self, item: impl fmt::Display) {
        let separator = if self.0.is_empty() { "\n" } else { ",\n" };
        let _ = write!(self.0, "{separator}{item}");
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A string of JSON.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(f, "\\{letter}")?,
                '\0'..' ' => write!(f, "\\u{:04x}", u32::from(letter))?,
                _ => f.write_char(letter)?,
            }
        }
        f.write_char('"')
    }
}

/// A value, or null.
struct Maybe<T>(Option<T>);

impl<T: fmt::Display> fmt::Display for Maybe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("null"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(Text("a \"b\" \\ \n\u{1} é").to_string(), r#""a \"b\" \\ \u000a\u0001 é""#);
    }
}
