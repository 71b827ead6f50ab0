//! Tables and lines that fit the terminal.

use std::io::{IsTerminal, Write};

use crate::say;

/// The columns of a line where there is no terminal.
const USUAL: usize = 80;

/// Returns how many columns a line may have.
pub(crate) fn width() -> usize {
    if std::io::stdout().is_terminal() { columns_of_terminal() } else { USUAL }
}

/// Returns the columns of the terminal of this process.
pub(crate) fn columns_of_terminal() -> usize {
    fitting(crossterm::terminal::size().map_or(0, |(columns, _)| columns))
}

/// A terminal without a size, such as the one that Open MPI gives to ranks, has no columns.
fn fitting(columns: u16) -> usize {
    if columns == 0 { USUAL } else { usize::from(columns).max(USUAL / 2) }
}

/// Where the cells of a column begin or end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
    /// As `Right`, in the wide table only.
    Wide,
    /// As `Right`, where the terminal has room for it.
    Spare,
}

/// A table whose columns are as wide as their cells.
pub(crate) struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, Side)]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row, which has a cell for each column.
    pub(crate) fn add(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Writes the table, in the columns of the terminal unless it is wide.
    pub(crate) fn say(&self, is_wide: bool) {
        self.lines(is_wide, if is_wide { usize::MAX } else { width() }).iter().for_each(|line| say(line));
    }

    /// Returns the lines. The last column goes on below itself if it is too wide.
    fn lines(&self, is_wide: bool, most: usize) -> Vec<String> {
        let mut shown: Vec<usize> = (0..self.columns.len()).filter(|at| is_wide || self.columns[*at].1 != Side::Wide).collect();
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
        let rows: Vec<&Vec<String>> = [&titles].into_iter().chain(&self.rows).collect();
        let width = |at: usize| rows.iter().map(|row| columns(&row[at])).max().unwrap_or(0);
        let longest_word = |at: usize| rows.iter().flat_map(|row| row[at].split_whitespace()).map(columns).max().unwrap_or(0);
        let needed = |shown: &[usize]| match shown.split_last() {
            Some((&last, before)) => before.iter().map(|at| width(*at) + 2).sum::<usize>() + longest_word(last),
            None => 0,
        };
        while needed(&shown) > most {
            let Some(spare) = shown.iter().rposition(|at| self.columns[*at].1 == Side::Spare) else { break };
            shown.remove(spare);
        }
        let Some((&last, before)) = shown.split_last() else { return Vec::new() };
        let widths: Vec<usize> = before.iter().map(|at| width(*at)).collect();
        let indent = widths.iter().map(|width| width + 2).sum();
        let row = |row: &&Vec<String>| {
            let cells = before.iter().zip(&widths).map(|(at, width)| match self.columns[*at].1 {
                Side::Left => format!("{:<width$}  ", row[*at]),
                Side::Right | Side::Wide | Side::Spare => format!("{:>width$}  ", row[*at]),
            });
            let start: String = cells.collect();
            let cell = match self.columns[last].1 {
                Side::Left => row[last].clone(),
                Side::Right | Side::Wide | Side::Spare => format!("{:>width$}", row[last], width = width(last)),
            };
            wrap(&start, &cell, indent, most)
        };
        rows.iter().flat_map(row).collect()
    }
}

/// Returns how many columns a text takes, without the sequences that colour it.
fn columns(text: &str) -> usize {
    let mut is_sequence = false;
    let is_shown = |letter: &char| {
        let was_sequence = is_sequence;
        is_sequence = if is_sequence { *letter != 'm' } else { *letter == '\x1b' };
        !was_sequence && !is_sequence
    };
    text.chars().filter(is_shown).count()
}

/// Breaks a text between words into lines of at most `most` columns. The first begins with `start`, and
/// the others with `indent` blanks. A longer word has a line of its own.
fn wrap(start: &str, text: &str, indent: usize, most: usize) -> Vec<String> {
    if columns(start) + columns(text) <= most {
        return vec![format!("{start}{text}").trim_end().to_owned()];
    }
    let (mut lines, mut line, mut is_empty) = (Vec::new(), start.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_empty && columns(&line) + 1 + columns(word) > most {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            is_empty = true;
        }
        line += if is_empty { "" } else { " " };
        line += word;
        is_empty = false;
    }
    lines.push(line.trim_end().to_owned());
    lines
}

