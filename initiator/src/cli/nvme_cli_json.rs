//! Structures of the NVMe specifications as JSON: the fields of nvme-cli 2.3, in its order.
//!
//! Numbers of up to 64 bits are numbers, those of 128 bits are text. Where nvme-cli 2.3 prints a
//! large number of 32 bits as a negative one, this prints the correct value.

use nvme::PAGE_BYTES;
use nvme::identify::{IdentifyController, IdentifyNamespace, PowerState};
use nvme::log::{
    AddressFamily, DiscoveryEntry, EntryFlags, ErrorEntry, Smart, TransportType, Treq,
};
use serde_json::{Map, Value};
use uuid::Uuid;

use initiator::host::Discovery;

/// Returns an object with these fields, in this order.
pub(crate) fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    Value::Object(map(fields))
}

fn map<const N: usize>(fields: [(&str, Value); N]) -> Map<String, Value> {
    fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// 128 bits, as text.
fn wide(value: u128) -> Value {
    value.to_string().into()
}

/// Identify Controller.
pub(crate) fn controller(page: &IdentifyController) -> Value {
    let mut fields = controller_base(page);
    fields.extend(controller_limits(page));
    let name = text(&page.subnqn.0);
    if !name.is_empty() {
        fields.insert("subnqn".into(), name.into());
    }
    let states = page.psd.iter().take(usize::from(page.npss_z) + 1).map(power_state);
    fields.extend(map([
        ("ioccsz", page.ioccsz_16.into()),
        ("iorcsz", page.iorcsz_16.into()),
        ("icdoff", page.icdoff_16.into()),
        ("fcatt", page.fcatt.into()),
        ("msdbd", page.msdbd.into()),
        ("ofcs", page.ofcs.into()),
        ("psds", states.collect()),
    ]));
    Value::Object(fields)
}

fn controller_base(page: &IdentifyController) -> Map<String, Value> {
    let [low, middle, high] = page.ieee;
    map([
        ("vid", page.vid.into()),
        ("ssvid", page.ssvid.into()),
        ("sn", text(&page.sn.0).into()),
        ("mn", text(&page.mn.0).into()),
        ("fr", text(&page.fr.0).into()),
        ("rab", page.rab.into()),
        ("ieee", u32::from_le_bytes([low, middle, high, 0]).into()),
        ("cmic", page.cmic.0.into()),
        ("mdts", page.mdts.into()),
        ("cntlid", page.cntlid.into()),
        ("ver", page.ver.0.into()),
        ("rtd3r", page.rtd3r_us.into()),
        ("rtd3e", page.rtd3e_us.into()),
        ("oaes", page.oaes.0.into()),
        ("ctratt", page.ctratt.0.into()),
        ("rrls", page.rrls.into()),
        ("cntrltype", page.cntrltype.0.into()),
        ("fguid", Uuid::from_bytes(page.fguid).to_string().into()),
        ("crdt1", page.crdt1_100ms.into()),
        ("crdt2", page.crdt2_100ms.into()),
        ("crdt3", page.crdt3_100ms.into()),
        ("nvmsr", page.nvmsr.into()),
        ("vwci", page.vwci.into()),
        ("mec", page.mec.into()),
        ("oacs", page.oacs.into()),
        ("acl", page.acl_z.into()),
        ("aerl", page.aerl_z.into()),
        ("frmw", page.frmw.into()),
        ("lpa", page.lpa.0.into()),
        ("elpe", page.elpe_z.into()),
        ("npss", page.npss_z.into()),
        ("avscc", page.avscc.into()),
        ("apsta", page.apsta.into()),
        ("wctemp", page.wctemp_k.into()),
        ("cctemp", page.cctemp_k.into()),
        ("mtfa", page.mtfa_100ms.into()),
        ("hmpre", page.hmpre_4k.into()),
        ("hmmin", page.hmmin_4k.into()),
        ("tnvmcap", wide(page.tnvmcap_bytes)),
        ("unvmcap", wide(page.unvmcap_bytes)),
        ("rpmbs", page.rpmbs.into()),
        ("edstt", page.edstt_min.into()),
        ("dsto", page.dsto.into()),
        ("fwug", page.fwug_4k.into()),
        ("kas", page.kas_100ms.into()),
        ("hctma", page.hctma.into()),
        ("mntmt", page.mntmt_k.into()),
        ("mxtmt", page.mxtmt_k.into()),
        ("sanicap", page.sanicap.into()),
        ("hmminds", page.hmminds_4k.into()),
        ("hmmaxd", page.hmmaxd.into()),
    ])
}

fn controller_limits(page: &IdentifyController) -> Map<String, Value> {
    map([
        ("nsetidmax", page.nsetidmax.into()),
        ("endgidmax", page.endgidmax.into()),
        ("anatt", page.anatt_s.into()),
        ("anacap", page.anacap.into()),
        ("anagrpmax", page.anagrpmax.into()),
        ("nanagrpid", page.nanagrpid.into()),
        ("pels", page.pels_64k.into()),
        ("domainid", page.domain_id.into()),
        ("megcap", wide(page.megcap_bytes)),
        ("sqes", page.sqes.into()),
        ("cqes", page.cqes.into()),
        ("maxcmd", page.maxcmd.into()),
        ("nn", page.nn.into()),
        ("oncs", page.oncs.0.into()),
        ("fuses", page.fuses.into()),
        ("fna", page.fna.into()),
        ("vwc", page.vwc.0.into()),
        ("awun", page.awun_z.into()),
        ("awupf", page.awupf_z.into()),
        ("icsvscc", page.icsvscc.into()),
        ("nwpc", page.nwpc.into()),
        ("acwu", page.acwu_z.into()),
        ("ocfs", page.cdfs.into()),
        ("sgls", page.sgls.0.into()),
        ("mnan", page.mnan.into()),
        ("maxdna", wide(page.maxdna)),
        ("maxcna", page.maxcna.into()),
    ])
}

fn power_state(state: &PowerState) -> Value {
    object([
        ("max_power", state.max_power.into()),
        ("flags", state.flags.into()),
        ("entry_lat", state.entry_us.into()),
        ("exit_lat", state.exit_us.into()),
        ("read_tput", state.rrt.into()),
        ("read_lat", state.rrl.into()),
        ("write_tput", state.rwt.into()),
        ("write_lat", state.rwl.into()),
        ("idle_power", state.idle_power.into()),
        ("idle_scale", (state.idle_scale >> 6).into()),
        ("active_power", state.active_power.into()),
        ("active_power_work", (state.active_scale & 7).into()),
        ("active_scale", (state.active_scale >> 6).into()),
    ])
}

/// Identify Namespace. `nulbaf` is at an offset that this revision of the specification reserves.
pub(crate) fn namespace(page: &IdentifyNamespace, bytes: &[u8; PAGE_BYTES]) -> Value {
    let mut fields = map([
        ("nsze", page.nsze.into()),
        ("ncap", page.ncap.into()),
        ("nuse", page.nuse.into()),
        ("nsfeat", page.nsfeat.0.into()),
        ("nlbaf", page.nlbaf_z.into()),
        ("flbas", page.flbas.into()),
        ("mc", page.mc.into()),
        ("dpc", page.dpc.into()),
        ("dps", page.dps.into()),
        ("nmic", page.nmic.into()),
        ("rescap", page.rescap.0.into()),
        ("fpi", page.fpi.into()),
        ("dlfeat", page.dlfeat.into()),
        ("nawun", page.nawun_z.into()),
        ("nawupf", page.nawupf_z.into()),
        ("nacwu", page.nacwu_z.into()),
        ("nabsn", page.nabsn_z.into()),
        ("nabo", page.nabo.into()),
        ("nabspf", page.nabspf_z.into()),
        ("noiob", page.noiob.into()),
        ("nvmcap", wide(page.nvmcap_bytes)),
        ("nsattr", page.nsattr.into()),
        ("nvmsetid", page.nvmsetid.into()),
    ]);
    if page.nsfeat.optimal_io() {
        fields.extend(map([
            ("npwg", page.npwg_z.into()),
            ("npwa", page.npwa_z.into()),
            ("npdg", page.npdg_z.into()),
            ("npda", page.npda_z.into()),
            ("nows", page.nows_z.into()),
        ]));
    }
    let formats = page.lbaf.iter().take(usize::from(page.nlbaf_z) + 1).map(|format| {
        object([
            ("ms", format.metadata_bytes.into()),
            ("ds", format.lbads.into()),
            ("rp", format.rp.into()),
        ])
    });
    fields.extend(map([
        ("mssrl", page.mssrl.into()),
        ("mcl", page.mcl.into()),
        ("msrc", page.msrc_z.into()),
        ("nulbaf", bytes[82].into()),
        ("anagrpid", page.anagrpid.into()),
        ("endgid", page.endgid.into()),
        ("eui64", hex(&page.eui64).into()),
        ("nguid", hex(&page.nguid).into()),
        ("lbafs", formats.collect()),
    ]));
    Value::Object(fields)
}

/// A list of namespace ids.
pub(crate) fn namespaces(ids: &[u32]) -> Value {
    let ids = ids.iter().map(|&id| object([("nsid", id.into())]));
    object([("nsid_list", ids.collect())])
}

/// One Namespace Identification Descriptor.
pub(crate) struct Descriptor {
    /// Offset in the page.
    at: usize,
    kind: u8,
    len: u8,
    /// The name of its type.
    pub(crate) name: &'static str,
    /// Its value.
    pub(crate) text: String,
}

/// Returns the Namespace Identification Descriptors of known types and correct lengths.
pub(crate) fn descriptors(page: &[u8; PAGE_BYTES]) -> Vec<Descriptor> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&[kind, len, _, _]) = page.get(at..).and_then(|rest| rest.first_chunk()) {
        let Some(id) = page.get(at + 4..at + 4 + usize::from(len)) else { break };
        let named = match (kind, id) {
            (_, []) => break,
            (1, id) if id.len() == 8 => Some(("eui64", hex(id))),
            (2, id) if id.len() == 16 => Some(("nguid", hex(id))),
            (3, id) => Uuid::from_slice(id).ok().map(|id| ("uuid", id.to_string())),
            (4, [0]) => Some(("csi", "0".into())),
            (4, [csi]) => Some(("csi", format!("{csi:#x}"))),
            _ => None,
        };
        if let Some((name, text)) = named {
            found.push(Descriptor { at, kind, len, name, text });
        }
        at += 4 + usize::from(len);
    }
    found
}

