//! Immediate data, which NVMe over RDMA does not have: those of a capsule are ignored, and an RDMA
//! Write with them, which completes a receive as well, ends its connection and no other.

use nvme::identify::{Cns, Identify};
use nvme::{IoOpcode, Sqe};
use rdma::Remote;

use crate::fixture::{Outcome, Want, World};
use crate::host::PATIENCE;
use crate::malformed::{Bystander, again};

pub(crate) fn data(world: &mut World) -> Outcome {
    if world.iwarp {
        println!("     iWARP has no immediate data");
        return Ok(());
    }
    let mut bystander = Bystander::new(world)?;
    let mut admin = world.admin(4)?;
    let identify = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096)).emit();
    let got = world.ask_with_immediate(&mut admin, &identify);
    world.expect("admin, a capsule with immediate data", &got, &Want::Done);
    let capsule_bytes =
        u32::from_le_bytes(world.host.look(1792, 4).try_into().unwrap_or_default()) * 16;
    let mut flush = Sqe::io(IoOpcode::FLUSH, 1).emit().to_vec();
    let mut queue = again(world, admin.cntlid, 2)?;
    let got = world.ask_with_immediate(&mut queue, &flush);
    world.expect("I/O, a capsule with immediate data", &got, &Want::Done);
    flush.resize(capsule_bytes as usize, 0x77);
    let got = world.ask_with_immediate(&mut queue, &flush);
    world.expect("the same, as long as promised", &got, &Want::Done);
    let got = world.ask_with_immediate(&mut queue, &flush[..63]);
    world.expect("the same, of 63 bytes", &got, &Want::Dropped);
    world.close([queue]);
    bystander.look(world)?;
    let window = world.host.window();
    let nowhere = Remote { key: window.key ^ 0x5A5A_5A00, ..window };
    for (name, len, count) in [
        ("of 0 bytes", 0, 1),
        ("of 64 bytes to a key that nobody has", 64, 1),
        ("of 10000 bytes to a key that nobody has", 10_000, 1),
        ("of 0 bytes, more than there are receives", 0, 150),
    ] {
        let mut queue = again(world, admin.cntlid, 2)?;
        // The buffer of a receive now has a capsule, which must not be executed again.
        let got = world.ask(&mut queue, &flush[..64]);
        world.expect("I/O, a capsule before a Write", &got, &Want::Done);
        for immediate in 0..count {
            world.host.write_with_immediate(queue.link, Remote { len, ..nowhere }, immediate);
        }
        let got = world.hear(&queue, 0, PATIENCE);
        world.expect(&format!("I/O, a Write with immediate data {name}"), &got, &Want::Dropped);
        world.close([queue]);
        bystander.look(world)?;
    }
    let got = world.ask(&mut admin, &identify);
    world.expect("the admin queue outlives them", &got, &Want::Done);
    world.close([admin]);
    bystander.close(world);
    Ok(())
}
