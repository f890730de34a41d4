use crate::auth::Policy;
use std::sync::Arc;

use nvme::auth::{
    Challenge, GroupId, HashId, PrivateKey, Secret, SharedSecret, Transaction, augment,
};
use proptest::prelude::*;

use crate::auth::exchange::*;

const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OTHER: &str =
    "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

fn host() -> Nqn {
    "nqn.2026-11.host:h".parse().unwrap()
}

fn disk() -> Nqn {
    "nqn.2026-11.io.nvmfd:disk".parse().unwrap()
}

fn policy() -> Policy {
    Policy { hashes: HashId::ALL.to_vec(), groups: GroupId::ALL.to_vec() }
}

/// A host without errors, unless configured otherwise.
struct Host {
    secret: Secret,
    controller: Option<Secret>,
    hashes: Vec<HashId>,
    groups: Vec<GroupId>,
    t_id: u16,
    private: PrivateKey,
}

impl Host {
    fn new() -> Host {
        Host {
            secret: Secret::parse(SECRET).unwrap(),
            controller: None,
            hashes: vec![HashId::SHA256],
            groups: vec![GroupId::NULL],
            t_id: 7,
            private: PrivateKey::new([0x42; 64]),
        }
    }

    fn negotiate(&self) -> Vec<u8> {
        written(|to| Negotiate::new(self.t_id, &self.hashes, &self.groups).emit(to))
    }

    fn shared(&self, c: &Challenge<'_>) -> Option<SharedSecret> {
        self.private.agree(c.group, c.value)
    }

    fn bind(&self, c: &Challenge<'_>, challenge: &[u8]) -> Digest {
        match self.shared(c) {
            Some(shared) => augment(c.hash, &shared, challenge).unwrap(),
            None => Digest::new(challenge),
        }
    }

    /// C2 as this host makes it.
    fn c2(&self, c: &Challenge<'_>) -> Vec<u8> {
        vec![0xC2; c.hash.digest_bytes().unwrap()]
    }

    fn reply(&self, challenge: &[u8]) -> Vec<u8> {
        let c = Challenge::parse(challenge).unwrap();
        let (host, subsystem) = (host(), disk());
        let at = Transaction { hash: c.hash, t_id: c.t_id, host: &host, subsystem: &subsystem };
        let bound = self.bind(&c, c.challenge);
        let response = at.host_response(&self.secret.key(&host), &bound, c.seqnum).unwrap();
        let value = self.private.public_value(c.group);
        let c2 = self.c2(&c);
        let reply = Reply {
            t_id: c.t_id,
            response: response.as_bytes(),
            challenge: self.controller.is_some().then_some(&c2[..]),
            seqnum: 99,
            value: value.as_ref().map_or(&[], |value| value.as_bytes()),
        };
        written(|to| reply.emit(to))
    }

    fn accepts(&self, challenge: &[u8], success: &[u8]) -> bool {
        let c = Challenge::parse(challenge).unwrap();
        let (host, subsystem) = (host(), disk());
        let at = Transaction { hash: c.hash, t_id: c.t_id, host: &host, subsystem: &subsystem };
        let Some(secret) = &self.controller else { return true };
        let bound = self.bind(&c, &self.c2(&c));
        let due = at.controller_response(&secret.key(&subsystem), &bound, 99).unwrap();
        Success1::parse(success).unwrap().response.is_some_and(|r2| due.is(r2))
    }

    fn success2(&self) -> Vec<u8> {
        written(|to| Notice::Success2.emit(self.t_id, to))
    }
}

/// The controller's side, with its clock and its worker.
struct Target {
    exchange: Exchange,
    policy: Policy,
    controller: Option<&'static str>,
    has_key: bool,
    seed: u8,
    now: Instant,
}

