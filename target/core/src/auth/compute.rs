//! The arithmetic of an exchange, separate from its states, for the worker thread.

use std::sync::Arc;

use nvme::Nqn;
use nvme::auth::{
    Challenge, Digest, Failure, GroupId, HashId, Negotiate, PrivateKey, PublicValue, Reply,
    Transaction, augment,
};

use super::{Keys, Policy};

/// Inputs of a new exchange. The random parts must be unpredictable.
#[derive(Debug)]
pub struct Start {
    /// The secrets of the host.
    pub keys: Arc<Keys>,
    /// Negotiable parameters.
    pub policy: Arc<Policy>,
    /// Random bytes, for C1.
    pub challenge: [u8; Digest::MAX_BYTES],
    /// Random bytes, for the group.
    pub private: PrivateKey,
    /// S1: not 0, and not the last one.
    pub seqnum: u32,
}

/// One exchange, from Negotiate to the verdict.
#[derive(Debug)]
pub struct Round {
    /// Transaction identifier, the host's choice.
    pub t_id: u16,
    hash: HashId,
    group: GroupId,
    seqnum: u32,
    challenge: Digest,
    private: PrivateKey,
    public: PublicValue,
    keys: Arc<Keys>,
    host: Nqn,
    subsystem: Nqn,
}

impl Round {
    /// The best that the policy and the host's offer have in common.
    ///
    /// # Errors
    /// They have no hash, or no group, in common.
    pub fn new(
        offer: &Negotiate,
        start: Start,
        host: Nqn,
        subsystem: Nqn,
    ) -> Result<Round, Failure> {
        let Start { keys, policy, challenge, private, seqnum } = start;
        let hash = policy.hashes.iter().copied().find(|ours| offer.hashes().any(|h| h == *ours));
        let hash = hash.ok_or(Failure::HASH_UNUSABLE)?;
        let group = policy.groups.iter().copied().find(|ours| offer.groups().any(|g| g == *ours));
        let group = group.ok_or(Failure::GROUP_UNUSABLE)?;
        let digest_bytes = hash.digest_bytes().ok_or(Failure::HASH_UNUSABLE)?;
        Ok(Round {
            t_id: offer.t_id,
            hash,
            group,
            seqnum,
            challenge: Digest::new(&challenge[..digest_bytes]),
            private,
            public: PublicValue::NONE,
            keys,
            host,
            subsystem,
        })
    }

    /// The hash and the group.
    pub fn agreed(&self) -> (HashId, GroupId) {
        (self.hash, self.group)
    }

    /// The message.
    pub fn challenge(&self) -> Challenge<'_> {
        Challenge {
            t_id: self.t_id,
            hash: self.hash,
            group: self.group,
            seqnum: self.seqnum,
            challenge: self.challenge.as_bytes(),
            value: self.public.as_bytes(),
        }
    }

    /// Whether there is a secret to prove ourselves with.
    pub(crate) fn has_controller_key(&self) -> bool {
        self.keys.controller.is_some()
    }

    /// Checks all of a Reply except its proof.
    ///
    /// # Errors
    /// A field has a wrong length, or the host requests a proof of the controller and there is no
    /// secret for it, or it sent our challenge back.
    pub fn check(&self, reply: &Reply<'_>) -> Result<(), Failure> {
        let lengths = (Some(reply.response.len()), Some(reply.value.len()));
        if lengths != (self.hash.digest_bytes(), self.group.value_bytes()) {
            return Err(Failure::INCORRECT_PAYLOAD);
        }
        let Some(challenge) = reply.challenge else { return Ok(()) };
        match !self.has_controller_key() || self.challenge.is(challenge) {
            true => Err(Failure::FAILED),
            false => Ok(()),
        }
    }

    /// Verifies R1 and computes R2, if requested.
    fn verdict(&self, reply: &DhchapReply) -> Result<Option<Digest>, Failure> {
        let bind = |challenge: &Digest| match &reply.value {
            None => Ok(challenge.clone()),
            Some(value) => {
                let shared = self.private.agree(self.group, value.as_bytes());
                let shared = shared.ok_or(Failure::FAILED)?;
                augment(self.hash, &shared, challenge.as_bytes()).ok_or(Failure::HASH_UNUSABLE)
            }
        };
        let Round { hash, t_id, host, subsystem, .. } = self;
        let at = Transaction { hash: *hash, t_id: *t_id, host, subsystem };
        let key = self.keys.host.key(host);
        let due = at.host_response(&key, &bind(&self.challenge)?, self.seqnum);
        if !due.is_some_and(|due| due.is(reply.response.as_bytes())) {
            return Err(Failure::FAILED);
        }
        let (Some(challenge), Some(secret)) = (&reply.challenge, &self.keys.controller) else {
            return Ok(None);
        };
        let key = secret.key(subsystem);
        Ok(at.controller_response(&key, &bind(challenge)?, reply.seqnum))
    }
}

/// A received Reply.
#[derive(Debug)]
pub struct DhchapReply {
    response: Digest,
    challenge: Option<Digest>,
    seqnum: u32,
    /// None for the null group.
    value: Option<PublicValue>,
}

/// Work that takes too long for a reactor's turn.
#[derive(Debug)]
pub enum DhComputation {
    /// Make the challenge.
    Challenge(Box<Round>),
    /// Verify the host's answer, and answer it.
    Verify(Box<Round>, Box<DhchapReply>),
}

/// A job that has been done.
#[derive(Debug)]
pub enum DhResult {
    /// The challenge is complete.
    Challenge(Box<Round>),
    /// The host has proved itself, or has not.
    Verdict {
        /// Transaction identifier.
        t_id: u16,
        /// Bytes of a digest.
        digest_bytes: u8,
        /// R2, if the host requested it; or why the exchange has failed.
        response: Result<Option<Digest>, Failure>,
    },
}

impl DhComputation {
    /// To verify a Reply that `Round::check` is content with.
    ///
    /// # Errors
    /// The public value is longer than any.
    pub fn verify(round: Box<Round>, reply: &Reply<'_>) -> Result<DhComputation, Failure> {
        let value = match reply.value {
            [] => None,
            value => Some(PublicValue::from_peer(value).ok_or(Failure::INCORRECT_PAYLOAD)?),
        };
        let answer = DhchapReply {
            response: Digest::new(reply.response),
            challenge: reply.challenge.map(Digest::new),
            seqnum: reply.seqnum,
            value,
        };
        Ok(DhComputation::Verify(round, Box::new(answer)))
    }

    /// Whether it takes microseconds only, so that it can be done by the reactor.
    pub(crate) fn is_light(&self) -> bool {
        let (DhComputation::Challenge(round) | DhComputation::Verify(round, _)) = self;
        round.group == GroupId::NULL
    }

    /// Does it.
    #[must_use]
    pub fn run(self) -> DhResult {
        match self {
            DhComputation::Challenge(mut round) => {
                if let Some(public) = round.private.public_value(round.group) {
                    round.public = public;
                }
                DhResult::Challenge(round)
            }
            DhComputation::Verify(round, reply) => DhResult::Verdict {
                t_id: round.t_id,
                digest_bytes: round.challenge.as_bytes().len() as u8,
                response: round.verdict(&reply),
            },
        }
    }
}
