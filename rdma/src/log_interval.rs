//! Rate limit of log lines that anybody on the network can cause.

use std::time::{Duration, Instant};

/// When a log line was written last.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogInterval(Option<Instant>);

impl LogInterval {
    /// Whether the line is due: `interval` has passed since the last one. It then counts as written.
    pub fn is_due(&mut self, now: Instant, interval: Duration) -> bool {
        let is_due = self.0.is_none_or(|last| now.saturating_duration_since(last) >= interval);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use crate::log_interval::*;

    #[test]
    fn a_line_is_written_at_most_once_in_an_interval() {
        let (mut line, start) = (LogInterval::default(), Instant::now());
        let due = [0, 1, 59, 60, 61, 119, 120].map(|seconds| {
            line.is_due(start + Duration::from_secs(seconds), Duration::from_secs(60))
        });
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }
}
