//! `nvmf list`: lists every namespace that a target exports to this host.

use std::net::SocketAddr;

use initiator::options::{OptionDefaults, TargetArgs};
use initiator::{Error, Host, HostOptions, Options};
use nvme::Nqn;
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::log::{SubsystemType, TransportType};
use rdma::ZonedIp;
use serde_json::Value;

use super::nvme_cli_json::{object, text, trimmed};
use super::output::{bytes, table};
use super::{CommonArgs, discover};

struct Item {
    nsid: u32,
    path: String,
    firmware: String,
    model: String,
    serial: String,
    page: IdentifyNamespace,
}

pub(crate) fn run((): &(), common: &CommonArgs) -> Result<(), Error> {
    let mut items = Vec::new();
    for (options, setup) in subsystems(&common.target)? {
        items.extend(namespaces(options, setup)?);
    }
    common.print(
        || object([("Devices", items.iter().map(json).collect())]),
        || table(&std::iter::once(heading()).chain(items.iter().map(row)).collect::<Vec<_>>()),
    )
}

/// Returns the named subsystem, or all of the Discovery log.
fn subsystems(target: &TargetArgs) -> Result<Vec<(Options, HostOptions)>, Error> {
    let usual = OptionDefaults { data_bytes: 1 << 20, ..OptionDefaults::default() };
    if target.nqn.is_some() {
        return Ok(vec![target.resolve(usual)?]);
    }
    let mut found: Vec<(Options, HostOptions)> = Vec::new();
    for record in discover::ask(target)?.records {
        if record.subtype != SubsystemType::NVM || record.trtype != TransportType::RDMA {
            continue;
        }
        let place = format!("{}:{}", trimmed(&record.traddr.0), trimmed(&record.trsvcid.0));
        let nqn: Result<Nqn, _> = record.subnqn.nqn();
        let to = address(&record.traddr.0, &record.trsvcid.0, target.address()?);
        let (Ok(nqn), Some(to)) = (nqn, to) else {
            return Err(Error::Local(format!("a discovery record leads nowhere: {place}")));
        };
        // One path to each subsystem is sufficient.
        if !found.iter().any(|(options, _)| options.subnqn == nqn) {
            let (options, setup) = target.resolve_for(nqn, usual)?;
            found.push((Options { to, ..options }, setup));
        }
    }
    Ok(found)
}

/// The address of a record. A link-local one is on the link of the discovery service.
fn address(traddr: &[u8], trsvcid: &[u8], discovery: SocketAddr) -> Option<SocketAddr> {
    let ip = trimmed(traddr).parse().ok()?;
    Some(ZonedIp::beside(ip, discovery).with_port(trimmed(trsvcid).parse().ok()?))
}

fn namespaces(options: Options, setup: HostOptions) -> Result<Vec<Item>, Error> {
    let place = format!("rdma://{}/{}", options.to, options.subnqn);
    let mut host = Host::connect(options, setup)?;
    let items = read(&mut host, &place);
    host.disconnect();
    items
}

fn read(host: &mut Host, place: &str) -> Result<Vec<Item>, Error> {
    let IdentifyController { sn, mn, fr, .. } = *host.session().controller();
    host.namespaces(0, None)?
        .into_iter()
        .map(|nsid| {
            Ok(Item {
                nsid,
                path: format!("{place}/{nsid}"),
                firmware: text(&fr.0),
                model: text(&mn.0),
                serial: text(&sn.0),
                page: host.identify_namespace(nsid)?,
            })
        })
        .collect()
}

impl Item {
    fn block_bytes(&self) -> u64 {
        self.page.block_bytes().unwrap_or(0).into()
    }
}

/// Formats an item as in nvme-cli. There is no device; its path is the address of the namespace instead.
fn json(item: &Item) -> Value {
    let block = item.block_bytes();
    object([
        ("NameSpace", item.nsid.into()),
        ("DevicePath", item.path.clone().into()),
        ("Firmware", item.firmware.trim_end().into()),
        ("ModelNumber", item.model.trim_end().into()),
        ("SerialNumber", item.serial.trim_end().into()),
        ("UsedBytes", item.page.nuse.saturating_mul(block).into()),
        ("MaximumLBA", item.page.nsze.into()),
        ("PhysicalSize", item.page.nsze.saturating_mul(block).into()),
        ("SectorSize", block.into()),
    ])
}

fn heading() -> Vec<String> {
    ["Node", "SN", "Model", "Namespace", "Usage", "Format", "FW Rev"].map(str::to_owned).to_vec()
}

fn row(item: &Item) -> Vec<String> {
    let block = u128::from(item.block_bytes());
    let metadata = item.page.lbaf.get(usize::from(item.page.format_index()));
    vec![
        item.path.clone(),
        item.serial.trim_end().into(),
        item.model.trim_end().into(),
        item.nsid.to_string(),
        format!(
            "{} / {}",
            bytes(u128::from(item.page.nuse) * block),
            bytes(u128::from(item.page.nsze) * block)
        ),
        format!("{} + {} B", bytes(block), metadata.map_or(0, |format| format.metadata_bytes)),
        item.firmware.trim_end().into(),
    ]
}
