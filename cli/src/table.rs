//! Tables and lines that fit the terminal.

use std::io::IsTerminal;

use crate::say;

/// The columns of a line where there is no terminal.
const USUAL: usize = 80;

/// Returns how many columns a line may have.
pub(crate) fn width() -> usize {
    let terminal = std::io::stdout().is_terminal().then(crossterm::terminal::size);
    fitting(terminal.and_then(Result::ok).map_or(0, |(columns, _)| columns))
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
        let shown: Vec<usize> = (0..self.columns.len()).filter(|at| is_wide || self.columns[*at].1 != Side::Wide).collect();
        let Some((&last, before)) = shown.split_last() else { return Vec::new() };
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
        let rows: Vec<&Vec<String>> = [&titles].into_iter().chain(&self.rows).collect();
        let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = before.iter().map(|at| width(*at)).collect();
        let indent = widths.iter().map(|width| width + 2).sum();
        let row = |row: &&Vec<String>| {
            let cells = before.iter().zip(&widths).map(|(at, width)| match self.columns[*at].1 {
                Side::Left => format!("{:<width$}  ", row[*at]),
                Side::Right | Side::Wide => format!("{:>width$}  ", row[*at]),
            });
            let start: String = cells.collect();
            let cell = match self.columns[last].1 {
                Side::Left => row[last].clone(),
                Side::Right | Side::Wide => format!("{:>width$}", row[last], width = width(last)),
            };
            wrap(&start, &cell, indent, most)
        };
        rows.iter().flat_map(row).collect()
    }
}

/// Breaks a text between words into lines of at most `most` columns. The first begins with `start`, and
/// the others with `indent` blanks. A longer word has a line of its own.
fn wrap(start: &str, text: &str, indent: usize, most: usize) -> Vec<String> {
    if start.chars().count() + text.chars().count() <= most {
        return vec![format!("{start}{text}").trim_end().to_owned()];
    }
    let (mut lines, mut line, mut is_empty) = (Vec::new(), start.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > most {
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
    let most = if std::io::stdout().is_terminal() { width() } else { usize::MAX };
    wrap(start, text, start.chars().count(), most).iter().for_each(|line| say(line));
}

/// Writes a line of prose. On a terminal it breaks between words, and goes on a little further in.
pub(crate) fn say_prose(line: &str) {
    let most = if std::io::stdout().is_terminal() { width() } else { usize::MAX };
    let text = line.trim_start();
    let indent = line.len() - text.len();
    wrap(&line[..indent], text, indent + 4, most).iter().for_each(|line| say(line));
}

/// Writes a remark on a table. On a terminal, each of its lines is a remark.
pub(crate) fn remark(text: &str) {
    let most = if std::io::stdout().is_terminal() { width() } else { usize::MAX };
    let mut start = "# ";
    for line in wrap("", text, 0, most.saturating_sub(4)) {
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
    fn a_long_word_has_a_line_of_its_own() {
        assert_eq!(wrap("a: ", "b cccccccccccc d", 3, 8), ["a: b", "   cccccccccccc", "   d"]);
        assert_eq!(wrap("a: ", "", 3, 8), ["a:"]);
    }
}
