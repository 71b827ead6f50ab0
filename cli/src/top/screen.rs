//! Shows the view in a terminal, again and again, until a key or a signal ends it.

use std::io::{self, Stdout};
use std::ops::Range;
use std::panic;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::style::{Attribute, Color, ContentStyle, PrintStyledContent, StyledContent};
use crossterm::{cursor, execute, queue, terminal};

use super::lines::{Line, Style, lines};
use super::poll::Poll;
use super::view::View;
use crate::run::process;

/// How often the screen looks whether a signal has come.
const BLINK: Duration = Duration::from_millis(100);

/// Takes the terminal, and gives it back when it is dropped. A panic gives it back before its message is
/// printed.
struct Terminal(Stdout);

impl Terminal {
    fn take() -> Result<Terminal, String> {
        let failed = |error: io::Error| format!("the terminal cannot be used: {error}; give --once or --json");
        terminal::enable_raw_mode().map_err(failed)?;
        // From here on, an error also gives it back.
        let mut taken = Terminal(io::stdout());
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            give_back();
            report(info);
        }));
        execute!(taken.0, terminal::EnterAlternateScreen, terminal::DisableLineWrap, cursor::Hide).map_err(failed)?;
        Ok(taken)
    }

    /// Draws the view in the whole terminal.
    fn draw(&mut self, view: &View, scroll: &mut Scroll) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let rows = rows(view, (width, height), scroll);
        queue!(self.0, terminal::BeginSynchronizedUpdate)?;
        for (y, row) in (0..height).zip(rows) {
            // Before the text: after a full row, the cursor is on its last letter.
            queue!(self.0, cursor::MoveTo(0, y), terminal::Clear(terminal::ClearType::UntilNewLine))?;
            for (style, text) in row {
                queue!(self.0, PrintStyledContent(StyledContent::new(looks(style), text)))?;
            }
        }
        execute!(self.0, terminal::EndSynchronizedUpdate)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

/// Gives the terminal back. What fails here leaves it as it is: there is nothing else to do.
fn give_back() {
    _ = execute!(io::stdout(), cursor::Show, terminal::EnableLineWrap, terminal::LeaveAlternateScreen);
    _ = terminal::disable_raw_mode();
}

pub(super) fn show(poll: &Poll, interval: Duration) -> Result<(), String> {
    let (signals, signal) = unbounded();
    process::watch_signals(&signals).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let mut terminal = Terminal::take()?;
    let mut scroll = Scroll::default();
    let last = loop {
        let view = View::new(&poll.state(), Instant::now());
        terminal.draw(&view, &mut scroll).map_err(|error| format!("the terminal cannot be written: {error}"))?;
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

/// Returns the part of the view that a terminal of this width and height shows, with a line of help at
/// its foot. `scroll` is corrected if there are fewer lines or columns.
pub(super) fn rows(view: &View, (width, height): (u16, u16), scroll: &mut Scroll) -> Vec<Line> {
    let all = lines(view, width.into());
    let body = height.saturating_sub(1);
    let beyond = |all: usize, shown: u16| u16::try_from(all).unwrap_or(u16::MAX).saturating_sub(shown);
    let length = |line: &Line| line.iter().map(|(_, text)| text.chars().count()).sum::<usize>();
    let most = beyond(all.len(), body);
    scroll.line = scroll.line.min(most);
    scroll.column = scroll.column.min(beyond(all.iter().map(length).max().unwrap_or(0), width));
    let columns = scroll.column.into()..usize::from(scroll.column) + usize::from(width);
    let shown = all.into_iter().skip(scroll.line.into()).take(body.into());
    let mut rows: Vec<Line> = shown.map(|line| part(line, columns.clone())).collect();
    rows.resize(body.into(), Line::new());
    let more = if most > 0 {
        format!("   lines {} to {} of {}", scroll.line + 1, scroll.line + body, most + body)
    } else {
        String::new()
    };
    rows.push(part(vec![(Style::Faint, format!("q: leave   arrows: scroll{more}"))], 0..width.into()));
    rows
}

/// Returns these columns of a line. Control characters, which could change the terminal, are left out.
fn part(line: Line, columns: Range<usize>) -> Line {
    let mut at = 0;
    let cut = |(style, text): (Style, String)| {
        let shown = |_: &char| {
            at += 1;
            columns.contains(&(at - 1))
        };
        (style, text.chars().filter(|letter| !letter.is_control()).filter(shown).collect::<String>())
    };
    line.into_iter().map(cut).filter(|(_, text)| !text.is_empty()).collect()
}

fn looks(style: Style) -> ContentStyle {
    let mut looks = ContentStyle::new();
    looks.foreground_color = match style {
        Style::Good => Some(Color::DarkGreen),
        Style::Waits => Some(Color::DarkYellow),
        Style::Bad => Some(Color::DarkRed),
        Style::Plain | Style::Heading | Style::Faint => None,
    };
    match style {
        Style::Heading | Style::Bad => looks.attributes.set(Attribute::Bold),
        Style::Faint => looks.attributes.set(Attribute::Dim),
        Style::Plain | Style::Good | Style::Waits => {}
    }
    looks
}
