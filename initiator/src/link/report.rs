//! Results: a table for people, or JSON.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::client::Measured;
use crate::Provider;

/// Results of all measurements.
pub(super) struct Report {
    pub(super) to: SocketAddr,
    pub(super) provider: Provider,
    pub(super) size_bytes: u32,
    pub(super) results: Vec<Measured>,
}

/// Median and 99th percentile.
const PERCENTILES: [f64; 2] = [50.0, 99.0];

impl Measured {
    fn operations_per_s(&self) -> f64 {
        self.round_trips.len() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    fn bytes_per_s(&self) -> f64 {
        self.operations_per_s() * f64::from(self.test.size_bytes)
    }

    fn percentiles_ns(&self) -> [u64; 2] {
        PERCENTILES.map(|at| self.round_trips.value_at_percentile(at))
    }
}

impl Report {
    /// One object; times in nanoseconds.
    pub(super) fn json(&self) -> Value {
        let results = self.results.iter().map(|measured| {
            let [median_ns, p99_ns] = measured.percentiles_ns();
            json!({
                "operation": measured.test.operation.name(),
                "iodepth": measured.test.depth,
                "operations": measured.round_trips.len(),
                "runtime_ns": measured.elapsed.as_nanos() as u64,
                "median_ns": median_ns,
                "p99_ns": p99_ns,
                "max_ns": measured.round_trips.max(),
                "operations_per_s": measured.operations_per_s(),
                "bytes_per_s": measured.bytes_per_s(),
            })
        });
        json!({
            "address": self.to.to_string(),
            "provider": self.provider.to_string(),
            "size_bytes": self.size_bytes,
            "results": results.collect::<Vec<_>>(),
        })
    }

    /// A table: a line for each operation and depth.
    pub(super) fn text(&self) -> String {
        let Report { to, provider, size_bytes, .. } = self;
        let mut text = format!("{size_bytes} bytes to {to} over {provider}; round trips in us\n");
        text += "operation       depth     median        p99        max        op/s     MiB/s\n";
        for measured in &self.results {
            let [median, p99] = measured.percentiles_ns().map(us);
            text += &format!(
                "{:<15} {:>5} {median:>10.2} {p99:>10.2} {:>10.2} {:>11.0} {:>9.1}\n",
                measured.test.operation.name(),
                measured.test.depth,
                us(measured.round_trips.max()),
                measured.operations_per_s(),
                measured.bytes_per_s() / f64::from(1 << 20),
            );
        }
        text
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hdrhistogram::Histogram;

    use super::*;
    use crate::link::message::{Operation, Test};

    fn report() -> Report {
        let mut round_trips = Histogram::new_with_bounds(1, 1_000_000_000, 3).expect("a histogram");
        for (ns, count) in [(20_000, 970), (50_000, 29), (90_000, 1)] {
            round_trips.record_n(ns, count).expect("in the bounds");
        }
        let test = Test { operation: Operation::Read, size_bytes: 4096, depth: 32 };
        let measured = Measured { test, round_trips, elapsed: Duration::from_millis(500) };
        let to = "192.0.2.1:18515".parse().expect("an address");
        Report { to, provider: Provider::Soft, size_bytes: 4096, results: vec![measured] }
    }

    #[test]
    fn json_has_the_units_in_its_keys() {
        let json = report().json();
        assert_eq!(json["address"], "192.0.2.1:18515");
        assert_eq!((&json["provider"], &json["size_bytes"]), (&json!("soft"), &json!(4096)));
        let result = &json["results"][0];
        assert_eq!((&result["operation"], &result["iodepth"]), (&json!("read"), &json!(32)));
        assert_eq!(
            (&result["operations"], &result["runtime_ns"]),
            (&json!(1000), &json!(500_000_000))
        );
        assert_eq!(result["operations_per_s"], 2000.0);
        assert_eq!(result["bytes_per_s"], 8_192_000.0);
        // Three significant digits.
        let near = |key: &str, ns: f64| {
            let value = result[key].as_f64().expect("a number");
            assert!((value / ns - 1.0).abs() < 0.002, "{key}: {value}");
        };
        near("median_ns", 20_000.0);
        near("p99_ns", 50_000.0);
        near("max_ns", 90_000.0);
    }

    #[test]
    fn the_table_has_a_line_for_each_result() {
        let text = report().text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0], "4096 bytes to 192.0.2.1:18515 over soft; round trips in us");
        let columns: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!(columns, ["read", "32", "20.02", "50.02", "90.05", "2000", "7.8"]);
        assert_eq!(lines[1].len(), lines[2].len());
    }
}