/// Namespace Identification Descriptors.
pub(crate) fn namespace_descriptors(found: &[Descriptor]) -> Value {
    let list: Vec<Value> = found
        .iter()
        .map(|each| {
            object([
                ("loc", each.at.into()),
                ("nidt", each.kind.into()),
                ("nidl", each.len.into()),
                ("type", each.name.into()),
                (each.name, each.text.clone().into()),
            ])
        })
        .collect();
    match list.is_empty() {
        true => object([]),
        false => object([("ns-descs", list.into())]),
    }
}

/// SMART / Health Information.
pub(crate) fn smart(log: &Smart) -> Value {
    let mut fields = map([
        ("critical_warning", log.critical_warning.0.into()),
        ("temperature", log.temperature_k.into()),
        ("avail_spare", log.spare_percent.into()),
        ("spare_thresh", log.spare_threshold_percent.into()),
        ("percent_used", log.used_percent.into()),
        ("endurance_grp_critical_warning_summary", log.endurance_warning.into()),
        ("data_units_read", wide(log.data_units_read)),
        ("data_units_written", wide(log.data_units_written)),
        ("host_read_commands", wide(log.host_reads)),
        ("host_write_commands", wide(log.host_writes)),
        ("controller_busy_time", wide(log.busy_min)),
        ("power_cycles", wide(log.power_cycles)),
        ("power_on_hours", wide(log.power_on_hours)),
        ("unsafe_shutdowns", wide(log.unsafe_shutdowns)),
        ("media_errors", wide(log.media_errors)),
        ("num_err_log_entries", wide(log.error_entries)),
        ("warning_temp_time", log.warning_temperature_min.into()),
        ("critical_comp_time", log.critical_temperature_min.into()),
    ]);
    for (index, kelvin) in log.sensors_k.iter().enumerate().filter(|(_, kelvin)| **kelvin != 0) {
        fields.insert(format!("temperature_sensor_{}", index + 1), (*kelvin).into());
    }
    fields.extend(map([
        ("thm_temp1_trans_count", log.tmt1_transitions.into()),
        ("thm_temp2_trans_count", log.tmt2_transitions.into()),
        ("thm_temp1_total_time", log.tmt1_s.into()),
        ("thm_temp2_total_time", log.tmt2_s.into()),
    ]));
    Value::Object(fields)
}

