//! Messages of a front-end, and the replies.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;
/// Regions of memory of one table.
pub const REGIONS: usize = 8;
/// Bytes of the longest payload that is accepted: that of a table of memory or a configuration space.
const MOST_BYTES: usize = 8 + 32 * REGIONS + 256;
/// Bytes of a configuration space that can be asked for.
const MOST_CONFIG_BYTES: u32 = 256;

/// Flags of a header: the version, and what it is.
const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The value of a message with a descriptor that has none.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// Requests of a front-end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestId(pub u32);

impl RequestId {
    /// Features of virtio that are offered.
    pub const GET_FEATURES: RequestId = RequestId(1);
    /// Those that are used.
    pub const SET_FEATURES: RequestId = RequestId(2);
    /// The session begins.
    pub const SET_OWNER: RequestId = RequestId(3);
    /// Deprecated.
    pub const RESET_OWNER: RequestId = RequestId(4);
    /// The memory of the guest.
    pub const SET_MEM_TABLE: RequestId = RequestId(5);
    /// Entries of a queue.
    pub const SET_VRING_NUM: RequestId = RequestId(8);
    /// Addresses of a queue.
    pub const SET_VRING_ADDR: RequestId = RequestId(9);
    /// The next entry of a queue.
    pub const SET_VRING_BASE: RequestId = RequestId(10);
    /// Stops a queue, and returns its next entry.
    pub const GET_VRING_BASE: RequestId = RequestId(11);
    /// What the guest signals.
    pub const SET_VRING_KICK: RequestId = RequestId(12);
    /// What signals the guest.
    pub const SET_VRING_CALL: RequestId = RequestId(13);
    /// What signals errors.
    pub const SET_VRING_ERR: RequestId = RequestId(14);
    /// Features of the protocol that are offered.
    pub const GET_PROTOCOL_FEATURES: RequestId = RequestId(15);
    /// Those that are used.
    pub const SET_PROTOCOL_FEATURES: RequestId = RequestId(16);
    /// The number of queues.
    pub const GET_QUEUE_NUM: RequestId = RequestId(17);
    /// Enables or disables a queue.
    pub const SET_VRING_ENABLE: RequestId = RequestId(18);
    /// The channel for requests of the back-end.
    pub const SET_BACKEND_REQ_FD: RequestId = RequestId(21);
    /// Reads the configuration space.
    pub const GET_CONFIG: RequestId = RequestId(24);
    /// Writes it.
    pub const SET_CONFIG: RequestId = RequestId(25);
}

/// The header of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What is requested.
    pub request: RequestId,
    /// The sender waits for an acknowledgement, if that was negotiated.
    pub needs_reply: bool,
    /// Bytes of the payload.
    pub payload_bytes: usize,
}

impl Header {
    /// Reads a header; `None` if it is none of a front-end, or its payload is too long.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let (request, flags) = (u32_at(bytes, 0)?, u32_at(bytes, 4)?);
        let payload_bytes = u32_at(bytes, 8)? as usize;
        let is_valid = flags & VERSION_MASK == VERSION && flags & REPLY == 0;
        (is_valid && payload_bytes <= MOST_BYTES).then_some(Header {
            request: RequestId(request),
            needs_reply: flags & NEED_REPLY != 0,
            payload_bytes,
        })
    }
}

/// A region of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRegion {
    /// Its address in the guest.
    pub guest_address: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Its address in the front-end.
    pub user_address: u64,
    /// Where in its descriptor it begins.
    pub offset: u64,
}

/// The addresses of a queue in the front-end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringAddress {
    /// The descriptor table.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
}

