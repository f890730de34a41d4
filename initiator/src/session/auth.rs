//! In-band authentication, the host's side: the exchange that a target requires in its response to
//! Connect.
//!
//! The arithmetic of the large groups is executed synchronously: no other association uses this thread.

use nvme::auth::{
    Challenge, Digest, Failure, GroupId, Kind, MESSAGE_MAX_BYTES, Negotiate, Notice, PrivateKey,
    Reply, Success1, Transaction, augment,
};
use nvme::fabrics::{Authentication, FabricsType};
use nvme::{PAGE_BYTES, Sgl};
use rdma::Buf;

use super::bring_up::Step;
use super::{Data, EndReason, Io, Options, Session};

/// State of an authentication exchange: the message that was last sent or requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AuthStep {
    Negotiate,
    Challenge,
    Reply,
    Success1,
    Success2,
}

impl AuthStep {
    pub(super) fn name(self) -> &'static str {
        match self {
            AuthStep::Negotiate => "Authentication Send (Negotiate)",
            AuthStep::Challenge => "Authentication Receive (Challenge)",
            AuthStep::Reply => "Authentication Send (Reply)",
            AuthStep::Success1 => "Authentication Receive (Success1)",
            AuthStep::Success2 => "Authentication Send (Success2)",
        }
    }
}

/// State kept between the messages of one exchange.
#[derive(Debug)]
pub(super) struct Proof {
    t_id: u16,
    seqnum: u32,
    challenge: [u8; Digest::MAX_BYTES],
    private: PrivateKey,
    /// Expected R2, if the controller has to authenticate itself.
    due: Option<Digest>,
}

impl Proof {
    /// Creates the state with random numbers; `None` if there are none available.
    fn new() -> Option<Proof> {
        let (mut numbers, mut challenge) = ([0; 6], [0; Digest::MAX_BYTES]);
        let mut private = [0; PrivateKey::BYTES];
        getrandom::fill(&mut numbers).ok()?;
        getrandom::fill(&mut challenge).ok()?;
        getrandom::fill(&mut private).ok()?;
        let [a, b, seqnum @ ..] = numbers;
        Some(Proof {
            t_id: u16::from_le_bytes([a, b]),
            // 0 would mean that there is no challenge.
            seqnum: u32::from_le_bytes(seqnum).max(1),
            challenge,
            private: PrivateKey::new(private),
            due: None,
        })
    }

    /// Writes the reply to a challenge to `to`; returns its length.
    fn reply(
        &mut self,
        message: &[u8],
        options: &Options,
        to: &mut [u8; MESSAGE_MAX_BYTES],
    ) -> Result<usize, Failure> {
        let c = Challenge::parse(self.heard(message, Kind::Challenge)?)?;
        let secret = options.secret.as_ref().ok_or(Failure::FAILED)?;
        let (host, subsystem) = (&options.hostnqn, &options.subnqn);
        let at = Transaction { hash: c.hash, t_id: c.t_id, host, subsystem };
        let shared = match c.group {
            GroupId::NULL => None,
            group => Some(self.private.agree(group, c.value).ok_or(Failure::GROUP_UNUSABLE)?),
        };
        let bind = |challenge: &[u8]| match &shared {
            None => Ok(Digest::new(challenge)),
            Some(shared) => augment(c.hash, shared, challenge).ok_or(Failure::HASH_UNUSABLE),
        };
        let response = at.host_response(&secret.key(host), &bind(c.challenge)?, c.seqnum);
        let response = response.ok_or(Failure::HASH_UNUSABLE)?;
        let own = &self.challenge[..response.as_bytes().len()];
        if let Some(secret) = &options.controller_secret {
            self.due = at.controller_response(&secret.key(subsystem), &bind(own)?, self.seqnum);
        }
        let value = self.private.public_value(c.group);
        let reply = Reply {
            t_id: self.t_id,
            response: response.as_bytes(),
            challenge: self.due.is_some().then_some(own),
            seqnum: if self.due.is_some() { self.seqnum } else { 0 },
            value: value.as_ref().map_or(&[], |value| value.as_bytes()),
        };
        reply.emit(to).ok_or(Failure::INCORRECT_PAYLOAD)
    }