/// Error Information; entries as received, because of their phase tag.
pub(crate) fn errors(log: &[[u8; ErrorEntry::BYTES]]) -> Value {
    let entries = log.iter().map(|bytes| {
        let entry = ErrorEntry::parse(bytes);
        object([
            ("error_count", entry.error_count.into()),
            ("sqid", entry.sqid.into()),
            ("cmdid", entry.cid.into()),
            ("status_field", (entry.status.field() >> 1).into()),
            ("phase_tag", (bytes[12] & 1).into()),
            ("parm_error_location", entry.parameter.into()),
            ("lba", entry.lba.into()),
            ("nsid", entry.nsid.into()),
            ("vs", entry.vendor_log.into()),
            ("trtype", entry.trtype.0.into()),
            ("cs", entry.command_info.into()),
            ("trtype_spec_info", entry.transport_info.into()),
        ])
    });
    object([("errors", entries.collect())])
}

/// A discovery log.
pub(crate) fn discovery(log: &Discovery) -> Value {
    let records = log.records.iter().map(|entry| Value::Object(record(entry)));
    object([("genctr", log.genctr.into()), ("records", records.collect())])
}

/// One record of a discovery log.
pub(crate) fn record(entry: &DiscoveryEntry) -> Map<String, Value> {
    let mut fields = map([
        ("trtype", entry.trtype.name().unwrap_or(UNKNOWN).into()),
        ("adrfam", family(entry.adrfam).into()),
        ("subtype", entry.subtype.name().unwrap_or(UNKNOWN).into()),
        ("treq", requirements(entry.treq).into()),
        ("portid", entry.portid.into()),
        ("trsvcid", trimmed(&entry.trsvcid.0).into()),
        ("subnqn", trimmed(&entry.subnqn.0).into()),
        ("traddr", trimmed(&entry.traddr.0).into()),
        ("eflags", flags(entry.eflags).into()),
    ]);
    if entry.trtype == TransportType::RDMA {
        let named = |name: Option<&'static str>| Value::from(name.unwrap_or(UNKNOWN));
        fields.extend(map([
            ("rdma_prtype", named(entry.rdma_prtype.name())),
            ("rdma_qptype", named(entry.rdma_qptype.name())),
            ("rdma_cms", named(entry.rdma_cms.name())),
            ("rdma_pkey", entry.rdma_pkey.into()),
        ]));
    }
    fields
}

