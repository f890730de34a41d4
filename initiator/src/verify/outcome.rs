//! Result of a verification, as text and JSON.

use std::fmt::{self, Write};
use std::time::Duration;

use serde_json::json;

use super::model::{Counts, Shape};
use super::violation::Violation;

/// The results.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) shape: Shape,
    pub(super) counts: Counts,
    pub(super) model_bytes: usize,
    /// Operations submitted.
    pub(super) ops: u64,
    /// The first violations.
    pub(super) listed: Vec<Violation>,
    pub(super) seed: u64,
    /// Number of reconnections to the target.
    pub(super) reconnects: u32,
    /// Number of times that a path was lost.
    pub(super) path_losses: u64,
    /// Number of times that the whole range was read.
    pub(super) reads_everything: u32,
    pub(super) elapsed: Duration,
}

impl Outcome {
    /// Formats the violations, then a summary.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let Counts { writes, flushes, blocks_checked, failed, lost, violations } = self.counts;
        for violation in &self.listed {
            writeln!(out, "{violation}")?;
        }
        let unlisted = violations.saturating_sub(self.listed.len() as u64);
        if unlisted > 0 {
            writeln!(out, "and {unlisted} more\n")?;
        }
        let (shape, seconds) = (self.shape, self.elapsed.as_secs_f64());
        let verdict = match violations {
            0 if self.reads_everything == 0 => "all blocks that were read match".to_owned(),
            0 => "all blocks match".to_owned(),
            1 => "one block does not match".to_owned(),
            n => format!("{n} times a block did not match"),
        };
        writeln!(out, "verify: {verdict}")?;
        writeln!(
            out,
            "  operations : {} in {seconds:.1} s: {writes} writes and {flushes} flushes acknowledged, \
             {failed} failed, {lost} lost",
            self.ops
        )?;
        let (all, back) = (self.reads_everything, self.reconnects);
        writeln!(out, "  checked    : {blocks_checked} blocks; everything {}", times(all.into()))?;
        if back > 0 {
            writeln!(out, "  target     : came back {}", times(back.into()))?;
        }
        if self.path_losses > 0 {
            writeln!(out, "  paths      : lost {}", times(self.path_losses))?;
        }
        let each = self.model_bytes as f64 / shape.blocks as f64;
        let mib = self.model_bytes as f64 / f64::from(1 << 20);
        writeln!(
            out,
            "  model      : {} blocks of {} bytes from LBA {}; {mib:.1} MiB, {each:.0} bytes a block",
            shape.blocks, shape.block_bytes, shape.first_lba
        )?;
        writeln!(out, "  run        : {:016x}, seed {}", shape.run, self.seed)
    }

    /// Formats the same as JSON; violations as in the text.
    pub(super) fn json(&self) -> String {
        let Counts { writes, flushes, blocks_checked, failed, lost, violations } = self.counts;
        let listed: Vec<_> = self
            .listed
            .iter()
            .map(|violation| {
                json!({
                    "lba": violation.lba,
                    "kind": violation.kind.name(),
                    "text": violation.to_string(),
                })
            })
            .collect();
        let Shape { first_lba, blocks, block_bytes, run } = self.shape;
        let value = json!({
            "violations": violations,
            "listed": listed,
            "operations": self.ops,
            "writes": writes,
            "flushes": flushes,
            "failed": failed,
            "lost": lost,
            "blocks_checked": blocks_checked,
            "everything_read": self.reads_everything,
            "reconnects": self.reconnects,
            "path_losses": self.path_losses,
            "elapsed_ms": self.elapsed.as_millis() as u64,
            "first_lba": first_lba,
            "blocks": blocks,
            "block_bytes": block_bytes,
            "model_bytes": self.model_bytes,
            "run": format!("{run:016x}"),
            "seed": self.seed,
        });
        format!("{value:#}\n")
    }
}

/// How often something happened.
fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    }
}
