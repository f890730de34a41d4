//! `nvmf smart-log`, `error-log`, `get-log`.

use clap::Args as ClapArgs;
use initiator::Error;
use nvme::NSID_ALL;
use nvme::identify::Csi;
use nvme::log::{ErrorEntry, GetLogPage, LogId, Smart};

use super::nvme_cli_json::{self, hex, object};
use super::output::{Raw, bytes as amount, dump};
use super::{CommonArgs, narrow, number};

/// Options of `nvmf smart-log`.
#[derive(ClapArgs, Debug)]
pub(crate) struct SmartArgs {
    /// Namespace, for a controller that keeps a log for each
    #[arg(long, value_name = "NSID", default_value = "0xffffffff", value_parser = narrow::<u32>)]
    namespace_id: u32,
    #[command(flatten)]
    raw: Raw,
}

/// Options of `nvmf error-log`.
#[derive(ClapArgs, Debug)]
pub(crate) struct ErrorArgs {
    /// Entries to read, at most as many as there can be
    #[arg(short = 'e', long, value_name = "COUNT", default_value = "64",
        value_parser = clap::value_parser!(u16).range(1..))]
    log_entries: u16,
    #[command(flatten)]
    raw: Raw,
}

/// Options of `nvmf get-log`.
#[derive(ClapArgs, Debug)]
pub(crate) struct PageArgs {
    /// Log page identifier
    #[arg(long, value_name = "LID", value_parser = narrow::<u8>)]
    log_id: u8,
    /// Bytes to read, up to 64 MiB
    #[arg(short = 'l', long, value_name = "BYTES", value_parser = page_length)]
    log_len: u32,
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "0xffffffff", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Offset in the page, in bytes
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = number)]
    lpo: u64,
    /// Log specific parameter
    #[arg(long, default_value = "0", value_parser = narrow::<u8>)]
    lsp: u8,
    /// Log specific identifier
    #[arg(short = 'S', long, default_value = "0", value_parser = narrow::<u16>)]
    lsi: u16,
    /// I/O command set
    #[arg(short = 'y', long, default_value = "0", value_parser = narrow::<u8>)]
    csi: u8,
    /// Do not acknowledge an asynchronous event by reading
    #[arg(short = 'r', long)]
    rae: bool,
    #[command(flatten)]
    raw: Raw,
}

fn page_length(text: &str) -> Result<u32, String> {
    match narrow::<u32>(text)? {
        len @ 1..=0x400_0000 => Ok(len),
        _ => Err("1 byte to 64 MiB can be read".into()),
    }
}

pub(crate) fn smart(args: &SmartArgs, common: &CommonArgs) -> Result<(), Error> {
    let nsid = args.namespace_id;
    let page = GetLogPage { nsid, rae: false, ..GetLogPage::new(LogId::SMART, 0, 1) };
    let bytes = common.with(|host| host.log(page, Smart::BYTES))?;
    let Some(log) = bytes.first_chunk().map(Smart::parse) else { return Err(short()) };
    let text = || smart_text(&log, &common.target.traddr, nsid);
    common.print_or_raw(args.raw, &bytes, || nvme_cli_json::smart(&log), text)
}

pub(crate) fn errors(args: &ErrorArgs, common: &CommonArgs) -> Result<(), Error> {
    let nsid = NSID_ALL;
    let page = GetLogPage { nsid, rae: false, ..GetLogPage::new(LogId::ERROR, 0, 1) };
    let bytes = common.with(|host| {
        let most = u16::from(host.session().controller().elpe_z) + 1;
        let count = args.log_entries.min(most);
        host.log(page, usize::from(count) * ErrorEntry::BYTES)
    })?;
    let (entries, _) = bytes.as_chunks();
    let text = || error_text(entries, &common.target.traddr);
    common.print_or_raw(args.raw, &bytes, || nvme_cli_json::errors(entries), text)
}

pub(crate) fn page(args: &PageArgs, common: &CommonArgs) -> Result<(), Error> {
    let page = GetLogPage {
        lid: LogId(args.log_id),
        nsid: args.namespace_id,
        lsp: args.lsp,
        rae: args.rae,
        lsi: args.lsi,
        lpo: args.lpo,
        csi: Csi(args.csi),
        ..GetLogPage::default()
    };
    let bytes = common.with(|host| host.log(page, args.log_len as usize))?;
    let json = || {
        object([
            ("log-id", args.log_id.into()),
            ("namespace-id", args.namespace_id.into()),
            ("offset", args.lpo.into()),
            ("length", bytes.len().into()),
            ("data", hex(&bytes).into()),
        ])
    };
    let text = || {
        format!(
            "Device:{} log-id:{} namespace-id:{:#x}\n{}",
            common.target.traddr,
            args.log_id,
            args.namespace_id,
            dump(&bytes)
        )
    };
    common.print_or_raw(args.raw, &bytes, json, text)
}

