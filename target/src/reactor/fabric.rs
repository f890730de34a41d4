//! Choice of the fabric provider, and its fabrics.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use rdma::capture::{Capture, Keep};
use rdma::soft::endpoint::Config;
use rdma::soft::{Group, Options};
use rdma::{Fabric, FabricError, Region};

use crate::config::{CaptureConfig, Provider, SoftConfig};
use crate::core::poll_group::MOST_IN_VAIN;
#[cfg(feature = "verbs")]
use crate::core::qpair::SENDS_PER_RECEIVE;

/// The chosen provider.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Choice {
    /// An RDMA device, through rdma-core.
    Verbs,
    /// RoCEv2 over UDP sockets.
    Soft,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Choice::Verbs => "verbs",
            Choice::Soft => "soft",
        })
    }
}

/// Chooses the provider for these listeners, with the reason as a part of a sentence. `owns`:
/// whether an RDMA device has an address.
pub(crate) fn choose(
    provider: Provider,
    listeners: &[SocketAddr],
    owns: impl Fn(&SocketAddr) -> bool,
) -> (Choice, String) {
    match provider {
        Provider::Verbs => (Choice::Verbs, "the configuration says so".to_owned()),
        Provider::Soft => (Choice::Soft, "the configuration says so".to_owned()),
        // An address that is added later belongs to this machine.
        Provider::Auto if listeners.is_empty() => {
            choose(provider, &[SocketAddr::from(([0, 0, 0, 0], 0))], owns)
        }
        Provider::Auto => match listeners.iter().find(|at| !owns(at)) {
            None => (Choice::Verbs, "RDMA devices have the listeners' addresses".to_owned()),
            Some(at) if at.ip().is_unspecified() => {
                (Choice::Soft, "this machine has no RDMA device".to_owned())
            }
            Some(at) => (Choice::Soft, format!("no RDMA device has the address {}", at.ip())),
        },
    }
}

/// Whether an RDMA device has this address; for an unspecified one, whether there is any.
pub(crate) fn owns(at: &SocketAddr) -> bool {
    #[cfg(feature = "verbs")]
    return rdma::verbs::owns(*at);
    #[cfg(not(feature = "verbs"))]
    {
        let _ = at;
        false
    }
}

/// Starts the configured capture.
pub(crate) fn capture(config: &CaptureConfig) -> Result<Capture, FabricError> {
    let file = config.path.display();
    let keep = if config.payload { Keep::All } else { Keep::Headers };
    Capture::begin(&config.path, keep, config.limit_bytes)
        .map_err(|error| FabricError(format!("cannot write packets to {file}: {error}")))
}

impl Choice {
    /// Creates the source of the fabrics of this number of reactors, with a capture if configured.
    pub(crate) fn fabrics(
        self,
        reactors: usize,
        soft: SoftConfig,
        capture: Option<Capture>,
    ) -> Result<Fabrics, FabricError> {
        Ok(match self {
            #[cfg(feature = "verbs")]
            Choice::Verbs => Fabrics::Verbs(capture),
            #[cfg(not(feature = "verbs"))]
            Choice::Verbs => {
                return Err(FabricError(
                    "this build has no provider \"verbs\": build it with that feature, or write \
                     provider = \"soft\""
                        .into(),
                ));
            }
            Choice::Soft => {
                let Options { config, .. } = Options::default();
                let source_ports = soft.source_ports;
                let config = Config { vain_per_source: Some(MOST_IN_VAIN), source_ports, ..config };
                let options = Options { config, ..Options::default() };
                Fabrics::Soft(Group::new(reactors as u32, options)?, capture)
            }
        })
    }
}

/// Source of the fabrics of the reactors.
#[derive(Debug)]
pub(crate) enum Fabrics {
    #[cfg(feature = "verbs")]
    Verbs(Option<Capture>),
    Soft(Group, Option<Capture>),
}

impl Fabrics {
    /// The group of the provider `soft`.
    pub(crate) fn group(&self) -> Option<&Group> {
        match self {
            #[cfg(feature = "verbs")]
            Fabrics::Verbs(_) => None,
            Fabrics::Soft(group, _) => Some(group),
        }
    }

    /// Creates the fabric of the reactor with this index, whose pool has this number of receives.
    pub(crate) fn make(
        &self,
        index: usize,
        region: Arc<Region>,
        receives: u32,
    ) -> Result<Box<dyn Fabric>, FabricError> {
        match self {
            #[cfg(feature = "verbs")]
            Fabrics::Verbs(capture) => {
                let sends = receives.saturating_mul(SENDS_PER_RECEIVE);
                let load = rdma::verbs::Load { receives, sends };
                let mut verbs = rdma::verbs::Verbs::new(region, load)?;
                if let Some(capture) = capture {
                    verbs.capture_to(capture);
                }
                Ok(Box::new(verbs))
            }
            Fabrics::Soft(group, capture) => {
                #[cfg(not(feature = "verbs"))]
                let _ = receives;
                let mut soft = group.fabric(index as u32, region)?;
                if let Some(capture) = capture {
                    soft.capture_to(capture);
                }
                Ok(Box::new(soft))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::reactor::fabric::*;

    #[test]
    fn auto_chooses_verbs_only_if_adapters_have_every_address() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let of_device = |at: &SocketAddr| at.ip().to_string().starts_with("10.");
        let (choice, _) = choose(Provider::Auto, &[at("10.0.0.1:4420")], of_device);
        assert_eq!(choice, Choice::Verbs);
        let both = [at("10.0.0.1:4420"), at("127.0.0.1:4420")];
        let (choice, why) = choose(Provider::Auto, &both, of_device);
        assert_eq!((choice, &*why), (Choice::Soft, "no RDMA device has the address 127.0.0.1"));
        let (choice, why) = choose(Provider::Auto, &[at("0.0.0.0:4420")], |_| false);
        assert_eq!((choice, &*why), (Choice::Soft, "this machine has no RDMA device"));
        assert_eq!(choose(Provider::Verbs, &both, |_| false).0, Choice::Verbs);
        assert_eq!(choose(Provider::Soft, &both, |_| true).0, Choice::Soft);
    }
}