/// Writes a text after a start. On a terminal it breaks between words, and goes on below its beginning.
pub(crate) fn say_wrapped(start: &str, text: &str) {
    wrap(start, text, columns(start), of_prose()).iter().for_each(|line| say(line));
}

/// Returns how many columns a line of prose may have. Programs that read it have one line for each record.
fn of_prose() -> usize {
    if std::io::stdout().is_terminal() { width() } else { usize::MAX }
}

/// Writes a line of prose. On a terminal it breaks between words, and goes on a little further in.
pub(crate) fn say_prose(line: &str) {
    hanging(line, of_prose()).iter().for_each(|line| say(line));
}

/// Breaks a line of prose into lines of at most `most` columns. They go on a little further in.
fn hanging(line: &str, most: usize) -> Vec<String> {
    let text = line.trim_start();
    let indent = line.len() - text.len();
    wrap(&line[..indent], text, indent + 4, most)
}

/// Writes lines to standard error, in one call, because other ranks may write there too. On a terminal
/// each breaks between words.
pub(crate) struct Complaints;

impl Write for Complaints {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut stderr = std::io::stderr();
        if stderr.is_terminal() {
            let text = String::from_utf8_lossy(bytes);
            let lines: Vec<String> = text.lines().flat_map(|line| hanging(line, columns_of_terminal())).collect();
            stderr.write_all((lines.join("\n") + "\n").as_bytes())?;
        } else {
            stderr.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes a remark on a table. On a terminal, each of its lines is a remark.
pub(crate) fn remark(text: &str) {
    let mut start = "# ";
    for line in wrap("", text, 0, of_prose().saturating_sub(4)) {
        say(&format!("{start}{line}"));
        start = "#   ";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_a_size_has_the_usual_columns() {
        assert_eq!([0, 10, 79, 200].map(fitting), [80, 40, 79, 200]);
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let mut table = Table::new(&[("name", Side::Left), ("time", Side::Right), ("sent", Side::Wide), ("why", Side::Left)]);
        table.add(["ring", "1.5 us", "8 B", "chosen"].map(str::to_owned).to_vec());
        table.add(["a-longer-name", "12 us", "16 B", "more latency, and more words"].map(str::to_owned).to_vec());
        let narrow = [
            "name             time  why",
            "ring           1.5 us  chosen",
            "a-longer-name   12 us  more latency,",
            "                       and more words",
        ];
        assert_eq!(table.lines(false, 37), narrow);
        let wide = [
            "name             time  sent  why",
            "ring           1.5 us   8 B  chosen",
            "a-longer-name   12 us  16 B  more latency, and more words",
        ];
        assert_eq!(table.lines(true, usize::MAX), wide);
    }

    #[test]
    fn a_narrow_terminal_lacks_spare_columns() {
        let mut table = Table::new(&[("name", Side::Left), ("a", Side::Spare), ("b", Side::Spare), ("why", Side::Left)]);
        table.add(["ring", "1.5 us", "8 B", "a longer reason"].map(str::to_owned).to_vec());
        assert_eq!(table.lines(false, 40)[1], "ring  1.5 us  8 B  a longer reason");
        assert_eq!(
            table.lines(false, 25)[1..],
            ["ring  1.5 us  8 B  a", "                   longer", "                   reason"]
        );
        assert_eq!(table.lines(false, 24)[1..], ["ring  1.5 us  a longer", "              reason"]);
        assert_eq!(table.lines(false, 19)[1..], ["ring  a longer", "      reason"]);
    }

    #[test]
    fn colours_take_no_columns() {
        let line = "\x1b[2m12:00\x1b[0m \x1b[33mWARN\x1b[0m a word";
        assert_eq!(hanging(line, 17), [line]);
        assert_eq!(hanging(line, 16), ["\x1b[2m12:00\x1b[0m \x1b[33mWARN\x1b[0m a", "    word"]);
    }

    #[test]
    fn a_long_word_has_a_line_of_its_own() {
        assert_eq!(wrap("a: ", "b cccccccccccc d", 3, 8), ["a: b", "   cccccccccccc", "   d"]);
        assert_eq!(wrap("a: ", "", 3, 8), ["a:"]);
    }
}
