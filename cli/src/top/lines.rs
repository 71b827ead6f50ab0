//! The view as lines of text. A piece of a line may stand out.

use std::collections::BTreeMap;

use super::view::{Comm, Doing, Link, Rank, View, WaitedFor};
use crate::units::{count, show_bytes, show_ranks, show_seconds};

/// How a piece of a line stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    /// A heading.
    Heading,
    /// Less important than the rest.
    Faint,
    /// All is well.
    Good,
    /// A rank waits.
    Waits,
    /// A rank keeps others waiting, or has failed.
    Bad,
}

/// A line, in pieces.
pub(super) type Line = Vec<(Style, String)>;

/// The most links that are shown: those that have become slow, and the busiest ones.
const MOST_LINKS: usize = 16;

/// Returns the lines as text alone.
pub(super) fn plain(view: &View, width: usize) -> Vec<String> {
    let text = |line: Line| line.into_iter().map(|(_, text)| text).collect::<String>();
    lines(view, width).into_iter().map(|line| text(line).trim_end().to_owned()).collect()
}

/// Returns what is shown. In a narrow terminal, the table of the ranks has fewer columns.
pub(super) fn lines(view: &View, width: usize) -> Vec<Line> {
    let widths = widths(width);
    let mut hosts: BTreeMap<&str, Vec<&Rank>> = BTreeMap::new();
    view.ranks.iter().for_each(|rank| hosts.entry(&rank.host).or_default().push(rank));
    let size = format!("{} on {}", count(view.world_size, "rank"), count(hosts.len(), "host"));
    let mut lines = vec![vec![
        (Style::Heading, format!("job {}", view.job)),
        (Style::Plain, format!("   {size}")),
        (Style::Faint, format!("   run {}", view.run)),
    ]];
    lines.push(Vec::new());
    waited_for_lines(view, &mut lines);
    let titles = ["rank", "pid", "state", "operation", "since", "op/s", "byte/s", "waits for"];
    lines.push(Vec::new());
    lines.push(vec![(Style::Faint, columns(&titles, &widths))]);
    let mut groups: Vec<_> = hosts.into_values().collect();
    groups.sort_by_key(|ranks| ranks[0].rank);
    for ranks in groups {
        host(view, &ranks, &widths, &mut lines);
    }
    links(view, width, &mut lines);
    failures(view, &mut lines);
    lines
}

/// Says which ranks keep others waiting.
fn waited_for_lines(view: &View, lines: &mut Vec<Line>) {
    for waited in &view.waited_for {
        let WaitedFor { rank, host, pid, by, op, seq, for_s, why, .. } = waited;
        lines.push(vec![
            (Style::Bad, format!("rank {rank} is waited for")),
            (Style::Plain, format!(" ({host}, pid {pid}) by {} for {for_s:.1} s, in {op} #{seq}", show_ranks(by))),
        ]);
        lines.push(vec![(Style::Bad, format!("  {why}"))]);
    }
    if view.waited_for.is_empty() {
        let text = match () {
            () if view.has_ended() => (Style::Plain, "the job has ended"),
            () if view.ranks.iter().any(|rank| rank.state == Doing::Waiting) => {
                (Style::Waits, "ranks wait for each other in a circle: see below")
            }
            () => (Style::Good, "no rank is waited for"),
        };
        lines.push(vec![(text.0, text.1.to_owned())]);
    }
}

/// The widths of the columns of ranks, with the blanks before them. The last one needs at least as much.
const RANKS: [usize; 8] = [6, 9, 11, 36, 9, 10, 12, 14];
const STATE: usize = 2;
const OPERATION: usize = 3;
const WAITS_FOR: usize = 7;

/// The least width of the operation, and the columns that a narrow terminal lacks, the first one first:
/// bytes, the process, operations.
const SHORT_OPERATION: usize = 20;
const OPTIONAL: [usize; 3] = [6, 1, 5];

/// Returns the widths of the columns in a terminal; `None` for those that it lacks.
fn widths(terminal: usize) -> [Option<usize>; RANKS.len()] {
    let mut widths = RANKS.map(Some);
    widths[OPERATION] = Some(SHORT_OPERATION);
    let needed = |widths: &[Option<usize>; RANKS.len()]| widths.iter().flatten().sum::<usize>();
    for at in OPTIONAL {
        if needed(&widths) > terminal {
            widths[at] = None;
        }
    }
    let free = terminal.saturating_sub(needed(&widths));
    widths[OPERATION] = Some(RANKS[OPERATION].min(SHORT_OPERATION.saturating_add(free)));
    widths
}

