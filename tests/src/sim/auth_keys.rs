//! Simulated authentication (DH-HMAC-CHAP): keys of hosts, and which hosts must authenticate. Without
//! a group, so that the arithmetic needs no thread of its own, and all of it runs on the world's
//! clock.

use nvme::auth::{GroupId, HashId, Secret};
use nvmfd::core::auth::{Keyring, Keys, Policy};

use super::host::hostnqn;
use super::scenario::Profile;

/// One of each machine; the last is nobody's.
const SECRETS: [&str; 4] = [
    "DHHC-1:00:DRQbIikwNz5FTFNaYWhvdn2Ei5KZoKeutbzDytHY3+Z2DVP+:",
    "DHHC-1:00:GiEoLzY9REtSWWBnbnV8g4qRmJ+mrbS7wsnQ197l7PMM7yM8:",
    "DHHC-1:00:Jy41PENKUVhfZm10e4KJkJeepayzusHIz9bd5Ovy+QAkec89:",
    "DHHC-1:00:NDtCSVBXXmVsc3qBiI+WnaSrsrnAx87V3OPq8fj/Bg1NsRI2:",
];

/// Authentication requirement in the simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proofs {
    /// Nobody proves anything.
    None,
    /// Every host proves itself.
    All,
    /// The same, and this host cannot: it has another secret.
    AllBut(usize),
}

/// What the target knows.
#[must_use]
pub fn keyring(profile: &Profile) -> Option<Keyring> {
    let keys = |host| {
        let machine = profile.machine(host);
        (hostnqn(machine), Keys { host: read(machine), controller: None })
    };
    let policy = Policy { hashes: vec![HashId::SHA256], groups: vec![GroupId::NULL] };
    let hosts = (0..profile.hosts).map(keys);
    (profile.proofs != Proofs::None).then(|| Keyring::new(hosts, policy))
}

/// By what a host proves itself.
#[must_use]
pub fn secret(profile: &Profile, host: usize) -> Option<Secret> {
    match profile.proofs {
        Proofs::None => None,
        Proofs::AllBut(other) if other == host => Some(read(SECRETS.len() - 1)),
        Proofs::All | Proofs::AllBut(_) => Some(read(profile.machine(host))),
    }
}

fn read(which: usize) -> Secret {
    Secret::parse(SECRETS[which]).expect("a secret")
}
