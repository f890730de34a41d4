//! Simulated authentication (DH-HMAC-CHAP): keys of hosts, and which hosts must authenticate.
//! Without a DH group, so that no thread is needed for the computation, and everything runs on the
//! simulated clock.

use nvme::auth::{GroupId, HashId, Secret};
use nvmfd::core::auth::{Keyring, Keys, Policy};

use super::host::hostnqn;
use super::scenario::Profile;

/// The secret of each host; the last one belongs to none.
const SECRETS: [&str; 4] = [
    "DHHC-1:00:DRQbIikwNz5FTFNaYWhvdn2Ei5KZoKeutbzDytHY3+Z2DVP+:",
    "DHHC-1:00:GiEoLzY9REtSWWBnbnV8g4qRmJ+mrbS7wsnQ197l7PMM7yM8:",
    "DHHC-1:00:Jy41PENKUVhfZm10e4KJkJeepayzusHIz9bd5Ovy+QAkec89:",
    "DHHC-1:00:NDtCSVBXXmVsc3qBiI+WnaSrsrnAx87V3OPq8fj/Bg1NsRI2:",
];

/// Authentication requirement in the simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proofs {
    /// No host authenticates.
    None,
    /// Every host authenticates.
    All,
    /// As `All`, but this host has a wrong secret.
    AllBut(usize),
}

/// The keys of the target.
pub fn keyring(profile: &Profile) -> Option<Keyring> {
    let keys = |host| {
        let machine = profile.machine(host);
        (hostnqn(machine), Keys { host: read(machine), controller: None })
    };
    let policy = Policy { hashes: vec![HashId::SHA256], groups: vec![GroupId::NULL] };
    let hosts = (0..profile.hosts).map(keys);
    (profile.proofs != Proofs::None).then(|| Keyring::new(hosts, policy))
}

/// The secret of a host.
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
