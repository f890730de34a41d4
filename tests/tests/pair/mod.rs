//! A target and a host in one process, over the soft fabric.

use initiator::{Host, HostOptions, Options, Provider};
use nvme::Nqn;
use nvmfd::config::Config;

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";

/// A subsystem that listens at `address` and lets everybody in; `rest` begins with its namespaces.
pub(crate) fn config(address: &str, nqn: &str, rest: &str) -> Config {
    let text = format!(
        "provider = 'soft'\n[[listener]]\naddress = '{address}'\n\
         [[subsystem]]\nnqn = '{nqn}'\nallow_any_host = true\n{rest}"
    );
    Config::parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// A host at `source` that is connected to the target at `address`.
pub(crate) fn host(address: &str, source: &str, nqn: &str) -> Host {
    let name = |text| Nqn::new(text).expect("a name");
    let at = format!("{address}:4420").parse().expect("an address");
    let options = Options { queue_entries: 64, ..Options::new(at, name(nqn), name(HOST), [7; 16]) };
    let source = Some(source.parse().expect("an address"));
    let setup = HostOptions { provider: Provider::Soft, source, ..HostOptions::default() };
    Host::connect(options, setup).expect("a connection")
}
