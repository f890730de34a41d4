//! Options of all commands: output format; and of long-running ones: progress.

use super::How;

/// Output options.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Output {
    /// How to print the results
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t = Format::Normal)]
    pub output_format: Format,
    /// The same as --output-format json
    #[arg(long, conflicts_with = "output_format")]
    pub json: bool,
}

/// Those of a long-running command.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Printing {
    /// How and what is printed at the end.
    #[command(flatten)]
    pub output: Output,
    /// How to show progress
    #[arg(long, value_enum, value_name = "HOW", default_value_t = How::Auto)]
    pub progress: How,
}

impl Output {
    /// Whether the results are printed for a program.
    pub fn is_json(&self) -> bool {
        self.json || self.output_format == Format::Json
    }
}

/// Output format of results.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Text for people; of a benchmark as fio's
    Normal,
    /// JSON for programs; of a benchmark that of fio
    Json,
}