/// Text of nvme-cli for an unknown code.
const UNKNOWN: &str = "unrecognized";

fn family(family: AddressFamily) -> &'static str {
    match family {
        AddressFamily::UNSPECIFIED => "pci",
        family => family.name().unwrap_or(UNKNOWN),
    }
}

fn requirements(treq: Treq) -> &'static str {
    match treq.0 {
        0 => "not specified",
        1 => "required",
        2 => "not required",
        4 => "not specified, sq flow control disable supported",
        5 => "required, sq flow control disable supported",
        6 => "not required, sq flow control disable supported",
        _ => UNKNOWN,
    }
}

fn flags(flags: EntryFlags) -> String {
    let names = [
        (flags.persistent(), "explicit discovery connections"),
        (flags.duplicate(), "duplicate discovery information"),
        (flags.ncc(), "no cdc connectivity"),
    ];
    let set: Vec<&str> = names.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
    match set.is_empty() {
        true => "none".into(),
        false => set.join(", "),
    }
}

/// Bytes as text up to the first NUL, with their padding; non-printable bytes are escaped.
pub(crate) fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    text.iter()
        .map(|&byte| match byte {
            b' '..=b'~' => char::from(byte).to_string(),
            byte => byte.escape_ascii().to_string(),
        })
        .collect()
}