/// The payload of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// None, or one that is not read.
    None,
    /// A number.
    U64(u64),
    /// A number of a queue.
    Vring {
        /// The queue.
        index: u32,
        /// The number.
        num: u32,
    },
    /// A queue whose descriptor is sent along, or not.
    Descriptor {
        /// The queue.
        index: u32,
        /// Whether there is one.
        has_descriptor: bool,
    },
    /// The addresses of a queue.
    Address(u32, VringAddress),
    /// The memory of the guest.
    Memory(Vec<MemoryRegion>),
    /// A part of the configuration space.
    Config {
        /// Where it begins.
        offset: u32,
        /// Its length in bytes.
        len: u32,
        /// Flags, which are returned.
        flags: u32,
    },
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub body: Body,
}

impl Message {
    /// Reads a payload; `None` if it is too short or contradicts itself.
    pub fn parse(header: Header, payload: &[u8]) -> Option<Message> {
        let body = match header.request {
            RequestId::SET_FEATURES | RequestId::SET_PROTOCOL_FEATURES => {
                Body::U64(u64_at(payload, 0)?)
            }
            RequestId::SET_VRING_NUM
            | RequestId::SET_VRING_BASE
            | RequestId::GET_VRING_BASE
            | RequestId::SET_VRING_ENABLE => {
                Body::Vring { index: u32_at(payload, 0)?, num: u32_at(payload, 4)? }
            }
            RequestId::SET_VRING_KICK | RequestId::SET_VRING_CALL | RequestId::SET_VRING_ERR => {
                let value = u64_at(payload, 0)?;
                let has_descriptor = value & NO_DESCRIPTOR == 0;
                Body::Descriptor { index: value as u32 & 0xFF, has_descriptor }
            }
            RequestId::SET_VRING_ADDR => {
                let address = VringAddress {
                    descriptors: u64_at(payload, 8)?,
                    used: u64_at(payload, 16)?,
                    available: u64_at(payload, 24)?,
                };
                Body::Address(u32_at(payload, 0)?, address)
            }
            RequestId::SET_MEM_TABLE => {
                let count = u32_at(payload, 0)? as usize;
                if count > REGIONS {
                    return None;
                }
                let region = |n: usize| {
                    Some(MemoryRegion {
                        guest_address: u64_at(payload, 8 + 32 * n)?,
                        size_bytes: u64_at(payload, 16 + 32 * n)?,
                        user_address: u64_at(payload, 24 + 32 * n)?,
                        offset: u64_at(payload, 32 + 32 * n)?,
                    })
                };
                Body::Memory((0..count).map(region).collect::<Option<_>>()?)
            }
            RequestId::GET_CONFIG | RequestId::SET_CONFIG => {
                let (offset, len) = (u32_at(payload, 0)?, u32_at(payload, 4)?);
                if offset.checked_add(len).is_none_or(|end| end > MOST_CONFIG_BYTES) {
                    return None;
                }
                Body::Config { offset, len, flags: u32_at(payload, 8)? }
            }
            _ => Body::None,
        };
        Some(Message { header, body })
    }
}

/// A reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// A number: also an acknowledgement, 0 for success.
    U64(u64),
    /// The next entry of a queue.
    Vring {
        /// The queue.
        index: u32,
        /// The entry.
        num: u32,
    },
    /// A part of the configuration space.
    Config {
        /// Where it begins.
        offset: u32,
        /// The flags of the request.
        flags: u32,
        /// The bytes; none: it cannot be read.
        bytes: Vec<u8>,
    },
}

impl Reply {
    /// Returns its bytes, with the header.
    pub fn emit(&self, request: RequestId) -> Vec<u8> {
        let mut payload = Vec::new();
        match self {
            Reply::U64(value) => payload.extend(value.to_le_bytes()),
            Reply::Vring { index, num } => {
                payload.extend(index.to_le_bytes());
                payload.extend(num.to_le_bytes());
            }
            Reply::Config { offset, flags, bytes } => {
                payload.extend(offset.to_le_bytes());
                payload.extend((bytes.len() as u32).to_le_bytes());
                payload.extend(flags.to_le_bytes());
                payload.extend(bytes);
            }
        }
        let mut all = header(request.0, VERSION | REPLY, payload.len() as u32).to_vec();
        all.extend(payload);
        all
    }
}

