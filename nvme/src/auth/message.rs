//! The messages: total parsers of bytes from a peer, and their writers.
//!
//! Every parser takes exactly the bytes that were transferred, and rejects a message whose parts
//! do not add up to this length.

use super::{Failure, GroupId, HashId};
use crate::Field;

/// Bytes of the longest message: a Reply with two digests of 64 bytes and the largest value.
pub const MESSAGE_MAX_BYTES: usize = HEADER_BYTES + 2 * 64 + 1024;

/// Length of the common part of Challenge, Reply and Success1, and of a whole Success2.
const HEADER_BYTES: usize = 16;

/// Bytes before the protocol descriptors of a Negotiate.
const NEGOTIATE_BYTES: usize = 8;

/// Bytes of a protocol descriptor.
const DESCRIPTOR_BYTES: usize = 64;

/// Maximum number of identifiers of hashes, and of groups, in a descriptor.
const MOST_IDS: usize = 30;

/// The protocol identifier of DH-HMAC-CHAP in a descriptor.
const AUTHID_DHCHAP: u8 = 1;

/// Authentication type of messages common to all protocols.
const COMMON: u8 = 0;

/// Authentication type of DH-HMAC-CHAP.
const DHCHAP: u8 = 1;

/// The only reason code of failures; the explanation distinguishes them.
const REASON_FAILED: u8 = 1;

/// Kind of a message, from its first two bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// The host offers hashes and groups.
    Negotiate,
    /// The controller challenges.
    Challenge,
    /// The host replies, and may challenge the controller.
    Reply,
    /// The controller accepts the host, and answers a challenge of the host.
    Success1,
    /// The host accepts the controller.
    Success2,
    /// The controller rejects the host.
    Failure1,
    /// The host rejects the controller.
    Failure2,
}

impl Kind {
    /// The kind of a message and its transaction identifier.
    ///
    /// # Errors
    /// Incorrect payload if it is too short for both, incorrect message for any other kind.
    pub fn parse(bytes: &[u8]) -> Result<(Self, u16), Failure> {
        let head: &[u8; 6] = bytes.first_chunk().ok_or(Failure::INCORRECT_PAYLOAD)?;
        let all = [
            Self::Negotiate,
            Self::Challenge,
            Self::Reply,
            Self::Success1,
            Self::Success2,
            Self::Failure1,
            Self::Failure2,
        ];
        let kind = all.into_iter().find(|kind| kind.code() == [head[0], head[1]]);
        Ok((kind.ok_or(Failure::INCORRECT_MESSAGE)?, u16::get(&head[4..])))
    }

    /// Authentication type and identifier.
    const fn code(self) -> [u8; 2] {
        match self {
            Self::Negotiate => [COMMON, 0x00],
            Self::Challenge => [DHCHAP, 0x01],
            Self::Reply => [DHCHAP, 0x02],
            Self::Success1 => [DHCHAP, 0x03],
            Self::Success2 => [DHCHAP, 0x04],
            Self::Failure1 => [COMMON, 0xF1],
            Self::Failure2 => [COMMON, 0xF0],
        }
    }
}

/// The common part of Challenge, Reply and Success1, and the whole of Success2.
#[derive(Clone, Copy, Default)]
struct Header {
    t_id: u16,
    /// Bytes of a digest.
    hl: u8,
    /// Challenge: the hash. Reply: a challenge follows. Success1: a response follows.
    first: u8,
    /// Challenge: the group.
    second: u8,
    /// Bytes of the public value.
    dhvlen: u16,
    seqnum: u32,
}

impl Header {
    /// Returns the header of a message of `kind`, and the bytes that follow it.
    fn parse(bytes: &[u8], kind: Kind) -> Result<(Self, &[u8]), Failure> {
        let (head, rest) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or(Failure::INCORRECT_PAYLOAD)?;
        if kind.code() != [head[0], head[1]] {
            return Err(Failure::INCORRECT_MESSAGE);
        }
        let header = Self {
            t_id: u16::get(&head[4..]),
            hl: head[6],
            first: head[8],
            second: head[9],
            dhvlen: u16::get(&head[10..]),
            seqnum: u32::get(&head[12..]),
        };
        Ok((header, rest))
    }

