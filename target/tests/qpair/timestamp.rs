//! The Timestamp feature over a reset of the controller.

use nvme::fabrics::PropertySet;
use nvme::feature::{FeatureId, GetFeatures, Select, SetFeatures, Timestamp};
use nvme::property::Property;
use nvmfd::core::qpair::QueuePair;

use crate::support::{World, keyed};

fn timestamp(world: &mut World, queue: &mut QueuePair) -> Timestamp {
    let (fid, sel) = (FeatureId::TIMESTAMP, Select::CURRENT);
    let get = GetFeatures { fid, sel, nsid: 0, cdw11: 0 }.emit(keyed(64, 8)).with_cid(1);
    assert!(world.ask(queue, &get, &[]).status.is_success());
    Timestamp::parse(world.memory[64..].first_chunk().unwrap())
}

#[test]
fn a_reset_clears_the_timestamp() {
    const NOON_MS: u64 = 1_764_244_800_000;
    let (mut world, mut queue, _) = World::with_admin_queue();
    assert_eq!(timestamp(&mut world, &mut queue).origin(), Timestamp::ORIGIN_RESET);
    world.memory[..8].copy_from_slice(&Timestamp::new(NOON_MS).emit());
    let set = SetFeatures::new(FeatureId::TIMESTAMP, 0).emit(keyed(0, 8)).with_cid(2);
    assert!(world.ask(&mut queue, &set, &[]).status.is_success());
    let found = timestamp(&mut world, &mut queue);
    assert_eq!(found.origin(), Timestamp::ORIGIN_HOST);
    assert!((NOON_MS..NOON_MS + 3_600_000).contains(&found.ms()), "{found:?}");
    for cc in [0x0046_0000, 0x0046_0001] {
        let configure = PropertySet::new(Property::CC, cc).emit().with_cid(3);
        assert!(world.ask(&mut queue, &configure, &[]).status.is_success());
    }
    let found = timestamp(&mut world, &mut queue);
    assert_eq!(found.origin(), Timestamp::ORIGIN_RESET);
    assert!(found.ms() < 3_600_000, "{found:?}");
    world.end(queue);
}