impl Target {
    fn new() -> Target {
        let now = Instant::now();
        Target {
            exchange: Exchange::new(host(), disk(), now),
            policy: policy(),
            controller: None,
            has_key: true,
            seed: 0,
            now,
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.seed += 1;
        let keys = Keys {
            host: Secret::parse(SECRET).unwrap(),
            controller: self.controller.map(|text| Secret::parse(text).unwrap()),
        };
        let start = Start {
            keys: Arc::new(keys),
            policy: Arc::new(self.policy.clone()),
            challenge: [self.seed; 64],
            private: PrivateKey::new([self.seed; 64]),
            seqnum: u32::from(self.seed),
        };
        let start = || self.has_key.then_some(start);
        if let Some(job) = self.exchange.on_message(bytes, start, self.now) {
            self.exchange.on_worked(job.run(), self.now);
        }
    }

    fn fetch(&mut self) -> Vec<u8> {
        let mut message = [0xEE; MESSAGE_MAX_BYTES];
        let len = self.exchange.fetch(4096, &mut message, self.now).unwrap();
        message[..len].to_vec()
    }

    /// What the failure message says.
    fn failure(&mut self) -> Failure {
        assert!(!self.exchange.is_authenticated());
        assert!(self.exchange.take_failure().is_some());
        match Notice::parse(&self.fetch()) {
            Ok(Notice::Failure1(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    fn authenticate(&mut self, host: &Host) {
        self.send(&host.negotiate());
        let challenge = self.fetch();
        self.send(&host.reply(&challenge));
        let success = self.fetch();
        assert!(host.accepts(&challenge, &success));
        if host.controller.is_some() {
            assert!(!self.exchange.is_authenticated() || self.seed > 3, "not before Success2");
            self.send(&host.success2());
        }
        assert!(self.exchange.is_authenticated());
    }
}

fn written(emit: impl FnOnce(&mut [u8]) -> Option<usize>) -> Vec<u8> {
    let mut bytes = [0xEE; MESSAGE_MAX_BYTES];
    let len = emit(&mut bytes).unwrap();
    bytes[..len].to_vec()
}

#[test]
fn every_hash_and_dh_group_authenticates_in_both_directions() {
    for hash in HashId::ALL {
        for group in GroupId::ALL {
            // The largest groups take long: they are tested only with proofs in both directions.
            let ways = [Some(OTHER), None];
            for controller in &ways[..if group > GroupId::FFDHE2048 { 1 } else { 2 }] {
                let controller = *controller;
                let mut target = Target { controller, ..Target::new() };
                let mut host = Host { hashes: vec![hash], groups: vec![group], ..Host::new() };
                host.controller = controller.map(|text| Secret::parse(text).unwrap());
                target.authenticate(&host);
                assert!(!target.exchange.is_overdue(target.now + DEADLINE * 100));
            }
        }
    }
}

#[test]
fn the_target_policy_selects_the_hash_and_dh_group() {
    let mut target = Target::new();
    target.policy.hashes = vec![HashId::SHA512, HashId::SHA256];
    target.policy.groups = vec![GroupId::FFDHE2048, GroupId::NULL];
    let host = Host { hashes: HashId::ALL.to_vec(), groups: GroupId::ALL.to_vec(), ..Host::new() };
    target.send(&host.negotiate());
    let challenge = target.fetch();
    let challenge = Challenge::parse(&challenge).unwrap();
    assert_eq!((challenge.hash, challenge.group), (HashId::SHA512, GroupId::FFDHE2048));
}

#[test]
fn a_host_cannot_weaken_the_negotiated_authentication() {
    let mut target = Target::new();
    target.policy = Policy { hashes: vec![HashId::SHA512], groups: vec![GroupId::FFDHE3072] };
    let host = Host { hashes: vec![HashId::SHA256, HashId(0), HashId(200)], ..Host::new() };
    target.send(&host.negotiate());
    assert_eq!(target.failure(), Failure::HASH_UNUSABLE);
    let mut target = Target { policy: target.policy, ..Target::new() };
    let host = Host { hashes: vec![HashId::SHA512], ..Host::new() };
    target.send(&host.negotiate());
    assert_eq!(target.failure(), Failure::GROUP_UNUSABLE);
    // The challenge has a group, and the host replies as if it had none.
    let mut target = Target { policy: target.policy, ..Target::new() };
    let strong = Host { groups: vec![GroupId::FFDHE3072], ..host };
    target.send(&strong.negotiate());
    let challenge = target.fetch();
    let whole = strong.reply(&challenge);
    let mut reply = whole[..whole.len() - 384].to_vec();
    reply[10..12].fill(0);
    target.send(&reply);
    assert_eq!(target.failure(), Failure::INCORRECT_PAYLOAD);
    // A secure channel that there is none of.
    let mut target = Target::new();
    let mut negotiate = Host::new().negotiate();
    negotiate[6] = 1;
    target.send(&negotiate);
    assert_eq!(target.failure(), Failure::CHANNEL_MISMATCH);
}

#[test]
fn degenerate_dh_public_values_fail_authentication() {
    for value in [0u8, 1] {
        let mut target = Target::new();
        let host = Host { groups: vec![GroupId::FFDHE2048], ..Host::new() };
        target.send(&host.negotiate());
        let mut reply = host.reply(&target.fetch());
        let at = reply.len() - 256;
        reply[at..].fill(0);
        *reply.last_mut().unwrap() = value;
        target.send(&reply);
        assert_eq!(target.failure(), Failure::FAILED);
    }
}

#[test]
fn a_wrong_secret_fails_and_the_queue_must_close() {
    let mut target = Target::new();
    let host = Host { secret: Secret::parse(OTHER).unwrap(), ..Host::new() };
    target.send(&host.negotiate());
    let challenge = target.fetch();
    target.send(&host.reply(&challenge));
    assert_eq!(target.failure(), Failure::FAILED);
    // Neither the correct reply nor a new exchange is accepted after that.
    target.send(&Host::new().reply(&challenge));
    target.send(&Host::new().negotiate());
    assert!(Notice::parse(&target.fetch()).is_ok() && !target.exchange.is_authenticated());
    assert!(target.exchange.is_overdue(target.now + FAREWELL));
}

#[test]
fn a_host_without_a_key_fails() {
    let mut target = Target { has_key: false, ..Target::new() };
    target.send(&Host::new().negotiate());
    assert_eq!(target.failure(), Failure::FAILED);
}

#[test]
fn a_controller_challenge_without_a_controller_key_fails() {
    let mut target = Target::new();
    let host = Host { controller: Some(Secret::parse(OTHER).unwrap()), ..Host::new() };
    target.send(&host.negotiate());
    let challenge = target.fetch();
    target.send(&host.reply(&challenge));
    assert_eq!(target.failure(), Failure::FAILED);
}

#[test]
fn a_reflected_controller_challenge_is_refused() {
    let mut target = Target { controller: Some(OTHER), ..Target::new() };
    let host = Host { controller: Some(Secret::parse(OTHER).unwrap()), ..Host::new() };
    target.send(&host.negotiate());
    let challenge = target.fetch();
    let mut reply = host.reply(&challenge);
    reply[48..80].copy_from_slice(&challenge[16..48]);
    target.send(&reply);
    assert_eq!(target.failure(), Failure::FAILED);
}

#[test]
fn replayed_replies_are_refused() {
    let host = Host::new();
    let mut target = Target::new();
    target.send(&host.negotiate());
    let old = host.reply(&target.fetch());
    target.send(&old);
    target.fetch();
    assert!(target.exchange.is_authenticated());
    // On the same queue, another exchange.
    target.send(&host.negotiate());
    target.fetch();
    target.send(&old);
    assert_eq!(target.failure(), Failure::FAILED);
    // The same reply twice in one exchange.
    let mut target = Target::new();
    target.send(&host.negotiate());
    let reply = host.reply(&target.fetch());
    target.send(&reply);
    target.send(&reply);
    assert_eq!(target.failure(), Failure::INCORRECT_MESSAGE);
    // Of another transaction.
    let mut target = Target::new();
    target.send(&host.negotiate());
    let mut reply = host.reply(&target.fetch());
    reply[4] ^= 1;
    target.send(&reply);
    assert_eq!(target.failure(), Failure::INCORRECT_PAYLOAD);
}

#[test]
fn out_of_order_messages_and_fetches_fail() {
    let host = Host { controller: Some(Secret::parse(OTHER).unwrap()), ..Host::new() };
    let with_key = || Target { controller: Some(OTHER), ..Target::new() };
    let mut target = with_key();
    assert!(Notice::parse(&target.fetch()).is_ok(), "asked before anything was sent");
    assert!(target.exchange.take_failure().is_some());
    for early in [host.success2(), vec![1, 2, 0, 0, 7, 0], vec![1, 1, 0, 0, 7, 0], vec![], vec![1]]
    {
        let mut target = with_key();
        target.send(&early);
        assert!(target.exchange.take_failure().is_some() && !target.exchange.is_authenticated());
    }
    // Success2 before Success1 was fetched.
    let mut target = with_key();
    target.send(&host.negotiate());
    let challenge = target.fetch();
    target.send(&host.reply(&challenge));
    target.send(&host.success2());
    assert_eq!(target.failure(), Failure::INCORRECT_MESSAGE);
    // The host is not content with us.
    let mut target = with_key();
    target.send(&host.negotiate());
    let challenge = target.fetch();
    target.send(&host.reply(&challenge));
    target.fetch();
    target.send(&written(|to| Notice::Failure2(Failure::FAILED).emit(7, to)));
    assert_eq!(target.exchange.take_failure(), Some(Failure::FAILED));
    assert!(!target.exchange.is_authenticated());
}

#[test]
fn a_message_during_processing_of_another_fails_the_exchange() {
    let mut exchange = Exchange::new(host(), disk(), Instant::now());
    let mut target = Target::new();
    std::mem::swap(&mut target.exchange, &mut exchange);
    let keys = Keys { host: Secret::parse(SECRET).unwrap(), controller: None };
    let start = Start {
        keys: Arc::new(keys),
        policy: Arc::new(policy()),
        challenge: [1; 64],
        private: PrivateKey::new([1; 64]),
        seqnum: 1,
    };
    let message = Host::new().negotiate();
    let job = target.exchange.on_message(&message, || Some(start), target.now).unwrap();
    target.send(&message);
    target.exchange.on_worked(job.run(), target.now);
    assert_eq!(target.failure(), Failure::INCORRECT_MESSAGE);
}

#[test]
fn attempts_and_duration_of_an_exchange_are_bounded() {
    let host = Host::new();
    let mut target = Target::new();
    for _ in 0..MOST_ATTEMPTS {
        target.send(&host.negotiate());
        target.fetch();
    }
    target.send(&host.negotiate());
    assert_eq!(target.failure(), Failure::FAILED);
    let mut target = Target::new();
    let start = target.now;
    assert!(!target.exchange.is_overdue(start));
    target.now += DEADLINE / 2;
    target.send(&host.negotiate());
    assert!(target.exchange.is_overdue(start + DEADLINE), "a beginning gives no more time");
    // A re-authentication that is never ended.
    let mut target = Target::new();
    target.authenticate(&host);
    target.now += DEADLINE * 5;
    target.send(&host.negotiate());
    assert!(target.exchange.is_authenticated() && !target.exchange.is_overdue(target.now));
    assert!(target.exchange.is_overdue(target.now + DEADLINE));
}

#[test]
fn a_fetch_with_a_too_small_buffer_can_be_repeated() {
    let host = Host::new();
    let mut target = Target::new();
    target.send(&host.negotiate());
    let mut message = [0; MESSAGE_MAX_BYTES];
    for room in [0, 1, 16, 47] {
        let status = target.exchange.fetch(room, &mut message, target.now).unwrap_err();
        assert!(status.is(Status::INVALID_FIELD) && status.dnr());
    }
    let len = target.exchange.fetch(48, &mut message, target.now).unwrap();
    target.send(&host.reply(&message[..len]));
    target.fetch();
    assert!(target.exchange.is_authenticated());
}

#[test]
fn a_host_can_reauthenticate_repeatedly_until_a_failure() {
    let host = Host::new();
    let mut target = Target::new();
    for _ in 0..10 {
        target.authenticate(&host);
    }
    target.has_key = false;
    target.send(&host.negotiate());
    assert_eq!(target.failure(), Failure::FAILED);
}

/// One step of a host that knows no secret.
#[derive(Clone, Debug)]
enum Step {
    Negotiate(u8, u8),
    Reply(Vec<u8>),
    Success2,
    Failure2,
    Bytes(Vec<u8>),
    Fetch(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop::collection::vec(any::<u8>(), 0..200);
    prop_oneof![
        3 => (0u8..5, 0u8..2).prop_map(|(hash, group)| Step::Negotiate(hash, group)),
        3 => prop::collection::vec(any::<u8>(), 64).prop_map(Step::Reply),
        2 => Just(Step::Success2),
        1 => Just(Step::Failure2),
        1 => bytes.prop_map(Step::Bytes),
        4 => (0u32..2048).prop_map(Step::Fetch),
    ]
}

proptest! {
    /// Random messages of a host without the secret, in any order: no other command is executed.
    #[test]
    fn no_host_is_authenticated_without_the_secret(
        steps in prop::collection::vec(step(), 1..40), mutual: bool,
    ) {
        let mut target = Target::new();
        target.controller = mutual.then_some(OTHER);
        for step in steps {
            match step {
                Step::Negotiate(hash, group) => {
                    let (hashes, groups) = (vec![HashId(hash)], vec![GroupId(group)]);
                    target.send(&Host { hashes, groups, ..Host::new() }.negotiate());
                }
                Step::Reply(proof) => {
                    let challenge = mutual.then_some(&proof[32..]);
                    let response = &proof[..32];
                    let reply = Reply { t_id: 7, response, challenge, seqnum: 0, value: &[] };
                    target.send(&written(|to| reply.emit(to)));
                }
                Step::Success2 => target.send(&Host::new().success2()),
                Step::Failure2 => {
                    target.send(&written(|to| Notice::Failure2(Failure::FAILED).emit(7, to)));
                }
                Step::Bytes(bytes) => target.send(&bytes),
                Step::Fetch(room) => {
                    let mut message = [0; MESSAGE_MAX_BYTES];
                    let _ = target.exchange.fetch(room, &mut message, target.now);
                }
            }
            prop_assert!(!target.exchange.is_authenticated());
            prop_assert!(target.exchange.is_overdue(target.now + DEADLINE));
        }
    }

    /// One bit of the host's answer changed anywhere: it fails.
    #[test]
    fn a_reply_with_any_changed_bit_fails(at in 0usize..48, bit in 0u8..8) {
        let host = Host::new();
        let mut target = Target::new();
        target.send(&host.negotiate());
        let mut reply = host.reply(&target.fetch());
        reply[at] ^= 1 << bit;
        // Reserved bytes, and S2, which counts only with a challenge.
        prop_assume!(!matches!(at, 2 | 3 | 7 | 9 | 12..16));
        target.send(&reply);
        prop_assert!(target.exchange.take_failure().is_some());
        prop_assert!(!target.exchange.is_authenticated());
    }
}