    /// Writes the header and the bytes that follow it; returns the length of both, or `None` if
    /// `to` is too short.
    fn emit(&self, kind: Kind, rest: [&[u8]; 3], to: &mut [u8]) -> Option<usize> {
        let len = HEADER_BYTES + rest.iter().map(|part| part.len()).sum::<usize>();
        let to = to.get_mut(..len)?;
        to.fill(0);
        kind.code().put(to);
        self.t_id.put(&mut to[4..]);
        to[6] = self.hl;
        to[8] = self.first;
        to[9] = self.second;
        self.dhvlen.put(&mut to[10..]);
        self.seqnum.put(&mut to[12..]);
        let mut at = HEADER_BYTES;
        for part in rest {
            to[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        Some(len)
    }
}

/// The host's offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiate {
    /// Transaction identifier, chosen by the host.
    pub t_id: u16,
    /// Secure channel concatenation that the host requests; 0 for none.
    pub sc_c: u8,
    hashes: Ids,
    groups: Ids,
}

impl Negotiate {
    /// Creates an offer of these, in the order of preference; of each the first 30 are used.
    pub fn new(t_id: u16, hashes: &[HashId], groups: &[GroupId]) -> Self {
        let hashes = Ids::collect(hashes.iter().map(|hash| hash.0));
        let groups = Ids::collect(groups.iter().map(|group| group.0));
        Self { t_id, sc_c: 0, hashes, groups }
    }

    /// Returns the hashes offered.
    pub fn hashes(&self) -> impl Iterator<Item = HashId> + '_ {
        self.hashes.as_slice().iter().map(|&id| HashId(id))
    }

    /// Returns the groups offered.
    pub fn groups(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.groups.as_slice().iter().map(|&id| GroupId(id))
    }

    /// Reads the message, and the first descriptor of DH-HMAC-CHAP in it.
    ///
    /// # Errors
    /// The explanation of the failure message.
    pub fn parse(bytes: &[u8]) -> Result<Self, Failure> {
        let (kind, t_id) = Kind::parse(bytes)?;
        if kind != Kind::Negotiate {
            return Err(Failure::INCORRECT_MESSAGE);
        }
        let (head, rest) =
            bytes.split_first_chunk::<NEGOTIATE_BYTES>().ok_or(Failure::INCORRECT_PAYLOAD)?;
        let (descriptors, odd) = rest.as_chunks::<DESCRIPTOR_BYTES>();
        if descriptors.len() != usize::from(head[7]) || !odd.is_empty() {
            return Err(Failure::INCORRECT_PAYLOAD);
        }
        let ours = descriptors.iter().find(|descriptor| descriptor[0] == AUTHID_DHCHAP);
        let ours = ours.ok_or(Failure::PROTOCOL_UNUSABLE)?;
        Ok(Self {
            t_id,
            sc_c: head[6],
            hashes: Ids::parse(ours[2], &ours[4..])?,
            groups: Ids::parse(ours[3], &ours[4 + MOST_IDS..])?,
        })
    }

    /// Writes the message; returns its length, or `None` if `to` is too short.
    pub fn emit(&self, to: &mut [u8]) -> Option<usize> {
        let to = to.get_mut(..NEGOTIATE_BYTES + DESCRIPTOR_BYTES)?;
        to.fill(0);
        Kind::Negotiate.code().put(to);
        self.t_id.put(&mut to[4..]);
        to[6] = self.sc_c;
        to[7] = 1;
        let descriptor = &mut to[NEGOTIATE_BYTES..];
        descriptor[0] = AUTHID_DHCHAP;
        descriptor[2] = self.hashes.count;
        descriptor[3] = self.groups.count;
        descriptor[4..4 + MOST_IDS].copy_from_slice(&self.hashes.ids);
        descriptor[4 + MOST_IDS..].copy_from_slice(&self.groups.ids);
        Some(NEGOTIATE_BYTES + DESCRIPTOR_BYTES)
    }
}

