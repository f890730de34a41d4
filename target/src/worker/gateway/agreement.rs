//! Namespaces are announced to hosts again when another gateway has the same.
//!
//! Gateways put a change in force one after the other. Meanwhile a host finds another namespace under
//! an id by one path than by the others, and does not use it there ("IDs don't match for shared
//! namespace" of Linux). It does not look again before the next event.

use std::collections::BTreeSet;
use std::time::Duration;

/// Time in which hosts remove what the other gateway has replaced.
const SETTLE: Duration = Duration::from_secs(2);

/// The gateways that declare the same as this one, since that has changed here.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    /// What this one declares; none before the first comparison.
    digest: Option<String>,
    has_changed: bool,
    /// Their names.
    agreed: BTreeSet<String>,
    due: Option<Duration>,
}

impl Agreement {
    /// Compares the digest of this gateway with those of the other live ones, which have names. Returns
    /// true if the namespaces are to be announced now.
    pub(super) fn is_due<'a>(
        &mut self,
        now: Duration,
        own: &str,
        others: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> bool {
        let before = self.digest.replace(own.to_owned());
        if before.is_some_and(|before| before != own) {
            self.has_changed = true;
            self.agreed.clear();
        }
        let agreeing = others.filter(|(_, digest)| *digest == own).map(|(name, _)| name.to_owned());
        let known = self.agreed.len();
        self.agreed.extend(agreeing);
        if self.has_changed && self.agreed.len() > known {
            self.due = Some(now + SETTLE);
        }
        self.due.take_if(|due| *due <= now).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_announced_again_when_another_gateway_has_them() {
        let mut agreement = Agreement::default();
        let mut at = |s, own, others: &[(&'static str, &'static str)]| {
            agreement.is_due(Duration::from_secs(s), own, others.iter().copied())
        };
        assert!(!at(0, "old", &[]) && !at(1, "old", &[("b", "old"), ("c", "old")]));
        assert!(!at(9, "old", &[("b", "old"), ("c", "old")]), "nothing has changed here");
        // This one is the first that has another configuration.
        assert!(
            !at(10, "new", &[("b", "old"), ("c", "old")])
                && !at(20, "new", &[("b", "old"), ("c", "old")])
        );
        assert!(!at(21, "new", &[("b", "new"), ("c", "old")]) && !at(22, "new", &[("b", "new")]));
        assert!(at(23, "new", &[("b", "new")]) && !at(24, "new", &[("b", "new")]));
        // One that has been away.
        assert!(!at(60, "new", &[("b", "new"), ("c", "new")]) && at(62, "new", &[("b", "new")]));
        assert!(!at(99, "new", &[("b", "new"), ("c", "new")]), "once for each");
        // This one is the last.
        assert!(!at(100, "next", &[("b", "next")]) && at(102, "next", &[("b", "next")]));
    }
}
