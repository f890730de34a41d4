//! Warns of blocks that a power failure may leave partially written.

use nvme::Nqn;

use crate::blockdev::Torn;
use crate::core::registry::Registry;
use crate::core::subsystem::{Namespace, Subsystem};

/// One sentence about all namespaces whose blocks may be torn, if there are any.
pub(crate) fn of_all(registry: &Registry) -> Option<String> {
    let subsystems = registry.subsystems();
    Torn::sentence(&subsystems.iter().flat_map(|subsystem| of(subsystem)).collect::<Vec<_>>())
}

/// One sentence about those that `new` has and `old` had not, or had with other blocks.
pub(super) fn of_new(new: &Subsystem, old: Option<&Subsystem>) -> Option<String> {
    let known: Vec<_> = old.into_iter().flat_map(of).collect();
    let torn: Vec<_> = of(new).filter(|torn| !known.contains(torn)).collect();
    Torn::sentence(&torn)
}

fn of(subsystem: &Subsystem) -> impl Iterator<Item = Torn> {
    let writable = subsystem.namespaces.iter().filter(|namespace| !namespace.read_only);
    writable.filter_map(|namespace| torn(subsystem.nqn, namespace))
}

fn torn(nqn: Nqn, namespace: &Namespace) -> Option<Torn> {
    let place = format!("namespace {} of {nqn}", namespace.nsid);
    Torn::of(place, namespace.block_bytes(), namespace.power_fail_atomic_bytes())
}

#[cfg(test)]
mod tests {
    use crate::core::subsystem::testing::sample;
    use crate::provision::torn::*;

    #[test]
    fn torn_blocks_are_reported_of_added_and_reformatted_namespaces() {
        let subsystem = |whole_bytes, shift| {
            let mut subsystem = sample();
            subsystem.namespaces.truncate(1);
            let namespace = &mut subsystem.namespaces[0];
            namespace.geometry.power_fail_atomic_bytes = whole_bytes;
            namespace.block_shift = shift;
            namespace.read_only = false;
            subsystem
        };
        let [small, large, whole] = [(512, 9), (512, 12), (4096, 12)].map(|(a, b)| subsystem(a, b));
        for (new, old, is_reported) in [
            (&large, None, true),
            (&large, Some(&small), true),
            (&large, Some(&large), false),
            (&small, Some(&large), false),
            (&whole, None, false),
        ] {
            assert_eq!(of_new(new, old).is_some(), is_reported, "{:?}", new.namespaces[0].geometry);
        }
        assert!(of_new(&large, None).unwrap().contains("(512 of 4096 bytes)"));
    }
}
