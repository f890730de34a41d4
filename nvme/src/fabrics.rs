//! Fabrics commands: Connect, Property Get and Set, Disconnect, Authentication Send and Receive.
//!
//! Source: NVMe Base Specification 2.0, "Fabrics Command Set"; before 2.0 the NVMe over Fabrics
//! specification.

use crate::property::Property;
use crate::{AdminOpcode, Nqn, NqnError, NqnField, Sgl, Sqe};

open_enum! {
    /// Fabrics command type, byte 4 of a command with opcode 7Fh.
    pub struct FabricsType(u8) {
        PROPERTY_SET = 0x00, "Property Set";
        CONNECT = 0x01, "Connect";
        PROPERTY_GET = 0x04, "Property Get";
        AUTHENTICATION_SEND = 0x05, "Authentication Send";
        AUTHENTICATION_RECEIVE = 0x06, "Authentication Receive";
        DISCONNECT = 0x08, "Disconnect";
    }
}

impl Sqe {
    /// Type of a fabrics command. Meaningful when [`is_fabrics`](Self::is_fabrics).
    pub const fn fabrics_type(&self) -> FabricsType {
        FabricsType(self.nsid as u8)
    }

    /// Fabrics command of type `kind`, without data.
    pub fn fabrics(kind: FabricsType) -> Self {
        Self::admin(AdminOpcode::FABRICS).with_nsid(kind.0.into())
    }
}

bits! {
    /// Connect attributes, one byte.
    pub struct ConnectAttributes(u8) {
        /// The host does not use SQHD: return FFFFh there.
        disable_sq_flow_control with_disable_sq_flow_control: bool = 2, 1;
    }
}

command! {
    /// Fields of a Connect command.
    pub struct Connect {
        /// Record format, 0.
        recfmt: u16 = cdw10[0, 16];
        /// Queue id: 0 admin, from 1 I/O.
        qid: u16 = cdw10[16, 16];
        /// Queue size in entries, minus one.
        sqsize_z: u16 = cdw11[0, 16];
        /// Attributes.
        cattr: ConnectAttributes = cdw11[16, 8];
        /// Keep Alive Timeout in milliseconds, 0 for none; on the admin queue only.
        kato_ms: u32 = cdw12[0, 32];
    }
}

impl Connect {
    /// Returns the command, with its 1024 bytes of data at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::fabrics(FabricsType::CONNECT).with_sgl(data))
    }
}

wire! {
    /// Data of a Connect command, 1024 bytes.
    pub struct ConnectData[1024] {
        /// Host identifier: a UUID in the byte order in which it is written.
        hostid: [u8; 16] = 0,
        /// Controller id: [`CNTLID_DYNAMIC`] or [`CNTLID_STATIC`] on the admin queue, the assigned
        /// one on I/O queues.
        cntlid: u16 = 16,
        /// Name of the subsystem, not yet validated.
        subnqn_field: NqnField = 256,
        /// Name of the host, not yet validated.
        hostnqn_field: NqnField = 512,
    }
}

/// Connect data, admin queue: the target chooses the controller.
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;

/// Connect data, admin queue of the static controller model: any available controller.
pub const CNTLID_STATIC: u16 = 0xFFFE;

/// The highest controller id that may be assigned; the 16 above are reserved.
pub const CNTLID_MAX: u16 = 0xFFEF;

impl ConnectData {
    /// Data for a host with this name and id that wants to reach `subnqn`.
    pub fn new(hostid: [u8; 16], cntlid: u16, subnqn: &Nqn, hostnqn: &Nqn) -> Self {
        Self { hostid, cntlid, subnqn_field: subnqn.into(), hostnqn_field: hostnqn.into() }
    }

    /// Returns the name of the subsystem, or why it is invalid.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        self.subnqn_field.nqn()
    }

    /// Returns the name of the host, or why it is invalid.
    pub fn hostnqn(&self) -> Result<Nqn, NqnError> {
        self.hostnqn_field.nqn()
    }
}

bits! {
    /// Result of a successful Connect, dword 0.
    pub struct ConnectResult(u32) {
        /// Controller id.
        cntlid with_cntlid: u16 = 0, 16;
        /// Authentication (in-band, without secure channel) is required.
        atr with_atr: bool = 17, 1;
        /// Authentication and a secure channel are required.
        ascr with_ascr: bool = 18, 1;
    }
}

/// Result dword of a Connect that failed with Connect Invalid Parameters: the invalid field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InvalidParameter {
    /// Byte offset of the field.
    pub offset: u16,
    /// The field is in the data rather than in the command.
    pub in_data: bool,
}

