//! The options of `nvmf` that say which target is meant and how to reach it: nvme-cli's names,
//! where it has them.

use std::net::IpAddr;

use clap::Args;

use crate::host::{Host, Provider};
use crate::{Error, Options, Setup};

/// Which target.
#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// Transport: rdma, the only one there is
    #[arg(short = 't', long, default_value = "rdma")]
    pub transport: String,
    /// Address of the target
    #[arg(short = 'a', long)]
    pub traddr: IpAddr,
    /// Port of the target
    #[arg(short = 's', long, default_value_t = nvme::PORT)]
    pub trsvcid: u16,
    /// Address to connect from
    #[arg(short = 'w', long)]
    pub host_traddr: Option<IpAddr>,
    /// Name of the subsystem
    #[arg(short = 'n', long)]
    pub nqn: Option<String>,
    /// Name of this host [default: that of /etc/nvme/hostnqn]
    #[arg(short = 'q', long)]
    pub hostnqn: Option<String>,
    /// Id of this host, a UUID [default: that of /etc/nvme/hostid]
    #[arg(short = 'I', long)]
    pub hostid: Option<String>,
    /// I/O queues
    #[arg(short = 'i', long)]
    pub nr_io_queues: Option<u16>,
    /// Entries of an I/O queue
    #[arg(short = 'Q', long)]
    pub queue_size: Option<u16>,
    /// Keep alive timeout in seconds
    #[arg(short = 'k', long)]
    pub keep_alive_tmo: Option<u32>,
}

impl TargetArgs {
    /// Everything for [`Host::connect`]; what the command line leaves open is as `usual` says.
    ///
    /// # Errors
    /// An option that cannot be.
    pub fn resolve(&self, usual: Usual) -> Result<(Options, Setup), Error> {
        let _ = (usual, Provider::Auto);
        todo!()
    }

    /// Connects.
    ///
    /// # Errors
    /// Why that failed.
    pub fn connect(&self, usual: Usual) -> Result<Host, Error> {
        let (options, setup) = self.resolve(usual)?;
        Host::connect(options, setup)
    }
}

/// What a command takes where the command line says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Usual {
    /// I/O queues.
    pub io_queues: u16,
    /// Entries of an I/O queue.
    pub queue_entries: u16,
    /// Bytes for data in the pool.
    pub data_bytes: u64,
}
