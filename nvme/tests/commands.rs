//! Commands, completions and connection messages as Linux hosts and targets sent them.

mod support;

use crate::support::{bytes, hex, rows};
use nvme::cm::{Accept, Request};
use nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, ConnectResult, FabricsType,
    InvalidParameter, PropertyGet, PropertySet,
};
use nvme::feature::{AsyncEvent, AsyncEventConfig, FeatureId, NumberOfQueues, SetFeatures};
use nvme::identify::{Cns, Csi, Identify};
use nvme::log::{GetLogPage, LogId};
use nvme::property::{Cap, Cc, Csts, Property, Shutdown, ShutdownStatus, Vs};
use nvme::sqe::{DsmRange, Flags};
use nvme::{AdminOpcode, Cqe, IoOpcode, NSID_ALL, Nqn, Sgl, Sqe, Status};

const COMMANDS: &str = include_str!("vectors/commands.hex");
const COMPLETIONS: &str = include_str!("vectors/completions.hex");
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

fn command(capture: &str, frame: &str) -> Sqe {
    Sqe::parse(&find(COMMANDS, capture, frame))
}

/// Completion from `capture`, `frame`.
fn completion(capture: &str, frame: &str) -> Cqe {
    Cqe::parse(&find(COMPLETIONS, capture, frame))
}

fn find<const N: usize>(vectors: &str, capture: &str, frame: &str) -> [u8; N] {
    let prefix = format!("{capture} {frame} ");
    let row = rows(vectors).find(|row| row.starts_with(&prefix)).expect("in the file");
    last_column(row)
}

/// All entries of `vectors`, each with its row for messages.
fn all<const N: usize>(vectors: &str) -> Vec<(&str, [u8; N])> {
    rows(vectors).map(|row| (row, last_column(row))).collect()
}

fn last_column<const N: usize>(row: &str) -> [u8; N] {
    let digits = row.rsplit(' ').next().expect("several columns");
    hex(digits).try_into().expect("the size")
}

/// Parses an Admin or fabrics command into its typed view, and rebuilds it from the fields of the
/// view.
fn rebuilt_admin(command: &Sqe) -> Sqe {
    let data = command.sgl().expect("a type for RDMA");
    match (command.admin_opcode(), command.fabrics_type()) {
        (AdminOpcode::FABRICS, FabricsType::CONNECT) => Connect::parse(command).emit(data),
        (AdminOpcode::FABRICS, FabricsType::PROPERTY_GET) => PropertyGet::parse(command).emit(),
        (AdminOpcode::FABRICS, FabricsType::PROPERTY_SET) => PropertySet::parse(command).emit(),
        (AdminOpcode::IDENTIFY, _) => Identify::parse(command).emit(data),
        (AdminOpcode::GET_LOG_PAGE, _) => GetLogPage::parse(command).emit(data),
        (AdminOpcode::SET_FEATURES, _) => SetFeatures::parse(command).emit(data),
        (opcode @ (AdminOpcode::ASYNC_EVENT_REQUEST | AdminOpcode::KEEP_ALIVE), _) => {
            Sqe::admin(opcode)
        }
        other => panic!("unexpected {other:?}"),
    }
}

/// The same for the I/O queues.
fn rebuilt_io(command: &Sqe) -> Sqe {
    let data = command.sgl().expect("a type for RDMA");
    match command.io_opcode() {
        IoOpcode::FABRICS => Connect::parse(command).emit(data),
        opcode @ (IoOpcode::READ | IoOpcode::WRITE | IoOpcode::WRITE_ZEROES) => {
            Sqe::io(opcode, command.nsid)
                .with_range(command.slba(), command.nlb_z())
                .with_fua(command.fua())
                .with_deac(command.deac())
                .with_sgl(data)
        }
        IoOpcode::DATASET_MANAGEMENT => {
            Sqe::deallocation(command.nsid, command.nr_z()).with_sgl(data)
        }
        IoOpcode::FLUSH => Sqe::io(IoOpcode::FLUSH, command.nsid),
        other => panic!("unexpected {other}"),
    }
}

#[test]
fn every_captured_command_is_rebuilt_to_the_byte() {
    let commands = all(COMMANDS);
    assert_eq!(commands.len(), 47);
    for (row, bytes) in commands {
        let command = Sqe::parse(&bytes);
        assert_eq!(command.emit(), bytes, "{row}");
        assert_eq!(command.flags, Flags::SGL, "{row}");
        assert_eq!(command.check_flags(), Ok(()), "{row}");
        let rebuilt =
            if row.contains(" io ") { rebuilt_io(&command) } else { rebuilt_admin(&command) };
        assert_eq!(rebuilt.with_cid(command.cid).emit(), bytes, "{row}");
    }
}