/// A list of identifiers; those beyond the count are zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ids {
    ids: [u8; MOST_IDS],
    count: u8,
}

impl Ids {
    fn collect(from: impl Iterator<Item = u8>) -> Self {
        let mut ids = Self { ids: [0; MOST_IDS], count: 0 };
        for (to, id) in ids.ids.iter_mut().zip(from) {
            *to = id;
            ids.count += 1;
        }
        ids
    }

    fn parse(count: u8, from: &[u8]) -> Result<Self, Failure> {
        let listed = from.get(..usize::from(count)).filter(|ids| ids.len() <= MOST_IDS);
        Ok(Self::collect(listed.ok_or(Failure::INCORRECT_PAYLOAD)?.iter().copied()))
    }

    fn as_slice(&self) -> &[u8] {
        &self.ids[..usize::from(self.count)]
    }
}

/// The controller's challenge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Challenge<'a> {
    /// Transaction identifier.
    pub t_id: u16,
    /// The hash that the controller chose.
    pub hash: HashId,
    /// The group that it chose.
    pub group: GroupId,
    /// S1.
    pub seqnum: u32,
    /// C1, as long as a digest.
    pub challenge: &'a [u8],
    /// The controller's public value; empty for the null group.
    pub value: &'a [u8],
}

impl<'a> Challenge<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// The explanation of the failure message: also if this crate does not compute the hash or
    /// the group, or if a part does not have their length.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Failure> {
        let (header, rest) = Header::parse(bytes, Kind::Challenge)?;
        let (hash, group) = (HashId(header.first), GroupId(header.second));
        let digest_bytes = hash.digest_bytes().ok_or(Failure::HASH_UNUSABLE)?;
        let value_bytes = group.value_bytes().ok_or(Failure::GROUP_UNUSABLE)?;
        let lengths = (usize::from(header.hl), usize::from(header.dhvlen));
        // The controller does not know the length that the host requests: more bytes may follow.
        let parts = rest.get(..digest_bytes + value_bytes);
        let parts = parts.filter(|_| lengths == (digest_bytes, value_bytes));
        let (challenge, value) = parts.ok_or(Failure::INCORRECT_PAYLOAD)?.split_at(digest_bytes);
        Ok(Self { t_id: header.t_id, hash, group, seqnum: header.seqnum, challenge, value })
    }

    /// Writes the message; returns its length, or `None` if `to` is too short.
    pub fn emit(&self, to: &mut [u8]) -> Option<usize> {
        let header = Header {
            t_id: self.t_id,
            hl: self.challenge.len() as u8,
            first: self.hash.0,
            second: self.group.0,
            dhvlen: self.value.len() as u16,
            seqnum: self.seqnum,
        };
        header.emit(Kind::Challenge, [self.challenge, self.value, &[]], to)
    }
}

/// The host's reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reply<'a> {
    /// Transaction identifier.
    pub t_id: u16,
    /// R1.
    pub response: &'a [u8],
    /// C2, as long as R1, if the host requires the controller to authenticate itself.
    pub challenge: Option<&'a [u8]>,
    /// S2.
    pub seqnum: u32,
    /// The host's public value; empty for the null group.
    pub value: &'a [u8],
}