/// As [`text`], without padding.
pub(crate) fn trimmed(bytes: &[u8]) -> String {
    text(bytes).trim_end().to_owned()
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use crate::cli::nvme_cli_json::*;

    /// Output of nvme-cli 2.3, with its negative numbers of 32 bits corrected.
    fn expected(text: &str) -> Value {
        mended(serde_json::from_str(text).expect("JSON"))
    }

    fn mended(value: Value) -> Value {
        match value {
            Value::Number(number) => match number.as_i64() {
                Some(number) if number < 0 => (number + (1 << 32)).into(),
                _ => Value::Number(number),
            },
            Value::Array(values) => values.into_iter().map(mended).collect(),
            Value::Object(fields) => {
                Value::Object(fields.into_iter().map(|(key, value)| (key, mended(value))).collect())
            }
            other => other,
        }
    }

    /// Checks fields, values and their order.
    fn expect(made: &Value, text: &str) {
        assert_eq!(format!("{made:#}"), format!("{:#}", expected(text)));
    }

    macro_rules! from_nvme_cli {
        ($name:literal, $kind:literal) => {
            concat!("../../tests/nvme-cli/", $name, ".", $kind)
        };
    }

    #[test]
    fn identify_is_as_nvme_cli_prints_it() {
        let page = IdentifyController::parse(include_bytes!(from_nvme_cli!("id-ctrl", "bin")));
        expect(&controller(&page), include_str!(from_nvme_cli!("id-ctrl", "json")));
        let bytes = include_bytes!(from_nvme_cli!("id-ns", "bin"));
        let page = IdentifyNamespace::parse(bytes);
        expect(&namespace(&page, bytes), include_str!(from_nvme_cli!("id-ns", "json")));
    }

    #[test]
    fn lists_are_as_nvme_cli_prints_them() {
        let bytes = include_bytes!(from_nvme_cli!("list-ns", "bin"));
        let ids: Vec<u32> = nvme::identify::namespaces(bytes).collect();
        expect(&namespaces(&ids), include_str!(from_nvme_cli!("list-ns", "json")));
        let found = descriptors(include_bytes!(from_nvme_cli!("ns-descs", "bin")));
        expect(&namespace_descriptors(&found), include_str!(from_nvme_cli!("ns-descs", "json")));
    }

    #[test]
    fn logs_are_as_nvme_cli_prints_them() {
        let log = Smart::parse(include_bytes!(from_nvme_cli!("smart-log", "bin")));
        expect(&smart(&log), include_str!(from_nvme_cli!("smart-log", "json")));
        let (entries, rest) = include_bytes!(from_nvme_cli!("error-log", "bin")).as_chunks();
        assert!(rest.is_empty());
        expect(&errors(entries), include_str!(from_nvme_cli!("error-log", "json")));
    }

    #[test]
    fn malformed_namespace_descriptors_are_dropped() {
        let mut page = [0; PAGE_BYTES];
        assert!(descriptors(&page).is_empty());
        assert_eq!(namespace_descriptors(&[]), object([]));
        // A known type of a wrong length is skipped; the last one exceeds the page.
        page[0] = 2;
        page[1] = 3;
        page[7] = 9;
        page[8] = 255;
        assert!(descriptors(&page).is_empty());
        page.fill(255);
        assert!(descriptors(&page).is_empty());
    }

    #[test]
    fn discovery_flags_and_requirements_have_names() {
        assert_eq!(flags(EntryFlags(0)), "none");
        let both = EntryFlags(0).with_duplicate(true).with_persistent(true);
        assert_eq!(flags(both), "explicit discovery connections, duplicate discovery information");
        assert_eq!(requirements(Treq(6)), "not required, sq flow control disable supported");
        assert_eq!(requirements(Treq(3)), "unrecognized");
    }

    #[test]
    fn text_of_a_peer_is_escaped() {
        assert_eq!(text(b"ab \x1b[2J \0x"), "ab \\x1b[2J ");
        assert_eq!(trimmed(b"4420    "), "4420");
    }
}
