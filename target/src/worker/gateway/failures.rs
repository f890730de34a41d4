//! What fails at the cluster: logged once, not with each repetition, and kept for the
//! administrator.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tracing::warn;

use crate::blockdev::lock;

/// A step that is repeated until it succeeds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Step {
    /// The client for the object of the group.
    ConnectObjects,
    /// The client for the images.
    ConnectData,
    /// A read of the object.
    Read,
    /// An update of the object.
    Update,
    /// The exclusion of former owners.
    Exclude,
    /// The images of an ANA group.
    Images(u32),
}

impl Step {
    /// Without it no heartbeat is confirmed.
    fn is_of_heartbeats(self) -> bool {
        !matches!(self, Step::Exclude | Step::Images(_))
    }
}

/// The steps that have failed last, each with a sentence.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<BTreeMap<Step, String>>);

impl Failures {
    /// The step has succeeded: its next failure is logged.
    pub(super) fn end(&self, step: Step) {
        lock(&self.0).remove(&step);
    }

    /// The data client is another one, and what it has to do is done anew.
    pub(super) fn end_of_client(&self) {
        lock(&self.0).retain(|step, _| step.is_of_heartbeats());
    }

    /// The step has failed.
    pub(super) fn note(&self, group: &str, step: Step, sentence: String) {
        if self.is_new(step, &sentence) {
            warn!("group {group}: {sentence}");
        }
    }

    /// Keeps a failure: whether neither this step nor another one fails with this sentence already.
    fn is_new(&self, step: Step, sentence: &str) -> bool {
        let mut failures = lock(&self.0);
        let is_known = failures.values().any(|known| known == sentence);
        failures.insert(step, sentence.to_owned());
        !is_known
    }

    /// Why no heartbeat is confirmed, as far as is known.
    pub(super) fn of_heartbeats(&self) -> Option<String> {
        let failures = lock(&self.0);
        let mut found = failures.iter().filter(|(step, _)| step.is_of_heartbeats());
        found.next().map(|(_, sentence)| sentence.clone())
    }

    /// Why a step has not succeeded.
    pub(super) fn of(&self, step: Step) -> Option<String> {
        lock(&self.0).get(&step).cloned()
    }
}

#[cfg(test)]
mod tests {
    use crate::worker::gateway::failures::*;

    #[test]
    fn a_failure_is_new_until_its_step_has_succeeded() {
        let failures = Failures::default();
        let (no_library, no_monitor) = ("librados is missing", "the monitors do not answer");
        let new = |step, sentence| failures.is_new(step, sentence);
        assert!(new(Step::ConnectData, no_library));
        assert!(!new(Step::ConnectData, no_library), "repeated");
        assert!(!new(Step::ConnectObjects, no_library), "of another client");
        assert!(new(Step::ConnectObjects, no_monitor), "another reason");
        assert!(!new(Step::ConnectObjects, no_monitor) && !new(Step::ConnectData, no_library));
        failures.end(Step::ConnectData);
        assert!(new(Step::ConnectData, no_library), "it was connected meanwhile");
    }

    #[test]
    fn a_missing_heartbeat_is_explained_by_what_it_needs() {
        let failures = Failures::default();
        failures.note("g", Step::Images(1), "an image".to_owned());
        failures.note("g", Step::Exclude, "no right".to_owned());
        assert_eq!(failures.of_heartbeats(), None);
        failures.note("g", Step::Update, "read-only".to_owned());
        assert_eq!(failures.of_heartbeats().as_deref(), Some("read-only"));
        failures.end_of_client();
        assert_eq!((failures.of(Step::Images(1)), failures.of(Step::Exclude)), (None, None));
        assert_eq!(failures.of(Step::Update).as_deref(), Some("read-only"));
    }
}
