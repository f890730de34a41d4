//! Counts in sentences.

use std::fmt::Display;

/// A count with its noun: `1 change`, `2 changes`.
pub fn count(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    let ending = if count == "1" { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use crate::plural::*;

    #[test]
    fn a_count_of_one_is_singular() {
        assert_eq!([0, 1, 2].map(|n| count(n, "host")), ["0 hosts", "1 host", "2 hosts"]);
    }
}
