//! Operation codes of the base transport header: one table of their properties (IBTA volume 1, 9.2
//! "Base Transport Header", table 38, and annex A17 for the congestion notification of RoCEv2).

/// Operation codes supported by this transport: reliable connection, the datagrams of connection
/// management, and congestion notification.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are those of the InfiniBand architecture")]
pub enum Opcode {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImmediate = 0x03,
    SendOnly = 0x04,
    SendOnlyImmediate = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImmediate = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImmediate = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Acknowledge = 0x11,
    AtomicAcknowledge = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
    UdSendOnly = 0x64,
    UdSendOnlyImmediate = 0x65,
    CongestionNotification = 0x81,
    /// Our own, from the range that the architecture leaves to manufacturers: a NAK for a missing
    /// packet with a bitmap of the packets received after it. Sent only to peers of this
    /// implementation.
    SelectiveAcknowledge = 0xc0,
}

/// Kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// A message for a posted receive.
    Send,
    /// Data for remote memory.
    Write,
    /// A request for data of remote memory.
    ReadRequest,
    /// Data of remote memory.
    ReadResponse,
    /// A positive or negative acknowledgement.
    Acknowledge,
    /// The response to an atomic request.
    AtomicAcknowledge,
    /// An atomic request: compare and swap, or fetch and add.
    Atomic,
    /// A datagram.
    Datagram,
    /// Congestion notification.
    Congestion,
}

/// Position of a packet in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// More packets follow.
    First,
    /// Packets before and after.
    Middle,
    /// Packets before.
    Last,
    /// The whole message.
    Only,
}

impl Position {
    /// Whether a message begins here.
    #[must_use]
    pub const fn begins(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Whether a message ends here.
    pub const fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// Required payload length of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadRule {
    /// None.
    None,
    /// Exactly the path MTU.
    Full,
    /// At least one, at most the path MTU.
    Some,
    /// At most the path MTU.
    Any,
}

impl PayloadRule {
    /// Whether `len` bytes satisfy the rule on a path with this MTU.
    pub const fn allows(self, len: usize, mtu: usize) -> bool {
        match self {
            PayloadRule::None => len == 0,
            PayloadRule::Full => len == mtu,
            PayloadRule::Some => len >= 1 && len <= mtu,
            PayloadRule::Any => len <= mtu,
        }
    }
}

/// A set of extended headers. On the wire they are in the order of these constants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headers(u8);

impl Headers {
    /// No extended header.
    pub const NONE: Headers = Headers(0);
    /// Datagram extended transport header, 8 bytes.
    pub const DETH: Headers = Headers(1);
    /// RDMA extended transport header, 16 bytes.
    pub const RETH: Headers = Headers(2);
    /// Atomic extended transport header, 28 bytes.
    pub const ATOMIC: Headers = Headers(4);
    /// Acknowledge extended transport header, 4 bytes.
    pub const AETH: Headers = Headers(8);
    /// Atomic acknowledge extended transport header, 8 bytes.
    pub const ATOMIC_ACK: Headers = Headers(16);
    /// Immediate data, 4 bytes.
    pub const IMMEDIATE: Headers = Headers(32);
    /// Invalidate extended transport header, 4 bytes.
    pub const IETH: Headers = Headers(64);
    /// Bitmap of 128 packets, 16 bytes; see [`Opcode::SelectiveAcknowledge`].
    pub const HELD: Headers = Headers(128);

    /// The union of both sets.
    #[must_use]
    pub const fn and(self, other: Headers) -> Headers {
        Headers(self.0 | other.0)
    }

    /// Whether all of `other` are in this set.
    pub const fn has(self, other: Headers) -> bool {
        self.0 & other.0 == other.0
    }