fn columns(cells: &[&str; RANKS.len()], widths: &[Option<usize>; RANKS.len()]) -> String {
    let mut line = String::new();
    for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
        let Some(width) = width else { continue };
        // The numbers are on the right, and texts on the left.
        line += &match at {
            STATE | OPERATION => format!("  {:<width$}", shortened(cell, width - 2), width = width - 2),
            WAITS_FOR => format!("  {cell}"),
            _ => format!("{cell:>width$}"),
        };
    }
    line
}

fn shortened(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        Some(_) => text.chars().take(width - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

fn host(view: &View, ranks: &[&Rank], widths: &[Option<usize>; RANKS.len()], lines: &mut Vec<Line>) {
    lines.push(vec![(Style::Heading, ranks[0].host.clone())]);
    for rank in ranks {
        let is_waited_for = view.waited_for.iter().any(|waited| waited.rank == rank.rank);
        let style = match rank.state {
            Doing::Stopped | Doing::NoAnswer | Doing::Refused => Style::Bad,
            _ if is_waited_for => Style::Bad,
            Doing::Waiting => Style::Waits,
            Doing::Gone | Doing::Unknown => Style::Faint,
            Doing::Running | Doing::Idle => Style::Plain,
        };
        let (operation, since) = operation_of(rank);
        let sum = |rate: fn(&Comm) -> Option<f64>| {
            let rates: Option<Vec<f64>> = rank.communicators.iter().map(rate).collect();
            rates.filter(|rates| !rates.is_empty()).map(|rates| rates.iter().sum::<f64>())
        };
        let is_silent = rank.silence.is_some();
        let shown = |text: Option<String>| text.filter(|_| !is_silent).unwrap_or_else(|| "-".to_owned());
        let cells = [
            &rank.rank.to_string(),
            &rank.pid.to_string(),
            state_of(rank.state),
            &operation,
            &since,
            &shown(sum(|comm| comm.operations_per_s).map(|rate| format!("{rate:.0}"))),
            &shown(sum(|comm| comm.bytes_per_s).map(|rate| show_bytes(rate as u64))),
            &if rank.waits_for.is_empty() { String::new() } else { show_ranks(&rank.waits_for) },
        ];
        lines.push(vec![(style, columns(&cells.map(|cell: &str| cell), widths))]);
    }
}

fn state_of(state: Doing) -> &'static str {
    match state {
        Doing::Running => "running",
        Doing::Waiting => "waiting",
        Doing::Idle => "idle",
        Doing::Stopped => "stopped",
        Doing::NoAnswer => "no answer",
        Doing::Gone => "gone",
        Doing::Refused => "refused",
        Doing::Unknown => "",
    }
}

/// Returns what a rank does, and since when.
fn operation_of(rank: &Rank) -> (String, String) {
    let since = |seconds: f64| if seconds < 0.1 { show_seconds(seconds) } else { format!("{seconds:.1} s") };
    if let Some(silent) = rank.silent_s {
        return ("(no answer)".to_owned(), since(silent));
    }
    let on = |comm: &Comm| match comm.comm.as_str() {
        "0" => String::new(),
        name => format!(" on {}", name.get(..6).unwrap_or(name)),
    };
    let running = rank.communicators.iter().flat_map(|comm| comm.running.iter().map(move |running| (comm, running)));
    if let Some((comm, running)) = running.max_by(|(_, one), (_, other)| one.age_s.total_cmp(&other.age_s)) {
        let size = if running.bytes > 0 { format!(" {} {}", running.dtype, show_bytes(running.bytes)) } else { String::new() };
        return (format!("{} #{}{size}{}", running.op, running.seq, on(comm)), since(running.age_s));
    }
    let last = rank.communicators.iter().filter_map(|comm| Some((comm, comm.idle_s?)));
    match last.min_by(|(_, one), (_, other)| one.total_cmp(other)) {
        Some((comm, idle)) => (format!("(after #{}{})", comm.begun, on(comm)), since(idle)),
        None => (String::new(), String::new()),
    }
}

/// The widths of the columns of links. A narrow terminal lacks the last ones.
const LINKS: [usize; 7] = [6, 6, 7, 12, 12, 12, 13];

fn links(view: &View, width: usize, lines: &mut Vec<Line>) {
    let of_rank = |rank: &Rank| -> Vec<(usize, usize)> { (0..rank.links.len()).map(|at| (rank.rank, at)).collect() };
    let mut order: Vec<(usize, usize)> = view.ranks.iter().flat_map(of_rank).collect();
    if order.is_empty() {
        let silent = view.ranks.iter().all(|rank| rank.communicators.is_empty());
        if !silent {
            lines.push(Vec::new());
            lines.push(vec![(Style::Faint, "no links: all data goes through shared memory".to_owned())]);
        }
        return;
    }
    let link = |&(rank, at): &(usize, usize)| -> &Link { &view.ranks[rank].links[at] };
    let total = order.len();
    order.sort_by(|one, other| {
        let urgency = |at| (link(at).slow.is_some(), link(at).sent_per_s.unwrap_or_default());
        urgency(other).partial_cmp(&urgency(one)).expect("rates are numbers")
    });
    order.truncate(MOST_LINKS);
    order.sort_unstable();
    lines.push(Vec::new());
    lines.push(vec![(Style::Heading, "links".to_owned())]);
    let titles = ["from", "to", "kind", "sent/s", "received/s", "round trip", "retransmits"];
    lines.push(vec![(Style::Faint, link_columns(&titles, width))]);
    for at in &order {
        let Link { peer, kind, sent_per_s, received_per_s, retransmits, round_trip_s, slow, .. } = link(at);
        let rate = |rate: &Option<f64>| rate.map_or("-".to_owned(), |rate| show_bytes(rate as u64));
        let cells = [
            &*at.0.to_string(),
            &*peer.to_string(),
            &**kind,
            &*rate(sent_per_s),
            &*rate(received_per_s),
            &*round_trip_s.map_or("-".to_owned(), show_seconds),
            &*retransmits.map_or("-".to_owned(), |count| count.to_string()),
        ];
        let style = if slow.is_some() { Style::Bad } else { Style::Plain };
        lines.push(vec![(style, link_columns(&cells, width))]);
    }
    for at in &order {
        let Link { peer, slow: Some(slow), .. } = link(at) else { continue };
        let (now, before) = (show_bytes(slow.bytes_per_s), show_bytes(slow.before_bytes_per_s));
        let text = format!("  {} to {peer} carries {now}/s, before {before}/s: check cable and switch port", at.0);
        lines.push(vec![(Style::Bad, text)]);
    }
    if total > order.len() {
        lines.push(vec![(Style::Faint, format!("  and {} that sent less", count(total - order.len(), "link")))]);
    }
}

fn link_columns(cells: &[&str; LINKS.len()], most: usize) -> String {
    let mut line = String::new();
    for (cell, width) in cells.iter().zip(LINKS) {
        if line.chars().count() + width <= most {
            line += &format!("{cell:>width$}");
        }
    }
    line
}

fn failures(view: &View, lines: &mut Vec<Line>) {
    if view.failures.is_empty() {
        return;
    }
    lines.push(Vec::new());
    lines.push(vec![(Style::Heading, "failures".to_owned())]);
    // Ranks that report the same share a line.
    let mut by_message: Vec<(&str, Vec<usize>)> = Vec::new();
    for failure in &view.failures {
        match by_message.iter_mut().find(|(message, _)| *message == failure.message) {
            Some((_, ranks)) => ranks.push(failure.rank),
            None => by_message.push((&failure.message, vec![failure.rank])),
        }
    }
    for (message, ranks) in by_message {
        lines.push(vec![(Style::Plain, format!("  {}: ", show_ranks(&ranks))), (Style::Bad, message.to_owned())]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use kolo::observer::{Communicator, Failure, Silence};

    use super::super::sample::{all_reduce, comm, link, snapshot, state, totals};
    use super::*;

    #[test]
    fn a_stopped_rank_stands_out() {
        let mut state = state(4);
        let now = Instant::now();
        let age = Duration::from_secs(3);
        for rank in 0..4 {
            let running = vec![all_reduce(7, age)];
            let links = vec![link((rank + 1) % 4, "tcp", 1 << 20, 2)];
            state.hear(
                rank,
                now,
                Ok(snapshot(rank, vec![Communicator { totals: totals(7), links, ..comm(rank, 4, 7, running) }])),
            );
        }
        state.hear(2, now, Err(Silence::Stopped));
        let view = View::new(&state, now + Duration::from_secs(1));
        let bad: Vec<String> =
            lines(&view, 120).into_iter().flatten().filter(|(style, _)| *style == Style::Bad).map(|(_, text)| text).collect();
        assert_eq!(bad[0], "rank 2 is waited for");
        assert_eq!(bad[1].trim(), "its process is stopped");
        assert!(bad[2].contains("4102") && bad[2].contains("stopped") && bad[2].contains("1.0 s"), "{bad:?}");
        let text = plain(&view, usize::MAX).join("\n");
        assert!(text.contains("by ranks 0, 1, 3 for 3.0 s, in all_reduce #7"), "{text}");
        assert!(text.contains("all_reduce #7 float32 25 MiB") || text.contains("all_reduce #7 f32 25 MiB"), "{text}");
        let row = text.lines().find(|line| line.contains("tcp")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["0", "1", "tcp", "-", "-", "180.0", "us", "2"]);
    }

    #[test]
    fn links_that_have_become_slow_are_shown_among_many() {
        let mut state = state(2);
        let now = Instant::now();
        for (rank, slow) in [(0, None), (1, Some((2 << 20, 100 << 20)))] {
            // At one moment after the other, so that there are rates.
            for second in [1, 2] {
                let mut links: Vec<_> = (0..MOST_LINKS).map(|at| link(0, "tcp", (second * (2 + at as u64)) << 20, 0)).collect();
                links[0].sent = second;
                links[0].slow = slow;
                let seen = snapshot(rank, vec![Communicator { links, ..comm(rank, 2, 7, vec![]) }]);
                state.hear(rank, now + Duration::from_secs(second), Ok(seen));
            }
        }
        let view = View::new(&state, now + Duration::from_secs(2));
        let shown = lines(&view, 80);
        let bad: Vec<&String> = shown.iter().flatten().filter(|(style, _)| *style == Style::Bad).map(|(_, text)| text).collect();
        assert_eq!(bad.len(), 2, "{bad:?}");
        assert_eq!(bad[1], "  1 to 0 carries 2 MiB/s, before 100 MiB/s: check cable and switch port");
    }

    #[test]
    fn a_narrow_terminal_shows_whole_columns_and_who_is_waited_for() {
        let mut state = state(2);
        let now = Instant::now();
        for (rank, seq) in [(0, 7), (1, 6)] {
            let running = if rank == 0 { vec![all_reduce(7, Duration::from_secs(3))] } else { Vec::new() };
            state.hear(rank, now, Ok(snapshot(rank, vec![Communicator { totals: totals(seq), ..comm(rank, 2, seq, running) }])));
        }
        let view = View::new(&state, now + Duration::from_secs(1));
        for (terminal, lacks) in
            [(200, vec![]), (91, vec![]), (80, vec!["byte/s"]), (78, vec!["byte/s", "pid"]), (60, vec!["byte/s", "pid", "op/s"])]
        {
            let lines: Vec<String> = lines(&view, terminal)
                .into_iter()
                .map(|line| line.into_iter().map(|(_, text)| text).collect::<String>())
                .collect();
            let title = lines.iter().find(|line| line.contains("since")).unwrap();
            for name in ["rank", "pid", "state", "operation", "since", "op/s", "byte/s", "waits for"] {
                assert_eq!(title.contains(name), !lacks.contains(&name), "{name} at {terminal}: {title}");
            }
            let row = lines.iter().find(|line| line.contains("all_reduce #7") && line.trim_end().ends_with("rank 1")).unwrap();
            assert!(row.chars().count() <= terminal, "{row}");
        }
    }

    #[test]
    fn ranks_with_one_failure_share_its_line() {
        let mut state = state(3);
        for rank in [0, 2] {
            let failure = Some(Failure { message: "rank 1 (node0, pid 4101) died".to_owned(), rank: Some(1) });
            state.hear(rank, Instant::now(), Ok(snapshot(rank, vec![Communicator { failure, ..comm(rank, 3, 7, vec![]) }])));
        }
        let text = plain(&View::new(&state, Instant::now()), usize::MAX).join("\n");
        assert!(text.contains("ranks 0, 2: rank 1 (node0, pid 4101) died"), "{text}");
    }
}