/// The request of a back-end that says that the configuration space has changed.
pub fn config_change() -> [u8; HEADER_BYTES] {
    const CONFIG_CHANGE_MSG: u32 = 2;
    header(CONFIG_CHANGE_MSG, VERSION, 0)
}

fn header(request: u32, flags: u32, payload_bytes: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    for (place, value) in bytes.chunks_exact_mut(4).zip([request, flags, payload_bytes]) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(request: RequestId, payload: &[u8]) -> Option<Message> {
        let bytes = header(request.0, VERSION | NEED_REPLY, payload.len() as u32);
        Message::parse(Header::parse(&bytes)?, payload)
    }

    #[test]
    fn headers_other_than_version_1_requests_are_refused() {
        let good = Header { request: RequestId(11), needs_reply: true, payload_bytes: 8 };
        assert_eq!(Header::parse(&header(11, VERSION | NEED_REPLY, 8)), Some(good));
        for (flags, len) in [(0, 8), (2, 8), (VERSION | REPLY, 8), (VERSION, 1 << 20)] {
            assert_eq!(Header::parse(&header(11, flags, len)), None, "{flags} {len}");
        }
    }

    #[test]
    fn payloads_are_read_field_by_field() {
        let body = |request, payload: &[u8]| message(request, payload).map(|it| it.body);
        let numbers = |all: &[u64]| all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let ring = body(RequestId::SET_VRING_NUM, &[3, 0, 0, 0, 128, 0, 0, 0]);
        assert_eq!(ring, Some(Body::Vring { index: 3, num: 128 }));
        for (value, has_descriptor) in [(2u64, true), (0x102, false)] {
            let kick = body(RequestId::SET_VRING_KICK, &value.to_le_bytes());
            assert_eq!(kick, Some(Body::Descriptor { index: 2, has_descriptor }));
        }
        let address = VringAddress { descriptors: 7, used: 8, available: 9 };
        let found = body(RequestId::SET_VRING_ADDR, &numbers(&[5, 7, 8, 9, 10]));
        assert_eq!(found, Some(Body::Address(5, address)));
        let region = MemoryRegion { guest_address: 1, size_bytes: 2, user_address: 3, offset: 4 };
        let found = body(RequestId::SET_MEM_TABLE, &numbers(&[1, 1, 2, 3, 4]));
        assert_eq!(found, Some(Body::Memory(vec![region])));
        // A table that says that it has more than it has, or than is allowed.
        assert_eq!(body(RequestId::SET_MEM_TABLE, &numbers(&[2, 1, 2, 3, 4])), None);
        assert_eq!(body(RequestId::SET_MEM_TABLE, &numbers(&[9])), None);
        let config = |offset: u32, len: u32| {
            let payload: Vec<u8> = [offset, len, 1].iter().flat_map(|n| n.to_le_bytes()).collect();
            body(RequestId::GET_CONFIG, &payload)
        };
        assert_eq!(config(8, 60), Some(Body::Config { offset: 8, len: 60, flags: 1 }));
        assert_eq!(config(u32::MAX, 2), None);
        assert_eq!(config(0, 257), None);
    }

    #[test]
    fn replies_are_those_of_the_protocol() {
        let ring = Reply::Vring { index: 1, num: 9 }.emit(RequestId::GET_VRING_BASE);
        assert_eq!(ring, [11, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]);
        let config = Reply::Config { offset: 4, flags: 0, bytes: vec![0xAB; 2] };
        let config = config.emit(RequestId::GET_CONFIG);
        assert_eq!(config[8..], [14, 0, 0, 0, 4, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0xAB, 0xAB]);
        assert_eq!(config_change(), [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn no_message_panics(request in 0u32..48, payload in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = message(RequestId(request), &payload);
        }
    }
}
