//! A host that dies at a chosen stage of its life: nothing is said to the target, no connection is
//! closed, no response is read.

use nix::sys::signal::{Signal, raise};
use nvme::{IoOpcode, Sqe};

use crate::fixture::{Attempt, Outcome, Queue, World};

/// Outstanding commands of a host that dies amid its I/O.
const COMMANDS: u16 = 16;

/// The target may not wait for longer.
const KATO_MS: u32 = 5000;

type Stage = fn(&mut World) -> Outcome;

/// The stages, in the order in which a host passes through them.
pub(crate) const STAGES: [(&str, Stage); 6] = [
    ("request", request),
    ("established", established),
    ("connect", connect),
    ("connected", |world| world.disabled().map(drop)),
    ("enabled", |world| world.admin(1).map(drop)),
    ("io", io),
];

/// Lives up to the stage with this name, and gets SIGKILL there.
///
/// # Errors
/// No such stage, or why the host did not reach it.
pub(crate) fn die_at(world: &mut World, name: &str) -> Outcome {
    let (_, stage) = STAGES
        .iter()
        .find(|(stage, _)| *stage == name)
        .ok_or_else(|| format!("there is no stage {name}"))?;
    world.kato_ms = KATO_MS;
    stage(world)?;
    println!("reached {name}");
    raise(Signal::SIGKILL).map_err(|e| e.to_string())
}

/// The connection request is sent, and its reply is not read.
fn request(world: &mut World) -> Outcome {
    let private_data = world.admin_attempt().request.emit();
    world.host.request(&private_data).map_err(|e| e.to_string())
}

fn opened(world: &mut World, attempt: &Attempt) -> Result<Queue, String> {
    world.open(attempt.request).map_err(|reason| format!("no connection: {reason:?}"))
}

fn established(world: &mut World) -> Outcome {
    let attempt = world.admin_attempt();
    opened(world, &attempt).map(drop)
}

/// Connect is sent: the target is about to fetch its data.
fn connect(world: &mut World) -> Outcome {
    let attempt = world.admin_attempt();
    let queue = opened(world, &attempt)?;
    let capsule = attempt.connect.emit(world.keyed(attempt.len)).emit();
    world.host.send(queue.link, &capsule);
    world.host.flush();
    Ok(())
}

/// Reads and writes are outstanding, in every state that the target knows.
fn io(world: &mut World) -> Outcome {
    let admin = world.admin(1)?;
    let mut queue = world.io(admin.cntlid, 1)?;
    let data = world.keyed(1 << 16);
    for number in 0..COMMANDS {
        let opcode = if number % 2 == 0 { IoOpcode::WRITE } else { IoOpcode::READ };
        let sqe = Sqe::io(opcode, 1).with_sgl(data).with_range(u64::from(number) * 16, 15);
        world.tell(&mut queue, &sqe.emit());
    }
    world.host.flush();
    Ok(())
}
