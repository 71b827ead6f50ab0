//! The picture of the terminal in the documentation: what [`super::screen`] draws, as SVG.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use kolo::observer::{Communicator, Silence};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier};

use super::sample::{all_reduce, comm, link, snapshot, state, totals};
use super::screen::{Scroll, draw};
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

fn drawn() -> Buffer {
    let state = job();
    let heard = state.ranks[5].last.as_ref().expect("every rank has answered").0;
    let view = View::new(&state, heard + Duration::from_millis(1520));
    let mut terminal = Terminal::new(TestBackend::new(SIZE.0, SIZE.1)).unwrap();
    terminal.draw(|frame| draw(frame, &view, &mut Scroll::default())).unwrap();
    terminal.backend().buffer().clone()
}

/// Returns the colour of a cell as SVG has it.
fn colour(colour: Color, modifier: Modifier) -> &'static str {
    match (colour, modifier.contains(Modifier::DIM)) {
        (Color::Red, _) => "#ff7b72",
        (Color::Yellow, _) => "#e3b341",
        (Color::Green, _) => "#7ee787",
        (_, true) => "#8b949e",
        (_, false) => "#e6edf3",
    }
}

fn svg(buffer: &Buffer) -> String {
    let (width, height) = (f64::from(SIZE.0) * LETTER.0 + 24.0, f64::from(SIZE.1) * LETTER.1 + 24.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n\
         <title>kolo top shows a job of eight ranks, of which rank 5 is stopped</title>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"14\" xml:space=\"preserve\">\n"
    );
    for y in 0..SIZE.1 {
        let mut x = 0;
        while x < SIZE.0 {
            let cell = &buffer[(x, y)];
            let (from, looks) = (x, (cell.fg, cell.modifier));
            let mut text = String::new();
            while x < SIZE.0 && (buffer[(x, y)].fg, buffer[(x, y)].modifier) == looks {
                text += buffer[(x, y)].symbol();
                x += 1;
            }
            if text.trim().is_empty() {
                continue;
            }
            let lead = text.len() - text.trim_start().len();
            let text = text.trim().replace('&', "&amp;").replace('<', "&lt;");
            let weight = if looks.1.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" textLength=\"{:.1}\" fill=\"{}\"{weight}>{text}</text>",
                12.0 + (f64::from(from) + lead as f64) * LETTER.0,
                12.0 + (f64::from(y) + 0.8) * LETTER.1,
                text.replace("&amp;", "&").replace("&lt;", "<").chars().count() as f64 * LETTER.0,
                colour(looks.0, looks.1),
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
