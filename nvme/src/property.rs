//! Controller properties: the registers of a PCIe controller.
//!
//! Source: NVMe Base Specification 2.0, "Controller Properties".

open_enum! {
    /// Offset of a property, in bytes.
    pub struct Property(u32) {
        CAP = 0x00, "Controller Capabilities";
        VS = 0x08, "Version";
        INTMS = 0x0C, "Interrupt Mask Set";
        INTMC = 0x10, "Interrupt Mask Clear";
        CC = 0x14, "Controller Configuration";
        CSTS = 0x1C, "Controller Status";
        NSSR = 0x20, "NVM Subsystem Reset";
        AQA = 0x24, "Admin Queue Attributes";
        ASQ = 0x28, "Admin Submission Queue Base Address";
        ACQ = 0x30, "Admin Completion Queue Base Address";
        CRTO = 0x68, "Controller Ready Timeouts";
    }
}

impl Property {
    /// Size in bytes, 4 or 8; `None` for a property that a fabrics controller does not have.
    pub const fn size_bytes(self) -> Option<u32> {
        match self {
            Self::CAP => Some(8),
            Self::VS | Self::CC | Self::CSTS | Self::NSSR | Self::CRTO => Some(4),
            _ => None,
        }
    }
}

bits! {
    /// Controller Capabilities, 8 bytes.
    pub struct Cap(u64) {
        /// Maximum queue entries supported, minus one; at least 1.
        mqes_z with_mqes_z: u16 = 0, 16;
        /// Contiguous queues required; 1 on a fabric.
        cqr with_cqr: bool = 16, 1;
        /// Arbitration mechanisms beside round robin: bit 0 weighted round robin, bit 1 vendor.
        ams with_ams: u8 = 17, 2;
        /// Time to become ready, in units of 500 ms.
        to_500ms with_to_500ms: u8 = 24, 8;
        /// Command sets: bit 0 NVM, bit 6 those reported by Identify CNS 1Ch, bit 7 none.
        css with_css: u8 = 37, 8;
        /// Smallest memory page: 2^(12 + n) bytes.
        mpsmin with_mpsmin: u8 = 48, 4;
        /// Controller ready modes: with media.
        crwms with_crwms: bool = 59, 1;
        /// Controller ready modes: independent of media.
        crims with_crims: bool = 60, 1;
    }
}

impl Cap {
    /// CSS bit: NVM command set.
    pub const CSS_NVM: u8 = 1 << 0;
    /// CSS bit: one or more I/O command sets, as reported by Identify CNS 1Ch.
    pub const CSS_MULTIPLE: u8 = 1 << 6;
    /// CSS bit: no I/O command set, Admin only.
    pub const CSS_NONE: u8 = 1 << 7;
}

bits! {
    /// Version, 4 bytes.
    pub struct Vs(u32) {
        /// Tertiary version.
        tertiary with_tertiary: u8 = 0, 8;
        /// Minor version.
        minor with_minor: u8 = 8, 8;
        /// Major version.
        major with_major: u16 = 16, 16;
    }
}

impl Vs {
    /// 1.2.1.
    pub const V1_2_1: Self = Self(0x0001_0201);
    /// 1.3.
    pub const V1_3: Self = Self(0x0001_0300);
    /// 1.4.
    pub const V1_4: Self = Self(0x0001_0400);
    /// 2.0.
    pub const V2_0: Self = Self(0x0002_0000);
    /// 2.1.
    pub const V2_1: Self = Self(0x0002_0100);
}

/// As `1.4` or `1.2.1`.
impl core::fmt::Display for Vs {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())?;
        match self.tertiary() {
            0 => Ok(()),
            tertiary => write!(f, ".{tertiary}"),
        }
    }
}

bits! {
    /// Controller Configuration, 4 bytes.
    pub struct Cc(u32) {
        /// Enable.
        en with_en: bool = 0, 1;
        /// I/O command sets selected: 0 NVM, 6 all supported, 7 none.
        css with_css: u8 = 4, 3;
        /// Memory page: 2^(12 + n) bytes.
        mps with_mps: u8 = 7, 4;
        /// Arbitration mechanism: 0 round robin.
        ams with_ams: u8 = 11, 3;
        /// Shutdown notification.
        shn with_shn: Shutdown = 14, 2;
        /// I/O submission queue entry: 2^n bytes; 6.
        iosqes with_iosqes: u8 = 16, 4;
        /// I/O completion queue entry: 2^n bytes; 4.
        iocqes with_iocqes: u8 = 20, 4;
    }
}

impl Cc {
    /// CSS value: NVM command set.
    pub const CSS_NVM: u8 = 0;
    /// CSS value: all supported I/O command sets.
    pub const CSS_ALL: u8 = 6;
    /// CSS value: Admin command set only.
    pub const CSS_NONE: u8 = 7;
    /// IOSQES value: 64 bytes.
    pub const SQE_64_BYTES: u8 = 6;
    /// IOCQES value: 16 bytes.
    pub const CQE_16_BYTES: u8 = 4;
}

