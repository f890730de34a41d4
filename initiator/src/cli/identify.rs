//! `nvmf id-ctrl`, `id-ns`, `list-ns`, `ns-descs`.

use clap::Args as ClapArgs;
use initiator::Error;
use nvme::identify::{Cns, Csi, Identify, IdentifyController, IdentifyNamespace};
use serde_json::Value;

use super::output::Raw;
use super::{CommonArgs, narrow, nvme_cli_json};

/// Options of `nvmf id-ns` and `nvmf ns-descs`.
#[derive(ClapArgs, Debug)]
pub(crate) struct Namespace {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    #[command(flatten)]
    raw: Raw,
}

/// Options of `nvmf list-ns`.
#[derive(ClapArgs, Debug)]
pub(crate) struct List {
    /// The first namespace to list
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Only namespaces of this I/O command set
    #[arg(short = 'y', long, value_parser = narrow::<u8>)]
    csi: Option<u8>,
    /// Include namespaces that are not attached, if the controller supports namespace management
    #[arg(long)]
    all: bool,
}

pub(crate) fn controller(raw: &Raw, common: &CommonArgs) -> Result<(), Error> {
    let bytes = common.with(|host| host.identify(Identify::new(Cns::CONTROLLER, 0)))?;
    let page = IdentifyController::parse(&bytes);
    let text = || controller_text(&page);
    common.print_or_raw(*raw, &*bytes, || nvme_cli_json::controller(&page), text)
}

pub(crate) fn namespace(args: &Namespace, common: &CommonArgs) -> Result<(), Error> {
    let bytes =
        common.with(|host| host.identify(Identify::new(Cns::NAMESPACE, args.namespace_id)))?;
    let page = IdentifyNamespace::parse(&bytes);
    let text =
        || namespace_text(args.namespace_id, &page, &nvme_cli_json::namespace(&page, &bytes));
    common.print_or_raw(args.raw, &*bytes, || nvme_cli_json::namespace(&page, &bytes), text)
}

pub(crate) fn list(args: &List, common: &CommonArgs) -> Result<(), Error> {
    let after = args.namespace_id.saturating_sub(1);
    let ids = common.with(|host| match args.all {
        true => host.allocated_namespaces(after),
        false => host.namespaces(after, args.csi.map(Csi)),
    })?;
    let text = || {
        ids.iter().enumerate().map(|(at, id)| format!("[{at:>4}]:{id:#x}\n")).collect::<String>()
    };
    common.print(|| nvme_cli_json::namespaces(&ids), text)
}

pub(crate) fn descriptors(args: &Namespace, common: &CommonArgs) -> Result<(), Error> {
    let bytes = common
        .with(|host| host.identify(Identify::new(Cns::NAMESPACE_DESCRIPTORS, args.namespace_id)))?;
    let found = nvme_cli_json::descriptors(&bytes);
    let text = || {
        let head = format!("NVME Namespace Identification Descriptors NS {}:\n", args.namespace_id);
        let lines = found.iter().map(|each| format!("{:<7} : {}\n", each.name, each.text));
        head + &lines.collect::<String>()
    };
    let json = || nvme_cli_json::namespace_descriptors(&found);
    common.print_or_raw(args.raw, &*bytes, json, text)
}

/// Fields that are displayed in hexadecimal, as in nvme-cli.
const HEX: [&str; 28] = [
    "vid", "ssvid", "cmic", "cntlid", "ver", "rtd3r", "rtd3e", "oaes", "ctratt", "rrls", "oacs",
    "lpa", "avscc", "apsta", "rpmbs", "hctma", "sanicap", "sqes", "cqes", "oncs", "fuses", "fna",
    "vwc", "ocfs", "sgls", "fcatt", "nsfeat", "flbas",
];

fn controller_text(page: &IdentifyController) -> String {
    let mut text = "NVME Identify Controller:\n".to_owned();
    let Value::Object(fields) = nvme_cli_json::controller(page) else { return text };
    for (key, value) in &fields {
        match (&**key, value) {
            ("psds", _) => {}
            ("ieee", value) => text += &format!("{key:<9} : {:06x}\n", unsigned(value)),
            (_, value) => text += &format!("{key:<9} : {}\n", shown(key, value)),
        }
    }
    for (index, state) in page.psd.iter().take(usize::from(page.npss_z) + 1).enumerate() {
        let unit = if state.flags & 1 == 1 { 10_000.0 } else { 100.0 };
        text += &format!(
            "ps {index:>6} : mp:{}W {} enlat:{} exlat:{} rrt:{} rrl:{} rwt:{} rwl:{}\n",
            f64::from(state.max_power) / unit,
            if state.flags & 2 == 2 { "non-operational" } else { "operational" },
            state.entry_us,
            state.exit_us,
            state.rrt,
            state.rrl,
            state.rwt,
            state.rwl,
        );
    }
    text
}

fn namespace_text(nsid: u32, page: &IdentifyNamespace, json: &Value) -> String {
    let mut text = format!("NVME Identify Namespace {nsid}:\n");
    let Value::Object(fields) = json else { return text };
    for (key, value) in fields {
        match (&**key, value) {
            ("lbafs", _) => {}
            (
                "nsze" | "ncap" | "nuse" | "mc" | "dpc" | "dps" | "nmic" | "rescap" | "fpi",
                value,
            ) => {
                text += &format!("{key:<8}: {:#x}\n", unsigned(value));
            }
            (_, value) => text += &format!("{key:<8}: {}\n", shown(key, value)),
        }
    }
    let formats = page.lbaf.iter().take(usize::from(page.nlbaf_z) + 1).enumerate();
    for (index, format) in formats {
        text += &format!(
            "lbaf {index:>2} : ms:{:<3} lbads:{:<2} rp:{:#x} {}\n",
            format.metadata_bytes,
            format.lbads,
            format.rp,
            if index == usize::from(page.format_index()) { "(in use)" } else { "" }
        );
    }
    text
}

fn shown(key: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value if HEX.contains(&key) => format!("{:#x}", unsigned(value)),
        value => value.to_string(),
    }
}

fn unsigned(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}