    /// Length of these headers after the base transport header: 0 to 28 bytes.
    pub const fn bytes(self) -> usize {
        const SIZES: [usize; 8] = [8, 16, 28, 4, 8, 4, 4, 16];
        let (mut sum, mut bit) = (0, 0);
        while bit < SIZES.len() {
            if self.0 >> bit & 1 == 1 {
                sum += SIZES[bit];
            }
            bit += 1;
        }
        sum
    }
}

/// One row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The code.
    pub opcode: Opcode,
    /// Kind of operation.
    pub operation: Operation,
    /// Position in the message.
    pub position: Position,
    /// Extended headers.
    pub headers: Headers,
    /// Their length.
    pub header_bytes: usize,
    /// Required payload.
    pub payload: PayloadRule,
    /// Whether the message consumes a posted receive (a write does only by its immediate data, so
    /// with its last packet).
    pub takes_receive: bool,
    /// Whether it is sent by a requester, so that it counts in the responder's expected sequence
    /// numbers.
    pub request: bool,
    /// Whether its arrival proves that all requests before it have been executed.
    pub acknowledges: bool,
}

const fn row(
    opcode: Opcode,
    operation: Operation,
    position: Position,
    headers: Headers,
    payload: PayloadRule,
) -> Row {
    use Operation as O;
    let immediate = headers.has(Headers::IMMEDIATE);
    let response = matches!(operation, O::ReadResponse | O::Acknowledge | O::AtomicAcknowledge);
    Row {
        opcode,
        operation,
        position,
        headers,
        header_bytes: headers.bytes(),
        payload,
        takes_receive: match operation {
            O::Send => position.begins(),
            O::Write => immediate,
            _ => false,
        },
        request: matches!(operation, O::Send | O::Write | O::ReadRequest | O::Atomic),
        acknowledges: response,
    }
}

/// The table. All properties of operation codes are read from here.
#[rustfmt::skip]
const TABLE: [Row; 27] = {
    use {Headers as H, Opcode as C, Operation as O, PayloadRule as P, Position::*};
    [
        row(C::SendFirst,              O::Send,              First,  H::NONE,                           P::Full),
        row(C::SendMiddle,             O::Send,              Middle, H::NONE,                           P::Full),
        row(C::SendLast,               O::Send,              Last,   H::NONE,                           P::Some),
        row(C::SendLastImmediate,      O::Send,              Last,   H::IMMEDIATE,                      P::Some),
        row(C::SendOnly,               O::Send,              Only,   H::NONE,                           P::Any),
        row(C::SendOnlyImmediate,      O::Send,              Only,   H::IMMEDIATE,                      P::Any),
        row(C::WriteFirst,             O::Write,             First,  H::RETH,                           P::Full),
        row(C::WriteMiddle,            O::Write,             Middle, H::NONE,                           P::Full),
        row(C::WriteLast,              O::Write,             Last,   H::NONE,                           P::Some),
        row(C::WriteLastImmediate,     O::Write,             Last,   H::IMMEDIATE,                      P::Some),
        row(C::WriteOnly,              O::Write,             Only,   H::RETH,                           P::Any),
        row(C::WriteOnlyImmediate,     O::Write,             Only,   H::RETH.and(H::IMMEDIATE),         P::Any),
        row(C::ReadRequest,            O::ReadRequest,       Only,   H::RETH,                           P::None),
        row(C::ReadResponseFirst,      O::ReadResponse,      First,  H::AETH,                           P::Full),
        row(C::ReadResponseMiddle,     O::ReadResponse,      Middle, H::NONE,                           P::Full),
        row(C::ReadResponseLast,       O::ReadResponse,      Last,   H::AETH,                           P::Some),
        row(C::ReadResponseOnly,       O::ReadResponse,      Only,   H::AETH,                           P::Any),
        row(C::Acknowledge,            O::Acknowledge,       Only,   H::AETH,                           P::None),
        row(C::AtomicAcknowledge,      O::AtomicAcknowledge, Only,   H::AETH.and(H::ATOMIC_ACK),        P::None),
        row(C::CompareSwap,            O::Atomic,            Only,   H::ATOMIC,                         P::None),
        row(C::FetchAdd,               O::Atomic,            Only,   H::ATOMIC,                         P::None),
        row(C::SendLastInvalidate,     O::Send,              Last,   H::IETH,                           P::Some),
        row(C::SendOnlyInvalidate,     O::Send,              Only,   H::IETH,                           P::Any),
        row(C::UdSendOnly,             O::Datagram,          Only,   H::DETH,                           P::Any),
        row(C::UdSendOnlyImmediate,    O::Datagram,          Only,   H::DETH.and(H::IMMEDIATE),         P::Any),
        row(C::CongestionNotification, O::Congestion,        Only,   H::NONE,                           P::Any),
        row(C::SelectiveAcknowledge,   O::Acknowledge,       Only,   H::AETH.and(H::HELD),              P::None),
    ]
};