#[test]
fn captured_connects_carry_queue_depth_and_keep_alive() {
    let discovery = command("linux-6.12-session", "4");
    assert_eq!(discovery.fabrics_type(), FabricsType::CONNECT);
    let mut expected =
        Connect { recfmt: 0, qid: 0, sqsize_z: 31, cattr: ConnectAttributes(0), kato_ms: 0 };
    assert_eq!(Connect::parse(&discovery), expected);
    assert_eq!(discovery.sgl().ok(), Sgl::keyed(0x90BA_5000, 1024, 0x395, true));

    expected.kato_ms = 4000;
    assert_eq!(Connect::parse(&command("linux-6.12-session", "85")), expected);
    let io = command("linux-6.12-session", "154");
    expected = Connect { qid: 1, sqsize_z: 127, kato_ms: 0, ..expected };
    assert_eq!(Connect::parse(&io), expected);
    assert_eq!(io.sgl(), Ok(Sgl::in_capsule(0, 1024)));
}

#[test]
fn property_commands_walk_through_enabling_and_shutdown() {
    let get = |frame| PropertyGet::parse(&command("linux-6.12-session", frame));
    assert_eq!(get("10"), PropertyGet::new(Property::CAP));
    assert_eq!(get("26"), PropertyGet::new(Property::CSTS));
    assert_eq!(get("30"), PropertyGet::new(Property::VS));
    let set = |capture, frame| {
        let set = PropertySet::parse(&command(capture, frame));
        assert_eq!((set.property, set.size_bytes()), (Property::CC, Some(4)));
        Cc(u32::try_from(set.value).expect("4 bytes"))
    };
    let several_sets =
        Cc(0).with_iosqes(Cc::SQE_64_BYTES).with_iocqes(Cc::CQE_16_BYTES).with_css(Cc::CSS_ALL);
    assert_eq!(set("linux-6.12-session", "14"), several_sets);
    assert_eq!(set("linux-6.12-session", "22"), several_sets.with_en(true));
    let shutdown = several_sets.with_en(true).with_shn(Shutdown::Normal);
    assert_eq!(set("linux-6.12-session", "72"), shutdown);
    assert_eq!(set("userspace-target", "24"), several_sets.with_css(0).with_en(true));
}

#[test]
fn captured_admin_commands_parse_to_their_parameters() {
    let of = |frame| command("linux-6.12-session", frame);
    assert_eq!(Identify::parse(&of("34")), Identify::new(Cns::CONTROLLER, 0));
    assert_eq!(Identify::parse(&of("174")), Identify::new(Cns::ACTIVE_NAMESPACES, 0));
    assert_eq!(Identify::parse(&of("183")), Identify::new(Cns::NAMESPACE_DESCRIPTORS, 1));
    let csi = Identify::new(Cns::CSI_CONTROLLER, 0);
    assert_eq!(Identify::parse(&of("164")), Identify { csi: Csi::NVM, ..csi });

    assert_eq!(GetLogPage::parse(&of("58")), GetLogPage::new(LogId::DISCOVERY, 0, 256));
    let smart = GetLogPage::parse(&of("534"));
    assert_eq!((smart.lid, smart.nsid, smart.len_bytes()), (LogId::SMART, NSID_ALL, 512));
    assert!(!smart.rae);
    let ana = GetLogPage::parse(&of("133"));
    assert_eq!((ana.lid, ana.len_bytes()), (LogId::ANA, 8208));
    assert_eq!(ana.len_bytes(), of("133").sgl().expect("keyed").len_bytes().into());

    let queues = SetFeatures::parse(&of("147"));
    assert_eq!(queues, SetFeatures::new(FeatureId::NUMBER_OF_QUEUES, 0));
    let events = AsyncEventConfig(0).with_namespace_attribute(true).with_ana_change(true);
    let config = SetFeatures::new(FeatureId::ASYNC_EVENT_CONFIG, events.0);
    assert_eq!(SetFeatures::parse(&of("159")), config);
    let discovery = AsyncEventConfig(0).with_discovery_log(true);
    assert_eq!(SetFeatures::parse(&of("43")).cdw11, discovery.0);
    assert_eq!((of("48").cid, of("48").admin_opcode()), (0x1F, AdminOpcode::ASYNC_EVENT_REQUEST));
}

#[test]
fn io_commands_carry_their_ranges() {
    let of = |frame| command("linux-6.12-session", frame);
    let write = of("233");
    assert_eq!((write.io_opcode(), write.slba(), write.blocks()), (IoOpcode::WRITE, 0, 1));
    assert_eq!(write.sgl(), Ok(Sgl::in_capsule(0, 4096)));
    assert_eq!(of("263").sgl().expect("keyed").len_bytes(), 131_072);
    assert_eq!((of("263").nlb_z(), of("263").fua()), (31, false));
    let zeroes = of("557");
    assert_eq!((zeroes.slba(), zeroes.blocks(), zeroes.sgl()), (8, 4, Ok(Sgl::NONE)));
    assert_eq!((of("570").slba(), of("570").io_opcode()), (0x50000, IoOpcode::READ));

    let dsm = of("540");
    assert_eq!((dsm.ranges(), dsm.deallocate()), (1, true));
    let data: [u8; 16] = bytes(include_str!("vectors/deallocate-ranges.hex"));
    let range = DsmRange { attributes: 0, blocks: 8, slba: 0 };
    assert!(DsmRange::parse_all(&data).eq([range]));
    assert_eq!(range.emit(), data);
}

