//! `nvmf create-ns`, `delete-ns`, `attach-ns`, `detach-ns`, `format`.

use clap::Args as ClapArgs;
use initiator::Error;
use nvme::NSID_ALL;
use nvme::identify::{Csi, IdentifyNamespace};
use nvme::namespace_management::{AttachmentSelect, NewNamespace};

use super::{CommonArgs, narrow, number};

/// Options of `nvmf create-ns`.
#[derive(ClapArgs, Debug)]
pub(crate) struct CreateArgs {
    /// Size in blocks
    #[arg(long, value_name = "BLOCKS", value_parser = number)]
    nsze: u64,
    /// Capacity in blocks; without it, the size
    #[arg(short = 'c', long, value_name = "BLOCKS", value_parser = number)]
    ncap: Option<u64>,
    /// Index of the format of its blocks
    #[arg(short = 'f', long, value_name = "FLBAS", default_value = "0", value_parser = narrow::<u8>,
        conflicts_with = "block_size")]
    flbas: u8,
    /// Bytes of a block, instead of its index
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = number)]
    block_size: Option<u64>,
    /// Protection settings
    #[arg(short = 'd', long, value_name = "DPS", default_value = "0", value_parser = narrow::<u8>)]
    dps: u8,
    /// Sharing: 0 private, 1 shared
    #[arg(short = 'm', long, value_name = "NMIC", default_value = "1", value_parser = narrow::<u8>)]
    nmic: u8,
    /// ANA group; 0: the controller chooses
    #[arg(long, value_name = "GROUP", default_value = "0", value_parser = narrow::<u32>)]
    anagrp_id: u32,
    /// I/O command set
    #[arg(short = 'y', long, default_value = "0", value_parser = narrow::<u8>)]
    csi: u8,
}

/// Options of `nvmf delete-ns`.
#[derive(ClapArgs, Debug)]
pub(crate) struct DeleteArgs {
    /// Namespace; 0xffffffff for all that hosts have made
    #[arg(long, value_name = "NSID", value_parser = narrow::<u32>)]
    namespace_id: u32,
}

/// Options of `nvmf attach-ns` and `nvmf detach-ns`.
#[derive(ClapArgs, Debug)]
pub(crate) struct AttachArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Controllers; without it, the one that this command gets itself
    #[arg(short = 'c', long, value_name = "LIST", value_delimiter = ',',
        value_parser = narrow::<u16>)]
    controllers: Vec<u16>,
}

/// Options of `nvmf format`.
#[derive(ClapArgs, Debug)]
pub(crate) struct FormatArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Index of the format of its blocks; without it, the one that it has
    #[arg(short = 'l', long, value_name = "LBAF", value_parser = clap::value_parser!(u8).range(0..64),
        conflicts_with = "block_size")]
    lbaf: Option<u8>,
    /// Bytes of a block, instead of its index
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = number)]
    block_size: Option<u64>,
    /// Secure erase: 0 none, 1 user data, 2 cryptographic
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=7))]
    ses: u8,
}

pub(crate) fn create(args: &CreateArgs, common: &CommonArgs) -> Result<(), Error> {
    let nsid = common.with(|host| {
        let flbas = match args.block_size {
            Some(bytes) => {
                let index = index(&host.identify_namespace(NSID_ALL)?, bytes)?;
                index & 0xF | (index & 0x30) << 1
            }
            None => args.flbas,
        };
        let new = NewNamespace {
            nsze: args.nsze,
            ncap: args.ncap.unwrap_or(args.nsze),
            flbas,
            dps: args.dps,
            nmic: args.nmic,
            anagrpid: args.anagrp_id,
            ..NewNamespace::default()
        };
        host.create_namespace(&new, Csi(args.csi))
    })?;
    common.done("create-ns", nsid, &format!("create-ns: Success, created nsid:{nsid}"))
}

pub(crate) fn delete(args: &DeleteArgs, common: &CommonArgs) -> Result<(), Error> {
    let nsid = args.namespace_id;
    common.with(|host| host.delete_namespace(nsid))?;
    common.done("delete-ns", nsid, &format!("delete-ns: Success, deleted nsid:{nsid}"))
}

pub(crate) fn attach(args: &AttachArgs, common: &CommonArgs) -> Result<(), Error> {
    change(args, AttachmentSelect::ATTACH, "attach-ns", common)
}

pub(crate) fn detach(args: &AttachArgs, common: &CommonArgs) -> Result<(), Error> {
    change(args, AttachmentSelect::DETACH, "detach-ns", common)
}

pub(crate) fn format(args: &FormatArgs, common: &CommonArgs) -> Result<(), Error> {
    let nsid = args.namespace_id;
    common.with(|host| {
        let format = match (args.lbaf, args.block_size) {
            (Some(lbaf), _) => lbaf,
            (None, Some(bytes)) => index(&host.identify_namespace(nsid)?, bytes)?,
            (None, None) => {
                let flbas = host.identify_namespace(nsid)?.flbas;
                flbas & 0xF | flbas >> 1 & 0x30
            }
        };
        host.format(nsid, format, args.ses)
    })?;
    common.done("format", nsid, &format!("Success formatting namespace:{nsid:x}"))
}

fn change(
    args: &AttachArgs,
    sel: AttachmentSelect,
    name: &str,
    common: &CommonArgs,
) -> Result<(), Error> {
    let nsid = args.namespace_id;
    common.with(|host| {
        let mut cntlids = args.controllers.clone();
        if cntlids.is_empty() {
            cntlids.push(host.identify_controller()?.cntlid);
        }
        // The list must be sorted.
        cntlids.sort_unstable();
        host.attach_namespace(sel, nsid, &cntlids)
    })?;
    common.done(name, nsid, &format!("{name}: Success, nsid:{nsid}"))
}

/// Returns the index of the format with blocks of this number of bytes and no metadata.
fn index(page: &IdentifyNamespace, bytes: u64) -> Result<u8, Error> {
    let formats = page.lbaf.iter().take(usize::from(page.nlbaf_z) + 1);
    let fits = |lbads: u8| 1u64.checked_shl(lbads.into()).is_some_and(|size| size == bytes);
    let found =
        formats.enumerate().find(|(_, f)| f.lbads > 0 && f.metadata_bytes == 0 && fits(f.lbads));
    match found {
        Some((at, _)) => Ok(at as u8),
        None => Err(Error::Local(format!("the controller has no blocks of {bytes} bytes"))),
    }
}