/// Row of each code, 255 if there is none.
const INDEX: [u8; 256] = {
    let mut index = [u8::MAX; 256];
    let mut at = 0;
    while at < TABLE.len() {
        index[TABLE[at].opcode as usize] = at as u8;
        at += 1;
    }
    index
};

impl Row {
    /// The row of the operation code of a byte, if it is supported. A packet with any other is
    /// dropped.
    #[inline]
    pub fn from_wire(byte: u8) -> Option<&'static Row> {
        TABLE.get(usize::from(INDEX[usize::from(byte)]))
    }
}

impl Opcode {
    /// The operation code of a byte, if it is supported.
    pub fn from_wire(byte: u8) -> Option<Opcode> {
        Row::from_wire(byte).map(|row| row.opcode)
    }

    /// Its byte.
    pub const fn to_wire(self) -> u8 {
        self as u8
    }

    /// Its row of the table.
    #[inline]
    pub const fn row(self) -> &'static Row {
        &TABLE[INDEX[self as usize] as usize]
    }

    /// The code of a packet at this position of a message. `last`: extended header that the last
    /// packet has in addition, immediate data or a key to invalidate.
    pub fn at(operation: Operation, position: Position, last: Headers) -> Option<Opcode> {
        let last = if position.ends() { last } else { Headers::NONE };
        let rows = TABLE.iter().filter(|r| r.operation == operation && r.position == position);
        rows.into_iter().find(|row| row.headers.has(last)).map(|row| row.opcode)
    }

    /// Every known code.
    pub fn all() -> impl Iterator<Item = Opcode> {
        TABLE.iter().map(|row| row.opcode)
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::opcode::*;

    #[test]
    fn every_code_finds_its_own_row_and_nothing_else_is_known() {
        let known: Vec<u8> = (0..=255).filter(|b| Opcode::from_wire(*b).is_some()).collect();
        assert_eq!(known.len(), TABLE.len());
        for opcode in Opcode::all() {
            assert_eq!(opcode.row().opcode, opcode);
            assert_eq!(Opcode::from_wire(opcode.to_wire()), Some(opcode));
        }
        for unknown in [0x15, 0x18, 0x1c, 0x1d, 0x20, 0x63, 0x80, 0xff] {
            assert_eq!(Opcode::from_wire(unknown), None, "{unknown:#x}");
        }
    }

    #[test]
    fn derived_opcode_properties_match_the_specification() {
        let takers: Vec<Opcode> = Opcode::all().filter(|o| o.row().takes_receive).collect();
        assert_eq!(
            takers,
            [
                Opcode::SendFirst,
                Opcode::SendOnly,
                Opcode::SendOnlyImmediate,
                Opcode::WriteLastImmediate,
                Opcode::WriteOnlyImmediate,
                Opcode::SendOnlyInvalidate,
            ]
        );
        for opcode in Opcode::all() {
            let row = opcode.row();
            assert!(!(row.request && row.acknowledges), "{opcode:?}");
            let connected = opcode.to_wire() < 0x20 || opcode == Opcode::SelectiveAcknowledge;
            assert_eq!(row.request || row.acknowledges, connected, "{opcode:?}");
        }
        assert_eq!(Opcode::WriteOnlyImmediate.row().header_bytes, 20);
        assert_eq!(Opcode::AtomicAcknowledge.row().header_bytes, 12);
        assert_eq!(Opcode::CompareSwap.row().header_bytes, 28);
    }
}
