//! `nvmf discover`.

use initiator::host::Discovery;
use initiator::options::{OptionDefaults, TargetArgs};
use initiator::{Error, Host};
use nvme::Nqn;
use serde_json::Value;

use super::{CommonArgs, nvme_cli_json};

pub(crate) fn run((): &(), common: &CommonArgs) -> Result<(), Error> {
    let log = ask(&common.target)?;
    common.print(|| nvme_cli_json::discovery(&log), || text(&log))
}

/// Gets the Discovery log; `--nqn` may select a discovery service other than the well-known one.
pub(crate) fn ask(target: &TargetArgs) -> Result<Discovery, Error> {
    // No other command is sent, so a small pool suffices.
    let usual = OptionDefaults { data_bytes: 1 << 20, ..OptionDefaults::default() };
    let (options, setup) = match &target.nqn {
        Some(_) => target.resolve(usual)?,
        None => target.resolve_for(Nqn::DISCOVERY, usual)?,
    };
    if !options.subnqn.is_discovery() {
        let text = "only the discovery service can be asked what there is: leave out --nqn";
        return Err(Error::Usage(text.into()));
    }
    Host::discover(options, setup)
}

fn text(log: &Discovery) -> String {
    let mut text = format!(
        "\nDiscovery Log Number of Records {}, Generation counter {}\n",
        log.records.len(),
        log.genctr
    );
    for (index, entry) in log.records.iter().enumerate() {
        text += &format!("=====Discovery Log Entry {index}======\n");
        for (key, value) in nvme_cli_json::record(entry) {
            let name = format!("{key}:");
            text += &match (&*key, value) {
                ("rdma_pkey", Value::Number(pkey)) => {
                    format!("{name} {:#06x}\n", pkey.as_u64().unwrap_or(0))
                }
                (key, Value::String(value)) if key.starts_with("rdma_") => {
                    format!("{name:<12} {value}\n")
                }
                (_, Value::String(value)) => format!("{name:<8} {value}\n"),
                (_, value) => format!("{name:<8} {value}\n"),
            };
        }
    }
    text
}