/// CC.SHN: shutdown notification, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shutdown {
    /// 00b: no notification.
    None,
    /// 01b: normal shutdown.
    Normal,
    /// 10b: abrupt shutdown.
    Abrupt,
    /// 11b.
    Reserved,
}

/// CSTS.SHST: shutdown status, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShutdownStatus {
    /// 00b: normal operation.
    Normal,
    /// 01b: shutdown is being processed.
    Occurring,
    /// 10b: shutdown complete.
    Complete,
    /// 11b.
    Reserved,
}

bits! {
    /// Controller Status, 4 bytes.
    pub struct Csts(u32) {
        /// Ready.
        rdy with_rdy: bool = 0, 1;
        /// Controller fatal status.
        cfs with_cfs: bool = 1, 1;
        /// Shutdown status.
        shst with_shst: ShutdownStatus = 2, 2;
    }
}

bits! {
    /// Controller Ready Timeouts, 4 bytes; present if CAP.CRWMS or CAP.CRIMS is set.
    pub struct Crto(u32) {
        /// Ready with media timeout, in units of 500 ms.
        crwmt_500ms with_crwmt_500ms: u16 = 0, 16;
        /// Ready independent of media timeout, in units of 500 ms.
        crimt_500ms with_crimt_500ms: u16 = 16, 16;
    }
}

impl crate::Bits for Shutdown {
    const WIDTH: u32 = 2;
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::None,
            1 => Self::Normal,
            2 => Self::Abrupt,
            _ => Self::Reserved,
        }
    }
    fn into_bits(self) -> u64 {
        self as u64
    }
}

impl crate::Bits for ShutdownStatus {
    const WIDTH: u32 = 2;
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Normal,
            1 => Self::Occurring,
            2 => Self::Complete,
            _ => Self::Reserved,
        }
    }
    fn into_bits(self) -> u64 {
        self as u64
    }
}

#[cfg(test)]
mod tests {
    use crate::property::*;
    use proptest::prelude::*;

    #[test]
    fn controller_configuration_encodes_like_linux() {
        let cc =
            Cc(0).with_iosqes(Cc::SQE_64_BYTES).with_iocqes(Cc::CQE_16_BYTES).with_css(Cc::CSS_ALL);
        assert_eq!(cc.0, 0x0046_0060);
        assert_eq!(cc.with_en(true).with_shn(Shutdown::Normal).0, 0x0046_4061);
        assert_eq!(Cc(0x0046_4061).shn(), Shutdown::Normal);
    }

    #[test]
    fn controller_capabilities_encode_like_nvmet() {
        let cap = Cap(0x0000_0820_0F00_007F);
        assert_eq!((cap.mqes_z(), cap.cqr(), cap.to_500ms()), (127, false, 15));
        assert_eq!(cap.css(), Cap::CSS_NVM | Cap::CSS_MULTIPLE);
        let built =
            Cap(0).with_mqes_z(127).with_to_500ms(15).with_css(Cap::CSS_NVM | Cap::CSS_MULTIPLE);
        assert_eq!(built, cap);
        assert_eq!(Cap(0).with_crims(true).0, 1 << 60);
    }

    #[test]
    fn status_version_and_ready_timeouts_encode_their_bits() {
        assert_eq!(Csts(0).with_shst(ShutdownStatus::Complete).0, 0x8);
        assert_eq!(Csts(0).with_rdy(true).with_cfs(true).0, 0x3);
        assert_eq!(Vs::V1_4.to_string(), "1.4");
        assert_eq!(Vs::V1_2_1.to_string(), "1.2.1");
        assert_eq!(Vs(0).with_major(2).with_minor(0), Vs::V2_0);
        assert_eq!(Crto(0).with_crimt_500ms(1).0, 0x1_0000);
    }

    #[test]
    fn only_properties_of_fabrics_controllers_have_a_size() {
        assert_eq!(Property::CAP.size_bytes(), Some(8));
        assert_eq!(Property::CSTS.size_bytes(), Some(4));
        assert_eq!(Property::ASQ.size_bytes(), None);
        assert_eq!(Property(0x15).size_bytes(), None);
    }

    proptest! {
        #[test]
        fn shutdown_bits_round_trip(raw: u32, bits in 0u64..4) {
            let shn = <Shutdown as crate::Bits>::from_bits(bits);
            prop_assert_eq!(u64::from(Cc(raw).with_shn(shn).0 >> 14 & 3), bits);
            let shst = <ShutdownStatus as crate::Bits>::from_bits(bits);
            prop_assert_eq!(u64::from(Csts(raw).with_shst(shst).0 >> 2 & 3), bits);
            prop_assert_eq!(Csts(raw).with_shst(shst).shst(), shst);
        }

        #[test]
        fn every_value_prints(cap: u64, low: u32) {
            let _: String = format!("{:?} {:?} {:?} {}", Cap(cap), Cc(low), Csts(low), Vs(low));
        }
    }
}