impl<'a> Reply<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// Incorrect payload if the parts do not add up to the message.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Failure> {
        let (header, rest) = Header::parse(bytes, Kind::Reply)?;
        let (hl, dhvlen) = (usize::from(header.hl), usize::from(header.dhvlen));
        if rest.len() != 2 * hl + dhvlen || header.first > 1 {
            return Err(Failure::INCORRECT_PAYLOAD);
        }
        let (response, rest) = rest.split_at(hl);
        let (challenge, value) = rest.split_at(hl);
        let challenge = (header.first == 1).then_some(challenge);
        Ok(Self { t_id: header.t_id, response, challenge, seqnum: header.seqnum, value })
    }

    /// Writes the message; returns its length, or `None` if `to` is too short.
    pub fn emit(&self, to: &mut [u8]) -> Option<usize> {
        let hl = self.response.len();
        let header = Header {
            t_id: self.t_id,
            hl: hl as u8,
            first: self.challenge.is_some().into(),
            second: 0,
            dhvlen: self.value.len() as u16,
            seqnum: self.seqnum,
        };
        // The bytes of C2 exist also if it is unused.
        let none = [0; 64];
        let challenge = self.challenge.or(none.get(..hl))?;
        header.emit(Kind::Reply, [self.response, challenge, self.value], to)
    }
}

/// The controller accepts the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Success1<'a> {
    /// Transaction identifier.
    pub t_id: u16,
    /// Bytes of a digest.
    pub digest_bytes: u8,
    /// R2, if the host had sent a challenge.
    pub response: Option<&'a [u8]>,
}

impl<'a> Success1<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// Incorrect payload if it is shorter than its header specifies.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Failure> {
        let (header, rest) = Header::parse(bytes, Kind::Success1)?;
        let response = match header.first {
            0 => None,
            1 => Some(rest.get(..usize::from(header.hl)).ok_or(Failure::INCORRECT_PAYLOAD)?),
            _ => return Err(Failure::INCORRECT_PAYLOAD),
        };
        Ok(Self { t_id: header.t_id, digest_bytes: header.hl, response })
    }

    /// Writes the message; returns its length, or `None` if `to` is too short.
    pub fn emit(&self, to: &mut [u8]) -> Option<usize> {
        let first = self.response.is_some().into();
        let header = Header { t_id: self.t_id, hl: self.digest_bytes, first, ..Header::default() };
        header.emit(Kind::Success1, [self.response.unwrap_or_default(), &[], &[]], to)
    }
}

/// The messages without parts: Success2 and the two failures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// The host accepts the controller.
    Success2,
    /// The controller rejects the host, with this explanation.
    Failure1(Failure),
    /// The host rejects the controller, with this explanation.
    Failure2(Failure),
}

impl Notice {
    /// Reads the message.
    ///
    /// # Errors
    /// The explanation of the failure message.
    pub fn parse(bytes: &[u8]) -> Result<Self, Failure> {
        let (kind, _) = Kind::parse(bytes)?;
        let why = || bytes.get(7).map(|&why| Failure(why)).ok_or(Failure::INCORRECT_PAYLOAD);
        match kind {
            Kind::Success2 => Header::parse(bytes, kind).map(|_| Self::Success2),
            Kind::Failure1 => why().map(Self::Failure1),
            Kind::Failure2 => why().map(Self::Failure2),
            _ => Err(Failure::INCORRECT_MESSAGE),
        }
    }

    /// Writes the message of transaction `t_id`; returns its length, or `None` if `to` is too short.
    pub fn emit(self, t_id: u16, to: &mut [u8]) -> Option<usize> {
        let (kind, why) = match self {
            Self::Success2 => {
                let header = Header { t_id, ..Header::default() };
                return header.emit(Kind::Success2, [&[]; 3], to);
            }
            Self::Failure1(why) => (Kind::Failure1, why),
            Self::Failure2(why) => (Kind::Failure2, why),
        };
        let to = to.get_mut(..8)?;
        to.fill(0);
        kind.code().put(to);
        t_id.put(&mut to[4..]);
        to[6] = REASON_FAILED;
        to[7] = why.0;
        Some(8)
    }
}

#[cfg(test)]
mod tests {
    use crate::auth::message::*;
    use proptest::prelude::*;

