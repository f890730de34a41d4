//! What a running target remembers of the hosts that it has refused.

use initiator::{Host, Options};
use nvmfd::core::diag::cause::Cause;

use crate::target::{HOST, TestTarget};

/// A host that no subsystem admits.
const STRANGER: &str = "nqn.2026-11.host:stranger";

#[test]
fn refused_connects_are_recorded_with_cause_and_host() {
    let target = TestTarget::start();
    let refused = |subsystem: Option<&str>, host: &str| {
        let options = target.options(1);
        let subnqn = subsystem.map_or(options.subnqn, |name| name.parse().unwrap());
        let options = Options { subnqn, hostnqn: host.parse().unwrap(), ..options };
        assert!(Host::connect(options, target.setup()).is_err());
    };
    target.connect(1).disconnect();
    assert_eq!(target.causes(), [], "who comes and goes in good order leaves nothing");
    refused(None, STRANGER);
    refused(Some("nqn.2026-11.io.nvmfd:disk2"), HOST);
    refused(None, STRANGER);
    let known = Some(HOST.parse().unwrap());
    let expected = [
        (Cause::HostNotAllowed, Some(STRANGER.parse().unwrap())),
        (Cause::UnknownSubsystem, known),
    ];
    assert_eq!(target.causes(), expected);
}
