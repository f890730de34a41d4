//! Output of results and errors.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use comfy_table::{Table, presets};
use nvmfd::api::UNCHANGED;
use serde::Serialize;
use serde_json::Value;

/// Why output was lost, if any was.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// Format of the output.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Tables and sentences.
    Table,
    /// The response of the daemon.
    Json,
}

/// Output format.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    /// Prints JSON.
    pub(crate) json: bool,
    /// Changes nothing, and prints the differences.
    pub(crate) dry_run: bool,
}

/// An error with its remedy, and the exit code.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    sentence: String,
    code: u8,
    /// The output has it already.
    is_printed: bool,
}

impl Failure {
    pub(crate) fn new(sentence: impl Into<String>) -> Failure {
        Failure { sentence: sentence.into(), code: 1, is_printed: false }
    }

    /// A result that was printed, and differs from success by its exit code alone.
    pub(crate) fn code(code: u8) -> Failure {
        Failure { sentence: String::new(), code, is_printed: true }
    }

    /// The failure of a check whose results are printed: JSON has no second document.
    pub(crate) fn of_check(sentence: impl Into<String>) -> Failure {
        Failure { is_printed: true, ..Failure::new(sentence) }
    }

    /// The same with another exit code.
    pub(crate) fn with_code(self, code: u8) -> Failure {
        Failure { code, ..self }
    }

    /// The same after a part of the command was carried out, which `done` says.
    pub(crate) fn after(self, done: &str) -> Failure {
        // The daemon speaks of its own part.
        let why = self.sentence.replace(&format!(" ({UNCHANGED})"), "");
        Failure { sentence: format!("{done}: {why}"), ..self }
    }

    pub(crate) fn sentence(&self) -> &str {
        &self.sentence
    }
}

impl Output {
    /// Prints a response: as JSON, or as formatted by `text`.
    pub(crate) fn answer<T>(self, (typed, value): &(T, Value), text: impl FnOnce(&T) -> String) {
        match self.json {
            true => self.print(&pretty(value)),
            false => self.print(&text(typed)),
        }
    }

    /// Ignores a closed stdout: the command is executed, and the exit code reports the result.
    pub(crate) fn print(self, text: &str) {
        if let Err(error) = writeln!(io::stdout(), "{}", text.trim_end())
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            let _ = LOST.set(error);
        }
    }

    /// The exit code of a command that was executed. A file on a full file system may have a part of
    /// the output, such as a configuration without its last sections.
    pub(crate) fn finish(self) -> ExitCode {
        LOST.get().map_or(ExitCode::SUCCESS, |error| {
            let _ = writeln!(io::stderr(), "nvmfctl: the output cannot be written: {error}");
            ExitCode::FAILURE
        })
    }

    /// Prints an item of an endless list. Ends the process if stdout is closed.
    pub(crate) fn print_on(self, text: &str) {
        let printed = writeln!(io::stdout(), "{}", text.trim_end());
        if printed.is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            std::process::exit(0);
        }
    }

    pub(crate) fn fail(self, failure: &Failure) -> ExitCode {
        if self.json && !failure.is_printed {
            self.print(&pretty(&serde_json::json!({"error": failure.sentence})));
        }
        if !failure.sentence.is_empty() {
            let _ = writeln!(io::stderr(), "nvmfctl: {}", failure.sentence);
        }
        ExitCode::from(failure.code)
    }
}

/// Formats a table, or returns a sentence if it would be empty.
pub(crate) fn table<const N: usize>(
    heads: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    empty: &str,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(heads);
    table.add_rows(rows);
    if table.is_empty() { empty.to_owned() } else { table.trim_fmt() }
}

/// Formats a list as one cell.
pub(crate) fn joined<T: Display>(all: impl IntoIterator<Item = T>, none: &str) -> String {
    let all: Vec<String> = all.into_iter().map(|each| each.to_string()).collect();
    if all.is_empty() { none.to_owned() } else { all.join(", ") }
}

/// Formats a duration with its unit.
pub(crate) fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::output::*;

    #[test]
    fn durations_are_formatted_with_at_most_two_units() {
        for (seconds, says) in
            [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3660, "1 h 1 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(duration(seconds), says);
        }
    }

    #[test]
    fn a_table_without_rows_prints_a_message() {
        assert_eq!(table(["A"], [], "nothing"), "nothing");
        let text = table(["A", "B"], [["1".into(), "2".into()]], "nothing");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["A", "B", "1", "2"]);
    }
}
