//! A host that proves itself on a queue, message by message.

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;

use nvme::auth::{
    Challenge, Digest, GroupId, HashId, Negotiate, Reply, Secret, Success1, Transaction,
};
use nvme::fabrics::{Authentication, Connect, ConnectResult, FabricsType};
use nvme::{Nqn, Status};
use nvmfd::config::{AuthenticationConfig, HostConfig};
use nvmfd::core::auth::Policy;
use nvmfd::core::qpair::QueuePair;
use tempfile::{TempDir, tempdir};

use crate::support::{World, connect_data, keyed};

pub(crate) const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
pub(crate) const HOST: &str = "nqn.2026-11.host:h";

/// Where messages lie in the host's memory.
pub(crate) const AT: usize = 0x8000;

/// A world in which the host of `connect_data` has a key.
pub(crate) fn world(group: GroupId) -> (World, TempDir) {
    world_with(vec![group])
}

/// .. and these groups are accepted.
pub(crate) fn world_with(groups: Vec<GroupId>) -> (World, TempDir) {
    let world = World::new();
    let directory = give_key(&world, groups);
    (world, directory)
}

/// Gives the host of `connect_data` a key, in the directory that is returned.
pub(crate) fn give_key(world: &World, groups: Vec<GroupId>) -> TempDir {
    let directory = tempdir().unwrap();
    let key_file = directory.path().join("key");
    write(&key_file, SECRET).unwrap();
    set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let nqn: Nqn = HOST.parse().unwrap();
    let config = AuthenticationConfig {
        policy: Policy { hashes: vec![HashId::SHA256], groups },
        hosts: vec![HostConfig {
            nqn,
            key_file,
            controller_key_file: None,
            hashes: None,
            groups: None,
        }],
        ..AuthenticationConfig::default()
    };
    let changes = world.registry.set_keyring(config.keyring().unwrap());
    assert!(changes.contains(&format!("host {HOST} must authenticate")), "{changes:?}");
    directory
}

pub(crate) fn connect(world: &mut World, qid: u16, cntlid: u16) -> QueuePair {
    let mut queue = world.open_qid(qid);
    world.memory[..1024].copy_from_slice(&connect_data(cntlid).emit());
    let connect = Connect { qid, sqsize_z: 15, ..Connect::default() };
    let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
    assert!(cqe.status.is_success(), "{}", cqe.status);
    assert!(ConnectResult(cqe.dw0()).atr(), "authentication is required");
    assert!(queue.is_connected() && !queue.is_admitted());
    queue
}

pub(crate) fn say(world: &mut World, queue: &mut QueuePair, message: &[u8]) -> Status {
    world.memory[AT..AT + message.len()].copy_from_slice(message);
    let len = message.len() as u32;
    let sqe =
        Authentication::new(len).emit(FabricsType::AUTHENTICATION_SEND, keyed(AT as u64, len));
    world.ask(queue, &sqe, &[]).status
}

pub(crate) fn listen(world: &mut World, queue: &mut QueuePair) -> Vec<u8> {
    let sqe =
        Authentication::new(4096).emit(FabricsType::AUTHENTICATION_RECEIVE, keyed(AT as u64, 4096));
    world.memory[AT..AT + 4096].fill(0xEE);
    assert!(world.ask(queue, &sqe, &[]).status.is_success());
    world.memory[AT..AT + 4096].to_vec()
}

pub(crate) fn negotiate() -> Vec<u8> {
    let mut message = [0; 72];
    Negotiate::new(5, &[HashId::SHA256], &[GroupId::NULL]).emit(&mut message).unwrap();
    message.to_vec()
}

pub(crate) fn reply(challenge: &[u8]) -> Vec<u8> {
    let c = Challenge::parse(challenge).unwrap();
    let (host, subsystem) = (HOST.parse().unwrap(), "nqn.2026-11.io.nvmfd:test".parse().unwrap());
    let at = Transaction { hash: c.hash, t_id: c.t_id, host: &host, subsystem: &subsystem };
    let key = Secret::parse(SECRET).unwrap().key(&host);
    let response = at.host_response(&key, &Digest::new(c.challenge), c.seqnum).unwrap();
    let response = response.as_bytes();
    let reply = Reply { t_id: c.t_id, response, challenge: None, seqnum: 0, value: &[] };
    let mut message = [0; 16 + 64];
    reply.emit(&mut message).unwrap();
    message.to_vec()
}

pub(crate) fn authenticate(world: &mut World, queue: &mut QueuePair) {
    assert!(say(world, queue, &negotiate()).is_success());
    let challenge = listen(world, queue);
    assert!(say(world, queue, &reply(&challenge)).is_success());
    Success1::parse(&listen(world, queue)).unwrap();
    assert!(queue.is_admitted());
}