    fn written(emit: impl FnOnce(&mut [u8]) -> Option<usize>) -> Vec<u8> {
        let mut bytes = [0xEE; MESSAGE_MAX_BYTES];
        let len = emit(&mut bytes).unwrap();
        bytes[..len].to_vec()
    }

    #[test]
    fn negotiate_message_of_linux_round_trips() {
        // nvme-tcp and nvme-rdma of 6.12 with no limits: three hashes, six groups.
        let mut linux = vec![0, 0, 0, 0, 0x07, 0, 0, 1, 1, 0, 3, 6];
        linux.extend([1, 2, 3]);
        linux.resize(8 + 4 + 30, 0);
        linux.extend([0, 1, 2, 3, 4, 5]);
        linux.resize(72, 0);
        let negotiate = Negotiate::parse(&linux).unwrap();
        assert_eq!(negotiate.t_id, 7);
        assert!(negotiate.hashes().eq(HashId::ALL) && negotiate.groups().eq(GroupId::ALL));
        assert_eq!(negotiate, Negotiate::new(7, &HashId::ALL, &GroupId::ALL));
        assert_eq!(written(|to| negotiate.emit(to)), linux);
    }

    #[test]
    fn inconsistent_negotiate_messages_are_refused() {
        let good = written(|to| Negotiate::new(7, &HashId::ALL, &GroupId::ALL).emit(to));
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Negotiate::parse(&bytes).unwrap_err()
        };
        assert_eq!(with(7, 2), Failure::INCORRECT_PAYLOAD);
        assert_eq!(with(7, 0), Failure::INCORRECT_PAYLOAD);
        assert_eq!(with(8, 2), Failure::PROTOCOL_UNUSABLE);
        assert_eq!(with(10, 31), Failure::INCORRECT_PAYLOAD);
        assert_eq!(with(11, 31), Failure::INCORRECT_PAYLOAD);
        assert_eq!(with(11, 255), Failure::INCORRECT_PAYLOAD);
        assert_eq!(with(0, 1), Failure::INCORRECT_MESSAGE);
        for len in 0..good.len() {
            assert!(Negotiate::parse(&good[..len]).is_err(), "{len} bytes");
        }
        assert!(Negotiate::parse(&[&good[..], &[0]].concat()).is_err());
        // Another protocol may be first.
        let mut two = good.clone();
        two[7] = 2;
        two.splice(8..8, [0xFE; 64]);
        assert!(Negotiate::parse(&two).is_ok());
    }

    #[test]
    fn dhchap_message_layouts_match_the_specification() {
        let challenge = Challenge {
            t_id: 0x0102,
            hash: HashId::SHA256,
            group: GroupId::NULL,
            seqnum: 0x0A0B_0C0D,
            challenge: &[0xC1; 32],
            value: &[],
        };
        let bytes = written(|to| challenge.emit(to));
        assert_eq!(bytes[..16], [1, 1, 0, 0, 2, 1, 32, 0, 1, 0, 0, 0, 0x0D, 0x0C, 0x0B, 0x0A]);
        assert_eq!(bytes.len(), 48);
        let reply = Reply {
            t_id: 0x0102,
            response: &[0x51; 32],
            challenge: Some(&[0xC2; 32]),
            seqnum: 1,
            value: &[9; 256],
        };
        let bytes = written(|to| reply.emit(to));
        assert_eq!(bytes[..16], [1, 2, 0, 0, 2, 1, 32, 0, 1, 0, 0, 1, 1, 0, 0, 0]);
        assert_eq!((bytes.len(), bytes[47], bytes[48], bytes[80]), (336, 0x51, 0xC2, 9));
        let success = Success1 { t_id: 0x0102, digest_bytes: 32, response: Some(&[0x52; 32]) };
        let bytes = written(|to| success.emit(to));
        assert_eq!(bytes[..16], [1, 3, 0, 0, 2, 1, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes.len(), 48);
        let notice = |notice: Notice| written(|to| notice.emit(0x0102, to));
        assert_eq!(notice(Notice::Success2), [1, 4, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let failed = notice(Notice::Failure1(Failure::FAILED));
        assert_eq!(failed, [0, 0xF1, 0, 0, 2, 1, 1, 1]);
        let failed = notice(Notice::Failure2(Failure::HASH_UNUSABLE));
        assert_eq!(failed, [0, 0xF0, 0, 0, 2, 1, 1, 4]);
        assert_eq!(Challenge::parse(&failed), Err(Failure::INCORRECT_PAYLOAD));
        assert_eq!(Success1::parse(&notice(Notice::Success2)), Err(Failure::INCORRECT_MESSAGE));
    }

    #[test]
    fn a_message_cut_anywhere_is_refused() {
        let reply =
            Reply { t_id: 1, response: &[1; 48], challenge: None, seqnum: 0, value: &[3; 1024] };
        let bytes = written(|to| reply.emit(to));
        assert_eq!(Reply::parse(&bytes), Ok(reply));
        for len in 0..bytes.len() {
            assert_eq!(Reply::parse(&bytes[..len]), Err(Failure::INCORRECT_PAYLOAD));
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Reply::parse(&longer), Err(Failure::INCORRECT_PAYLOAD));
        let mut to = vec![0; bytes.len() - 1];
        assert_eq!(reply.emit(&mut to), None);
    }

    proptest! {
        #[test]
        fn arbitrary_messages_fail_or_round_trip(mut bytes in prop::collection::vec(any::<u8>(), 0..1400),
                                  kind in 0u8..8, small: bool) {
            // In half of the cases, the beginning of a possibly valid message.
            if small && bytes.len() > 16 {
                let code = [[0, 0], [1, 1], [1, 2], [1, 3], [1, 4], [0, 0xF1], [0, 0xF0], [2, 2]];
                bytes[..2].copy_from_slice(&code[usize::from(kind)]);
                bytes[6] %= 65;
                bytes[8] %= 4;
                bytes[9] %= 7;
                bytes[11] %= 5;
            }
            let _ = Kind::parse(&bytes);
            if let Ok(it) = Negotiate::parse(&bytes) {
                prop_assert_eq!(Negotiate::parse(&written(|to| it.emit(to))), Ok(it));
            }
            if let Ok(it) = Challenge::parse(&bytes) {
                let again = written(|to| it.emit(to));
                prop_assert_eq!(Challenge::parse(&again), Ok(it));
            }
            if let Ok(it) = Reply::parse(&bytes) && it.response.len() <= 64 && it.value.len() <= 1024 {
                let again = written(|to| it.emit(to));
                prop_assert_eq!(Reply::parse(&again), Ok(it));
            }
            if let Ok(it) = Success1::parse(&bytes) {
                let again = written(|to| it.emit(to));
                prop_assert_eq!(Success1::parse(&again), Ok(it));
            }
            if let Ok(it) = Notice::parse(&bytes) {
                prop_assert_eq!(Notice::parse(&written(|to| it.emit(5, to))), Ok(it));
            }
        }

        #[test]
        fn replies_round_trip(hl in prop::sample::select(vec![32usize, 48, 64]), mutual: bool,
                             group in 0u8..6, t_id: u16, seqnum: u32) {
            let size = GroupId(group).value_bytes().unwrap();
            let (digest, value) = (vec![7; hl], vec![8; size]);
            let challenge = mutual.then_some(&digest[..]);
            let reply = Reply { t_id, response: &digest, challenge, seqnum, value: &value };
            let bytes = written(|to| reply.emit(to));
            prop_assert!(bytes.len() <= MESSAGE_MAX_BYTES);
            prop_assert_eq!(Kind::parse(&bytes), Ok((Kind::Reply, t_id)));
            prop_assert_eq!(Reply::parse(&bytes), Ok(reply));
        }
    }
}