    /// Evaluates the result: whether the target accepts the host, and has authenticated itself if
    /// it must; then returns whether it expects a success message.
    fn verdict(&self, message: &[u8]) -> Result<bool, Failure> {
        let success = Success1::parse(self.heard(message, Kind::Success1)?)?;
        match (&self.due, success.response) {
            (None, _) => Ok(false),
            (Some(due), Some(response)) if due.is(response) => Ok(true),
            (Some(_), _) => Err(Failure::FAILED),
        }
    }

    /// Returns the message, if it belongs to this exchange and is of the expected kind.
    fn heard<'a>(&self, message: &'a [u8], due: Kind) -> Result<&'a [u8], Failure> {
        match Kind::parse(message)? {
            (kind, t_id) if kind == due && t_id == self.t_id => Ok(message),
            (kind, _) if kind == due => Err(Failure::INCORRECT_PAYLOAD),
            _ => Err(Failure::INCORRECT_MESSAGE),
        }
    }
}

impl Session {
    /// Starts authentication on a queue, which the target requires.
    pub(super) fn authenticate(&mut self, qid: u16, io: &mut Io<'_>) {
        if self.options.secret.is_none() {
            return self.die(EndReason::Authentication, io);
        }
        let Some(proof) = Proof::new() else {
            return self.die(EndReason::NotAuthenticated { queue: qid, why: Failure::FAILED }, io);
        };
        let offer = Negotiate::new(proof.t_id, &self.options.hashes, &self.options.groups);
        self.proof = Some(Box::new(proof));
        let mut message = [0; MESSAGE_MAX_BYTES];
        let len = offer.emit(&mut message).unwrap_or_default();
        self.say(qid, AuthStep::Negotiate, &message[..len], io);
    }

    /// A message was sent, or the requested one was received in `page`.
    pub(super) fn on_talk(
        &mut self,
        qid: u16,
        talk: AuthStep,
        page: Option<&Buf>,
        io: &mut Io<'_>,
    ) {
        let Some(mut proof) = self.proof.take() else { return };
        // The target may still change the page: use one copy.
        let mut heard = [0; PAGE_BYTES];
        if let Some(page) = page {
            let bytes = io.pool.bytes(page);
            let len = bytes.len().min(PAGE_BYTES);
            heard[..len].copy_from_slice(&bytes[..len]);
        }
        let mut message = [0; MESSAGE_MAX_BYTES];
        match talk {
            AuthStep::Negotiate => self.listen(qid, AuthStep::Challenge, io),
            AuthStep::Reply => self.listen(qid, AuthStep::Success1, io),
            AuthStep::Challenge => match proof.reply(&heard, &self.options, &mut message) {
                Ok(len) => self.say(qid, AuthStep::Reply, &message[..len], io),
                Err(why) => return self.not_authenticated(qid, why, &heard, io),
            },
            AuthStep::Success1 => match proof.verdict(&heard) {
                Ok(true) => {
                    let len = Notice::Success2.emit(proof.t_id, &mut message).unwrap_or_default();
                    self.say(qid, AuthStep::Success2, &message[..len], io);
                }
                Ok(false) => return self.connected_queue(qid, io),
                Err(why) => return self.not_authenticated(qid, why, &heard, io),
            },
            AuthStep::Success2 => return self.connected_queue(qid, io),
        }
        self.proof = Some(proof);
    }

    fn not_authenticated(&mut self, queue: u16, why: Failure, heard: &[u8], io: &mut Io<'_>) {
        let ended = match Notice::parse(heard) {
            Ok(Notice::Failure1(why)) => EndReason::NotAuthenticated { queue, why },
            _ => EndReason::Unproved { queue, why },
        };
        self.die(ended, io);
    }

    fn say(&mut self, qid: u16, talk: AuthStep, message: &[u8], io: &mut Io<'_>) {
        let len = message.len() as u32;
        let Some(mut buf) = io.pool.take_any(len) else {
            return self.die(EndReason::NoMemory, io);
        };
        io.pool.bytes_mut(&mut buf).copy_from_slice(message);
        let sqe = Authentication::new(len).emit(FabricsType::AUTHENTICATION_SEND, Sgl::NONE);
        self.command_with(Step::Authenticate(qid, talk), qid, sqe, Data::Buf(buf), io);
    }

    fn listen(&mut self, qid: u16, talk: AuthStep, io: &mut Io<'_>) {
        let len = PAGE_BYTES as u32;
        let sqe = Authentication::new(len).emit(FabricsType::AUTHENTICATION_RECEIVE, Sgl::NONE);
        self.command(Step::Authenticate(qid, talk), qid, sqe, Some(len), io);
    }
}
