//! Progress: a live line on a terminal, or lines of JSON for a program.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use super::fio_text::{Amount, Count};

/// Output format of progress.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum How {
    /// A live line when stderr is a terminal
    #[default]
    Auto,
    /// Not at all
    Never,
    /// Lines of JSON on stderr, two a second
    Json,
}

/// Throughput of one direction in one interval.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Rate {
    /// Commands per second.
    pub iops: f64,
    /// Bytes per second.
    pub bw_bytes: f64,
}

/// Reports the progress of an operation.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    json: bool,
    total: Duration,
}

impl Progress {
    /// Creates the progress of an operation that takes `total`.
    pub fn new(how: How, total: Duration) -> Progress {
        let live = how == How::Auto && std::io::stderr().is_terminal();
        let bar = live.then(|| {
            let target = ProgressDrawTarget::stderr_with_hz(5);
            let bar = ProgressBar::with_draw_target(Some(total.as_millis() as u64), target);
            let style = ProgressStyle::with_template("{bar:24} {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, json: how == How::Json, total }
    }

    /// Whether progress is displayed: otherwise rates need not be computed.
    pub(crate) fn is_seen(&self) -> bool {
        self.json || self.bar.is_some()
    }

    /// Reports the results of the last interval.
    pub fn print(&self, phase: &str, elapsed: Duration, read: Rate, write: Rate) {
        if let Some(bar) = &self.bar {
            let mut text = format!("{phase} {:.0}/{:.0} s", elapsed.as_secs_f64(), self.total_s());
            for (name, rate) in [("read", read), ("write", write)] {
                if rate.iops > 0.0 {
                    let (iops, bw) = (Count(rate.iops), Amount(rate.bw_bytes));
                    text += &format!("  {name} {iops} IOPS {bw}/s");
                }
            }
            bar.set_position(elapsed.as_millis() as u64);
            bar.set_message(text);
        }
        if self.json {
            let (elapsed_ms, total_ms) =
                (elapsed.as_millis() as u64, self.total.as_millis() as u64);
            let line = json!({
                "elapsed_ms": elapsed_ms, "total_ms": total_ms, "phase": phase, "read": read,
                "write": write,
            });
            // A closed stderr is no reason to stop.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }

    /// Reports a line of text, for operations without rates.
    pub fn say(&self, elapsed: Duration, text: String) {
        if let Some(bar) = &self.bar {
            bar.set_position(elapsed.as_millis() as u64);
            bar.set_message(text);
        }
    }

    /// Clears the live line.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn total_s(&self) -> f64 {
        self.total.as_secs_f64()
    }
}
