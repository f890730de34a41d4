//! `nvmf effects-log`, `supported-log-pages`, `fid-support-effects-log`: capabilities reported by a
//! controller.

use initiator::Error;
use nvme::identify::Csi;
use nvme::log::{CommandEffects, Effects, FeaturesSupported, GetLogPage, LogId, SupportedPages};
use nvme::{AdminOpcode, IoOpcode};
use serde_json::{Map, Value, json};

use super::CommonArgs;
use super::output::Raw;

pub(crate) fn effects(raw: &Raw, common: &CommonArgs) -> Result<(), Error> {
    let (bytes, log) = read(common, LogId::EFFECTS, Effects::parse)?;
    common.print_or_raw(*raw, &bytes, || effects_json(&log), || effects_text(&log))
}

pub(crate) fn supported(raw: &Raw, common: &CommonArgs) -> Result<(), Error> {
    let (bytes, log) = read(common, LogId::SUPPORTED_PAGES, SupportedPages::parse)?;
    let values = log.pages.map(|page| page.0);
    let text = || {
        let head = format!("Support Log Pages Details for {}:\n", common.target.traddr);
        numbered(&values).fold(head, |text, (lid, value)| {
            let name = LogId(lid).name().unwrap_or("Unknown");
            text + &format!("LID {lid:#x} ({name}), supports {value:#x}\n")
        })
    };
    let json = || json!({ "supported_log_pages": listed("lid", &values) });
    common.print_or_raw(*raw, &bytes, json, text)
}

pub(crate) fn features(raw: &Raw, common: &CommonArgs) -> Result<(), Error> {
    let (bytes, log) = read(common, LogId::FEATURE_EFFECTS, FeaturesSupported::parse)?;
    let values = log.features.map(|feature| feature.0);
    let text = || {
        let head = format!("FID Supports Effects Log for device: {}\n", common.target.traddr);
        numbered(&values).fold(head, |text, (fid, value)| {
            text + &format!("FID {fid:02x} -> Support Effects Log: {value:08x}\n")
        })
    };
    let json = || json!({ "fid_support": listed("fid", &values) });
    common.print_or_raw(*raw, &bytes, json, text)
}

/// Reads a log of the NVM command set: its bytes, and its parsed form.
fn read<T, const N: usize>(
    common: &CommonArgs,
    lid: LogId,
    parse: impl Fn(&[u8; N]) -> T,
) -> Result<(Vec<u8>, T), Error> {
    let page = GetLogPage { csi: Csi::NVM, ..GetLogPage::new(lid, 0, 1) };
    let bytes = common.with(|host| host.log(page, N))?;
    let log = bytes.first_chunk().map(parse);
    let log = log.ok_or(Error::Local("the log page is shorter than specified".into()))?;
    Ok((bytes, log))
}

/// Returns the entries that are not 0, each with its number.
fn numbered(values: &[u32; 256]) -> impl Iterator<Item = (u8, u32)> + '_ {
    (0..=u8::MAX).zip(values.iter().copied()).filter(|(_, value)| *value != 0)
}

fn listed(what: &str, values: &[u32; 256]) -> Value {
    numbered(values).map(|(number, value)| json!({ format!("{what}_{number}"): value })).collect()
}

fn effects_json(log: &Effects) -> Value {
    let set = |prefix: &str, of: &[CommandEffects; 256], name: fn(u8) -> &'static str| {
        let values = of.map(|command| command.0);
        let entry = |(opcode, value): (u8, u32)| {
            (format!("{prefix}_{opcode} ({})", name(opcode)), Value::from(value))
        };
        numbered(&values).map(entry).collect::<Map<_, _>>()
    };
    json!([{
        "command_set_identifier": Csi::NVM.0,
        "admin_cmd_set": set("ACS", &log.admin, admin_name),
        "io_cmd_set": set("IOCS", &log.io, io_name),
    }])
}

fn effects_text(log: &Effects) -> String {
    let set = |prefix: &str, of: &[CommandEffects; 256], name: fn(u8) -> &'static str| {
        let values = of.map(|command| command.0);
        let line = |(opcode, value): (u8, u32)| {
            let code = format!("{prefix}{opcode}");
            format!("{code:<8} [{:<32}] {value:08x}\n", name(opcode))
        };
        numbered(&values).map(line).collect::<String>()
    };
    format!(
        "NVM Command Set Log Page\n{}\nAdmin Commands\n{}\nI/O Commands\n{}",
        "-".repeat(80),
        set("ACS", &log.admin, admin_name),
        set("IOCS", &log.io, io_name)
    )
}

fn admin_name(opcode: u8) -> &'static str {
    AdminOpcode(opcode).name().unwrap_or("Unknown")
}

fn io_name(opcode: u8) -> &'static str {
    IoOpcode(opcode).name().unwrap_or("Unknown")
}

#[cfg(test)]
mod tests {
    use crate::cli::supported::*;

    /// The output of nvme-cli 2.3 for the same log.
    #[test]
    fn effects_are_shown_as_nvme_cli_does() {
        let supported = CommandEffects(0).with_supported(true);
        let mut log = Effects::default();
        log.admin[0x02] = supported;
        log.admin[0x0C] = supported;
        log.io[0x01] = supported.with_lbcc(true);
        log.io[0x15] = supported;
        let expected = json!([{
            "command_set_identifier": 0,
            "admin_cmd_set": { "ACS_2 (Get Log Page)": 1, "ACS_12 (Asynchronous Event Request)": 1 },
            "io_cmd_set": { "IOCS_1 (Write)": 3, "IOCS_21 (Reservation Release)": 1 },
        }]);
        assert_eq!(effects_json(&log), expected);
        let text = effects_text(&log);
        assert!(text.contains("ACS2     [Get Log Page                    ] 00000001\n"), "{text}");
        assert!(text.ends_with("IOCS21   [Reservation Release             ] 00000001\n"), "{text}");
    }

    #[test]
    fn only_nonzero_entries_are_listed() {
        let mut values = [0; 256];
        (values[1], values[255]) = (2_097_153, 1);
        assert_eq!(listed("fid", &values), json!([{ "fid_1": 2_097_153 }, { "fid_255": 1 }]));
    }
}