fn short() -> Error {
    Error::Local("the log page is shorter than specified".into())
}

fn smart_text(log: &Smart, place: &str, nsid: u32) -> String {
    let celsius = |kelvin: u16| i32::from(kelvin) - 273;
    let units = |count: u128| format!("{count} ({})", amount(count.saturating_mul(512_000)));
    let lines = [
        ("critical_warning", format!("{:#x}", log.critical_warning.0)),
        ("temperature", format!("{} °C ({} K)", celsius(log.temperature_k), log.temperature_k)),
        ("available_spare", format!("{}%", log.spare_percent)),
        ("available_spare_threshold", format!("{}%", log.spare_threshold_percent)),
        ("percentage_used", format!("{}%", log.used_percent)),
        ("endurance group critical warning summary", format!("{:#x}", log.endurance_warning)),
        ("Data Units Read", units(log.data_units_read)),
        ("Data Units Written", units(log.data_units_written)),
        ("host_read_commands", log.host_reads.to_string()),
        ("host_write_commands", log.host_writes.to_string()),
        ("controller_busy_time", log.busy_min.to_string()),
        ("power_cycles", log.power_cycles.to_string()),
        ("power_on_hours", log.power_on_hours.to_string()),
        ("unsafe_shutdowns", log.unsafe_shutdowns.to_string()),
        ("media_errors", log.media_errors.to_string()),
        ("num_err_log_entries", log.error_entries.to_string()),
        ("Warning Temperature Time", log.warning_temperature_min.to_string()),
        ("Critical Composite Temperature Time", log.critical_temperature_min.to_string()),
    ];
    let sensors = log.sensors_k.iter().enumerate().filter(|(_, kelvin)| **kelvin != 0);
    let sensors = sensors.map(|(at, &kelvin)| {
        (format!("Temperature Sensor {}", at + 1), format!("{} °C ({kelvin} K)", celsius(kelvin)))
    });
    let thermal = [
        ("Thermal Management T1 Trans Count", log.tmt1_transitions),
        ("Thermal Management T2 Trans Count", log.tmt2_transitions),
        ("Thermal Management T1 Total Time", log.tmt1_s),
        ("Thermal Management T2 Total Time", log.tmt2_s),
    ];
    let head = format!("Smart Log for NVME device:{place} namespace-id:{nsid:x}\n");
    let lines = lines.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(sensors);
    let thermal = thermal.into_iter().map(|(name, value)| (name.to_owned(), value.to_string()));
    lines.chain(thermal).fold(head, |text, (name, value)| text + &format!("{name:<40}: {value}\n"))
}

fn error_text(log: &[[u8; ErrorEntry::BYTES]], place: &str) -> String {
    const RULE: &str = ".................\n";
    let mut text = format!("Error Log Entries for device:{place} entries:{}\n{RULE}", log.len());
    for (index, bytes) in log.iter().enumerate() {
        let entry = ErrorEntry::parse(bytes);
        text += &format!(" Entry[{index:>2}]   \n{RULE}");
        for (name, value) in [
            ("error_count", entry.error_count.to_string()),
            ("sqid", entry.sqid.to_string()),
            ("cmdid", format!("{:#x}", entry.cid)),
            ("status_field", format!("{:#x}({})", entry.status.field() >> 1, entry.status)),
            ("phase_tag", format!("{:#x}", bytes[12] & 1)),
            ("parm_err_loc", format!("{:#x}", entry.parameter)),
            ("lba", format!("{:#x}", entry.lba)),
            ("nsid", format!("{:#x}", entry.nsid)),
            ("vs", entry.vendor_log.to_string()),
            ("trtype", entry.trtype.to_string()),
            ("cs", format!("{:#x}", entry.command_info)),
            ("trtype_spec_info", format!("{:#x}", entry.transport_info)),
        ] {
            text += &format!("{name:<16}: {value}\n");
        }
        text += RULE;
    }
    text
}