impl InvalidParameter {
    /// Record format, in the command.
    pub const RECFMT: Self = Self { offset: 40, in_data: false };
    /// Queue id, in the command.
    pub const QID: Self = Self { offset: 42, in_data: false };
    /// Queue size, in the command.
    pub const SQSIZE: Self = Self { offset: 44, in_data: false };
    /// Keep Alive Timeout, in the command.
    pub const KATO: Self = Self { offset: 48, in_data: false };
    /// Host identifier, in the data.
    pub const HOSTID: Self = Self { offset: 0, in_data: true };
    /// Controller id, in the data.
    pub const CNTLID: Self = Self { offset: 16, in_data: true };
    /// Name of the subsystem, in the data.
    pub const SUBNQN: Self = Self { offset: 256, in_data: true };
    /// Name of the host, in the data.
    pub const HOSTNQN: Self = Self { offset: 512, in_data: true };

    /// From dword 0: offset in bits 15:0, "in data" in bit 16.
    pub const fn parse(dw0: u32) -> Self {
        Self { offset: dw0 as u16, in_data: dw0 >> 16 & 1 == 1 }
    }

    /// Dword 0.
    pub const fn dw0(self) -> u32 {
        self.offset as u32 | (self.in_data as u32) << 16
    }
}

command! {
    /// Fields of a Property Get command. The value is returned in the result, 4 or 8 bytes of it.
    pub struct PropertyGet {
        /// Attributes: bits 2:0 are 0 for 4 bytes, 1 for 8 bytes.
        attrib: u8 = cdw10[0, 8];
        /// The property.
        property: Property = cdw11[0, 32];
    }
}

impl PropertyGet {
    /// Asks for `property` in its own size; 4 bytes for one that fabrics controllers do not have.
    pub const fn new(property: Property) -> Self {
        Self { attrib: property_attrib(property), property }
    }

    /// The command.
    pub fn emit(&self) -> Sqe {
        self.put(Sqe::fabrics(FabricsType::PROPERTY_GET))
    }

    /// Requested size, in bytes: 4, 8, or `None` if the attributes specify neither.
    pub const fn size_bytes(&self) -> Option<u32> {
        property_size_bytes(self.attrib)
    }
}

command! {
    /// Fields of a Property Set command.
    pub struct PropertySet {
        /// Attributes: bits 2:0 are 0 for 4 bytes, 1 for 8 bytes.
        attrib: u8 = cdw10[0, 8];
        /// The property.
        property: Property = cdw11[0, 32];
        /// The value; if it has 4 bytes, in the lower half.
        value: u64 = cdw12[0, 32] cdw13[0, 32];
    }
}

impl PropertySet {
    /// Sets `property`, in its own size.
    pub const fn new(property: Property, value: u64) -> Self {
        Self { attrib: property_attrib(property), property, value }
    }

    /// The command.
    pub fn emit(&self) -> Sqe {
        self.put(Sqe::fabrics(FabricsType::PROPERTY_SET))
    }

    /// Size of the value, in bytes: 4, 8, or `None` if the attributes specify neither.
    pub const fn size_bytes(&self) -> Option<u32> {
        property_size_bytes(self.attrib)
    }
}

command! {
    /// Fields of Authentication Send and Authentication Receive.
    pub struct Authentication {
        /// Security protocol specific field 0; 1 for authentication.
        spsp0: u8 = cdw10[8, 8];
        /// Security protocol specific field 1; 1 for authentication.
        spsp1: u8 = cdw10[16, 8];
        /// Security protocol; [`SECP_NVME`].
        secp: u8 = cdw10[24, 8];
        /// Transfer length of a Send, allocation length of a Receive, in bytes.
        len_bytes: u32 = cdw11[0, 32];
    }
}

/// Security protocol of NVMe in-band authentication.
pub const SECP_NVME: u8 = 0xE9;

impl Authentication {
    /// A transfer of `len_bytes` of an authentication message.
    pub const fn new(len_bytes: u32) -> Self {
        Self { spsp0: 1, spsp1: 1, secp: SECP_NVME, len_bytes }
    }

    /// Returns the command of type `kind`, with its data at `data`.
    pub fn emit(&self, kind: FabricsType, data: Sgl) -> Sqe {
        self.put(Sqe::fabrics(kind).with_sgl(data))
    }
}

command! {
    /// Fields of a Disconnect command, which deletes one I/O queue.
    pub struct Disconnect {
        /// Record format, 0.
        recfmt: u16 = cdw10[0, 16];
    }
}

impl Disconnect {
    /// The command.
    pub fn emit(&self) -> Sqe {
        self.put(Sqe::fabrics(FabricsType::DISCONNECT))
    }
}

