//! The picture of the terminal in the documentation: what [`super::screen`] draws, as SVG.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use kolo::observer::{Communicator, Silence};

use super::lines::{Line, Style};
use super::sample::{all_reduce, comm, link, snapshot, state, totals};
use super::screen::{Scroll, rows};
use super::state::State;
use super::view::View;

/// The size of the terminal, and of a letter.
const SIZE: (u16, u16) = (112, 32);
const LETTER: (f64, f64) = (8.4, 18.0);

/// Eight ranks on four hosts, of which one was stopped in a training step.
fn job() -> State {
    const RANKS: usize = 8;
    const STOPPED: usize = 5;
    let (mut state, now) = (state(RANKS), Instant::now());
    for (round, begun) in [(0, 1841), (1, 1852)] {
        for rank in 0..RANKS {
            let bytes = begun * (40_000_000 + 1_000_000 * rank as u64);
            let links = vec![link((rank + 2) % RANKS, "tcp", bytes, 3 * (rank as u64 % 3))];
            let has_called = round == 1 && rank != STOPPED;
            let age = Duration::from_millis(1640 - 3 * rank as u64);
            let running = if has_called { vec![all_reduce(begun, age)] } else { Vec::new() };
            let of = comm(rank, RANKS, begun - u64::from(!has_called), running);
            let answer = snapshot(rank, vec![Communicator { totals: totals(begun), links, ..of }]);
            state.hear(rank, now + Duration::from_millis(500 * round), Ok(answer));
        }
    }
    state.hear(STOPPED, now + Duration::from_millis(600), Err(Silence::Stopped));
    state
}

fn drawn() -> Vec<Line> {
    let state = job();
    let heard = state.ranks[5].last.as_ref().expect("every rank has answered").0;
    let view = View::new(&state, heard + Duration::from_millis(1520));
    rows(&view, SIZE, &mut Scroll::default())
}

/// Returns the colour of a piece as SVG has it, and its weight.
fn looks(style: Style) -> (&'static str, &'static str) {
    const BOLD: &str = " font-weight=\"bold\"";
    match style {
        Style::Plain => ("#e6edf3", ""),
        Style::Heading => ("#e6edf3", BOLD),
        Style::Faint => ("#8b949e", ""),
        Style::Good => ("#7ee787", ""),
        Style::Waits => ("#e3b341", ""),
        Style::Bad => ("#ff7b72", BOLD),
    }
}

fn svg(rows: &[Line]) -> String {
    let (width, height) = (f64::from(SIZE.0) * LETTER.0 + 24.0, f64::from(SIZE.1) * LETTER.1 + 24.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n\
         <title>kolo top shows a job of eight ranks, of which rank 5 is stopped</title>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"14\" xml:space=\"preserve\">\n"
    );
    for (y, row) in rows.iter().enumerate() {
        let mut x = 0;
        for (style, text) in row {
            let lead = text.len() - text.trim_start().len();
            let from = x + lead;
            x += text.chars().count();
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            let (colour, weight) = looks(*style);
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" textLength=\"{:.1}\" fill=\"{colour}\"{weight}>{}</text>",
                12.0 + from as f64 * LETTER.0,
                12.0 + (y as f64 + 0.8) * LETTER.1,
                text.chars().count() as f64 * LETTER.0,
                text.replace('&', "&amp;").replace('<', "&lt;"),
            );
        }
    }
    svg + "</g>\n</svg>\n"
}

/// The picture in the documentation is what the program draws. `KOLO_WRITE_PICTURE=1` writes it.
#[test]
fn the_picture_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/top.svg");
    let svg = svg(&drawn());
    if std::env::var_os("KOLO_WRITE_PICTURE").is_some() {
        std::fs::write(&file, &svg).unwrap();
    }
    let there = std::fs::read_to_string(&file).unwrap();
    assert!(there == svg, "docs/top.svg is not what kolo top draws; write it with KOLO_WRITE_PICTURE=1");
}
