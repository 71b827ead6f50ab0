//! Shows the view in a terminal, again and again, until a key or a signal ends it.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style as Looks, Stylize};
use ratatui::text::{Line as Row, Span, Text};
use ratatui::widgets::Paragraph;

use super::lines::{Style, lines};
use super::poll::Poll;
use super::view::View;
use crate::run::process;

/// How often the screen looks whether a signal has come.
const BLINK: Duration = Duration::from_millis(100);

/// Takes the terminal, and gives it back when it is dropped. A panic gives it back before its message is
/// printed.
struct Terminal(ratatui::DefaultTerminal);

impl Terminal {
    fn take() -> Result<Terminal, String> {
        ratatui::try_init().map(Terminal).map_err(|error| format!("the terminal cannot be used: {error}; give --once or --json"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

pub(super) fn show(poll: &Poll, interval: Duration) -> Result<(), String> {
    let (signals, signal) = unbounded();
    process::watch_signals(&signals).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let mut terminal = Terminal::take()?;
    let mut scroll = Scroll::default();
    let last = loop {
        let view = View::new(&poll.state(), Instant::now());
        let drawn = terminal.0.draw(|frame| draw(frame, &view, &mut scroll));
        drawn.map_err(|error| format!("the terminal cannot be written: {error}"))?;
        if view.has_ended() {
            break Some(view);
        }
        let next = Instant::now() + interval;
        if wait_for_key(next, &signal, &mut scroll)? {
            break None;
        }
    };
    drop(terminal);
    if let Some(view) = last {
        crate::say(&format!("the job {} has ended", view.job));
    }
    Ok(())
}

/// Waits until it is time to draw again. Returns whether the program is to end.
fn wait_for_key(next: Instant, signal: &Receiver<process::Event>, scroll: &mut Scroll) -> Result<bool, String> {
    let unread = |error: std::io::Error| format!("the terminal cannot be read: {error}");
    loop {
        if signal.try_iter().any(|event| matches!(event, process::Event::Signalled(signal) if signal.ends())) {
            return Ok(true);
        }
        let left = next.saturating_duration_since(Instant::now());
        if !event::poll(left.min(BLINK)).map_err(unread)? {
            if left.is_zero() {
                return Ok(false);
            }
            continue;
        }
        match event::read().map_err(unread)? {
            Event::Key(key) if key.kind != KeyEventKind::Release => match key {
                KeyEvent { code: KeyCode::Char('q') | KeyCode::Esc, .. } => return Ok(true),
                KeyEvent { code: KeyCode::Char('c' | 'd'), modifiers: KeyModifiers::CONTROL, .. } => return Ok(true),
                KeyEvent { code, .. } => match moved(*scroll, code) {
                    Some(to) => {
                        *scroll = to;
                        return Ok(false);
                    }
                    None => continue,
                },
            },
            Event::Resize(..) => return Ok(false),
            _ => {}
        }
    }
}

/// The first line and the first column that are shown.
#[derive(Clone, Copy, Default)]
pub(super) struct Scroll {
    line: u16,
    column: u16,
}

/// Returns what is shown after a key.
fn moved(from: Scroll, key: KeyCode) -> Option<Scroll> {
    const PAGE: u16 = 10;
    let Scroll { line, column } = from;
    let down = |line: u16| Some(Scroll { line, column });
    let right = |column: u16| Some(Scroll { line, column });
    match key {
        KeyCode::Up => down(line.saturating_sub(1)),
        KeyCode::Down => down(line.saturating_add(1)),
        KeyCode::PageUp => down(line.saturating_sub(PAGE)),
        KeyCode::PageDown => down(line.saturating_add(PAGE)),
        KeyCode::Home => Some(Scroll::default()),
        KeyCode::End => down(u16::MAX),
        KeyCode::Left => right(column.saturating_sub(PAGE)),
        KeyCode::Right => right(column.saturating_add(PAGE)),
        _ => None,
    }
}

/// Draws a part of the view. `scroll` is corrected if there are fewer lines or columns.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, scroll: &mut Scroll) {
    let [body, foot] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(frame.area());
    let span = |(style, text): (Style, String)| Span::styled(text, looks(style));
    let rows: Vec<Row<'_>> =
        lines(view, body.width.into()).into_iter().map(|line| line.into_iter().map(span).collect()).collect();
    let beyond = |all: usize, shown: u16| u16::try_from(all).unwrap_or(u16::MAX).saturating_sub(shown);
    let most = beyond(rows.len(), body.height);
    scroll.line = scroll.line.min(most);
    scroll.column = scroll.column.min(beyond(rows.iter().map(Row::width).max().unwrap_or(0), body.width));
    frame.render_widget(Paragraph::new(Text::from(rows)).scroll((scroll.line, scroll.column)), body);
    let more = if most > 0 {
        format!("   lines {} to {} of {}", scroll.line + 1, scroll.line + body.height, most + body.height)
    } else {
        String::new()
    };
    frame.render_widget(Paragraph::new(format!("q: leave   arrows: scroll{more}").dim()), foot);
}

fn looks(style: Style) -> Looks {
    let plain = Looks::new();
    match style {
        Style::Plain => plain,
        Style::Heading => plain.add_modifier(Modifier::BOLD),
        Style::Faint => plain.add_modifier(Modifier::DIM),
        Style::Good => plain.fg(Color::Green),
        Style::Waits => plain.fg(Color::Yellow),
        Style::Bad => plain.fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}