const fn property_attrib(property: Property) -> u8 {
    matches!(property.size_bytes(), Some(8)) as u8
}

const fn property_size_bytes(attrib: u8) -> Option<u32> {
    match attrib & 7 {
        0 => Some(4),
        1 => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::fabrics::*;
    use proptest::prelude::*;

    #[test]
    fn invalid_connect_parameters_encode_offset_and_location() {
        assert_eq!(InvalidParameter::SQSIZE.dw0(), 0x2C);
        assert_eq!(InvalidParameter::QID.dw0(), 42);
        assert_eq!(InvalidParameter::HOSTID.dw0(), 0x10000);
        assert_eq!(InvalidParameter::CNTLID.dw0(), 0x10010);
        assert_eq!(InvalidParameter::SUBNQN.dw0(), 0x10100);
        assert_eq!(InvalidParameter::HOSTNQN.dw0(), 0x10200);
    }

    #[test]
    fn property_command_size_must_match_the_property() {
        assert_eq!(PropertyGet::new(Property::CAP).size_bytes(), Some(8));
        assert_eq!(PropertyGet::new(Property::VS).size_bytes(), Some(4));
        assert_eq!(PropertySet::new(Property::CC, 0).size_bytes(), Some(4));
        assert_eq!(PropertyGet { attrib: 2, property: Property::CAP }.size_bytes(), None);
        assert_eq!(PropertyGet { attrib: 0xF9, property: Property::CAP }.size_bytes(), Some(8));
    }

    #[test]
    fn nqns_of_connect_data_are_validated_separately() {
        let host = Nqn::new("nqn.host").expect("valid");
        let mut data = ConnectData::new([7; 16], CNTLID_DYNAMIC, &Nqn::DISCOVERY, &host);
        assert_eq!((data.subnqn(), data.hostnqn()), (Ok(Nqn::DISCOVERY), Ok(host)));
        data.subnqn_field = NqnField([b'n'; 256]);
        assert_eq!((data.subnqn(), data.hostnqn()), (Err(NqnError::NoTerminator), Ok(host)));
        data.hostnqn_field = NqnField::EMPTY;
        assert_eq!(data.hostnqn(), Err(NqnError::Empty));
    }

    #[test]
    fn connect_result_encodes_cntlid_and_auth_bits() {
        assert_eq!(ConnectResult(0).with_cntlid(0x1234).with_atr(true).0, 0x2_1234);
        assert_eq!(ConnectResult(0).with_ascr(true).0, 0x4_0000);
    }

    proptest! {
        #[test]
        fn fabrics_commands_round_trip(a: u16, b: u16, c: u16, d: u8, e: u32, value: u64) {
            let connect = Connect {
                recfmt: a, qid: b, sqsize_z: c, cattr: ConnectAttributes(d), kato_ms: e,
            };
            let sqe = connect.emit(Sgl::NONE);
            prop_assert_eq!(Connect::parse(&sqe), connect);
            prop_assert_eq!(sqe.fabrics_type(), FabricsType::CONNECT);
            let get = PropertyGet { attrib: d, property: Property(e) };
            prop_assert_eq!(PropertyGet::parse(&get.emit()), get);
            let set = PropertySet { attrib: d, property: Property(e), value };
            prop_assert_eq!(PropertySet::parse(&set.emit()), set);
            let auth = Authentication { spsp0: d, spsp1: a as u8, secp: b as u8, len_bytes: e };
            let sqe = auth.emit(FabricsType::AUTHENTICATION_SEND, Sgl::NONE);
            prop_assert_eq!(Authentication::parse(&sqe), auth);
            let disconnect = Disconnect { recfmt: a };
            prop_assert_eq!(Disconnect::parse(&disconnect.emit()), disconnect);
            let invalid = InvalidParameter { offset: a, in_data: d & 1 == 1 };
            prop_assert_eq!(InvalidParameter::parse(invalid.dw0()), invalid);
        }

        #[test]
        fn arbitrary_connect_data_round_trips(
            mut bytes in prop::array::uniform32(any::<[u8; 32]>()), cut in 0usize..256
        ) {
            bytes[8 + cut / 32][cut % 32] = 0;
            let bytes: &[u8; 1024] = bytes.as_flattened().try_into().expect("1024 bytes");
            let data = ConnectData::parse(bytes);
            prop_assert_eq!(&data.hostid[..], &bytes[..16]);
            prop_assert_eq!(ConnectData::parse(&data.emit()), data);
            let _: (Result<Nqn, NqnError>, Result<Nqn, NqnError>) = (data.subnqn(), data.hostnqn());
        }
    }
}