#[test]
fn every_captured_completion_is_rebuilt_to_the_byte() {
    let completions = all(COMPLETIONS);
    assert_eq!(completions.len(), 19);
    for (row, bytes) in completions {
        assert_eq!(Cqe::parse(&bytes).emit(), bytes, "{row}");
    }
}

#[test]
fn captured_completions_parse_to_status_and_result() {
    let of = |frame| completion("linux-6.12-session", frame);
    let cap = Cap(of("12").result);
    assert_eq!((cap.mqes_z(), cap.to_500ms(), cap.mpsmin()), (127, 15, 0));
    assert_eq!(cap.css(), Cap::CSS_NVM | Cap::CSS_MULTIPLE);
    assert_eq!(Cap(completion("userspace-target", "14").result).css(), Cap::CSS_NVM);
    assert_eq!(Vs(of("32").dw0()), Vs::V1_3);
    assert_eq!(Csts(of("78").dw0()), Csts(0).with_shst(ShutdownStatus::Complete));
    let queues = NumberOfQueues(of("149").dw0());
    assert_eq!((queues.submission_z(), queues.completion_z()), (127, 127));
    assert_eq!(ConnectResult(of("8").dw0()), ConnectResult(0).with_cntlid(1));
    assert_eq!((of("157").sqid, of("157").sqhd, of("157").cid), (1, 1, 0));

    let unsupported = of("555");
    assert_eq!(unsupported.status, Status::INVALID_FIELD.with_dnr().with_more(true));
    assert_eq!((unsupported.cid, unsupported.sqhd), (0x3007, 0x15));
    assert_eq!(of("572").status, Status::INTERNAL_ERROR.with_dnr().with_more(true));
    let refused = of("623");
    assert_eq!(refused.status, Status::CONNECT_INVALID_PARAMETERS.with_dnr());
    assert_eq!(InvalidParameter::parse(refused.dw0()), InvalidParameter::SUBNQN);
    let event = completion("linux-6.12-events", "152");
    assert_eq!(AsyncEvent(event.dw0()), AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    assert_eq!((event.cid, event.status), (0x1F, Status::SUCCESS));
}

#[test]
fn connect_data_names_both_ends() {
    let page: [u8; 1024] = bytes(include_str!("vectors/connect-data-admin.hex"));
    let data = ConnectData::parse(&page);
    assert_eq!(data.emit(), page);
    let host = Nqn::new(HOST).expect("valid");
    let hostid = hex("11111111222233334444555555555555").try_into().expect("16 bytes");
    assert_eq!(data, ConnectData::new(hostid, CNTLID_DYNAMIC, &Nqn::DISCOVERY, &host));

    let page: [u8; 1024] = bytes(include_str!("vectors/connect-data-io.hex"));
    let data = ConnectData::parse(&page);
    assert_eq!(data.emit(), page);
    assert_eq!((data.cntlid, data.hostnqn()), (1, Ok(host)));
    assert_eq!(data.subnqn(), Nqn::new("nqn.2024-01.io.test:sub1"));
}

#[test]
fn connection_messages_name_queue_and_depth() {
    // linux-6.12-session.pcap frame 1, after the header of the RDMA IP CM.
    let admin: [u8; 32] = bytes("0000000020001f00");
    let expected = Request { recfmt: 0, qid: 0, hrqsize: 32, hsqsize_z: 31, cntlid: 0 };
    assert_eq!(Request::parse(&admin), expected);
    assert_eq!(expected.emit(), admin);
    // Frame 151 of the same: I/O queue 1 of controller 1.
    let io: [u8; 32] = bytes("0000010080007f000100");
    let expected = Request { recfmt: 0, qid: 1, hrqsize: 128, hsqsize_z: 127, cntlid: 1 };
    assert_eq!(Request::parse(&io), expected);
    assert_eq!(expected.emit(), io);
    // linux-6.1-session-mtu4096.pcap frame 145: older hosts do not send the controller id.
    let old: [u8; 32] = bytes("0000010080007f00");
    assert_eq!(Request::parse(&old), Request { cntlid: 0, ..expected });
    // linux-6.12-session.pcap frame 152.
    let accept: [u8; 32] = bytes("00008000");
    assert_eq!(Accept::parse(&accept), Accept { recfmt: 0, crqsize: 128 });
    assert_eq!(Accept { recfmt: 0, crqsize: 128 }.emit(), accept);
}
