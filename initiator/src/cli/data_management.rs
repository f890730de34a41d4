//! `nvmf flush`, `write-zeroes`, `verify-blocks`, `write-uncor`, `dsm`, `copy`: commands without
//! data to display.

use clap::Args as ClapArgs;
use initiator::host::Range;
use initiator::{Error, Host};
use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::sqe::{DsmAttributes, DsmRange};

use super::lba_range::Place;
use super::{CommonArgs, narrow, number};

/// Options of `nvmf flush`.
#[derive(ClapArgs, Debug)]
pub(crate) struct FlushArgs {
    /// Namespace; 0xffffffff for all, where the controller takes that
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
}

/// Which blocks a command without data is about.
#[derive(ClapArgs, Debug)]
struct Blocks {
    #[command(flatten)]
    place: Place,
    /// Number of blocks, less one: 0 is one block
    #[arg(short = 'c', long, value_name = "COUNT", default_value = "0", value_parser = number)]
    block_count: u64,
}

/// Options of `nvmf write-zeroes`.
#[derive(ClapArgs, Debug)]
pub(crate) struct ZeroesArgs {
    #[command(flatten)]
    blocks: Blocks,
    /// Ask the controller to deallocate the blocks
    #[arg(short = 'd', long)]
    deac: bool,
}

/// Options of `nvmf verify-blocks` and `nvmf write-uncor`.
#[derive(ClapArgs, Debug)]
pub(crate) struct BlocksArgs {
    #[command(flatten)]
    blocks: Blocks,
}

/// Options of `nvmf copy-blocks`.
#[derive(ClapArgs, Debug)]
pub(crate) struct CopyArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// First block of the destination
    #[arg(long, value_name = "LBA", value_parser = number)]
    sdlba: u64,
    /// First block of each source range
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = number, required = true)]
    slbs: Vec<u64>,
    /// Number of blocks of each range, less one: 0 is one block
    #[arg(short = 'b', long, value_name = "LIST", value_delimiter = ',',
        value_parser = narrow::<u16>, required = true)]
    blocks: Vec<u16>,
    /// Format of the descriptors: 0 or 1
    #[arg(short = 'F', long, value_name = "FORMAT", default_value = "0",
        value_parser = narrow::<u8>)]
    format: u8,
    /// Force unit access: to the medium before the command is done
    #[arg(short = 'f', long)]
    force_unit_access: bool,
}

/// Options of `nvmf dsm`.
#[derive(ClapArgs, Debug)]
pub(crate) struct DsmArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// First block of each range
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = number, required = true)]
    slbs: Vec<u64>,
    /// Number of blocks of each range
    #[arg(short = 'b', long, value_name = "LIST", value_delimiter = ',',
        value_parser = narrow::<u32>, required = true)]
    blocks: Vec<u32>,
    /// Context attributes of each range
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = narrow::<u32>)]
    ctx_attrs: Vec<u32>,
    /// Deallocate the ranges
    #[arg(short = 'd', long)]
    ad: bool,
    /// They will be written as a whole
    #[arg(long)]
    idw: bool,
    /// They will be read as a whole
    #[arg(short = 'r', long)]
    idr: bool,
}

pub(crate) fn flush(args: &FlushArgs, common: &CommonArgs) -> Result<(), Error> {
    common.with(|host| host.flush(args.namespace_id))?;
    common.done("flush", args.namespace_id, "NVMe Flush: success")
}

pub(crate) fn write_zeroes(args: &ZeroesArgs, common: &CommonArgs) -> Result<(), Error> {
    let act = |host: &mut Host, range, blocks| host.write_zeroes(range, blocks, args.deac);
    args.blocks.act(common, act)?;
    common.done("write-zeroes", args.blocks.place.namespace_id, "NVME Write Zeroes Success")
}

pub(crate) fn verify(args: &BlocksArgs, common: &CommonArgs) -> Result<(), Error> {
    args.blocks.act(common, Host::verify)?;
    common.done("verify-blocks", args.blocks.place.namespace_id, "NVME Verify Success")
}

pub(crate) fn write_uncorrectable(args: &BlocksArgs, common: &CommonArgs) -> Result<(), Error> {
    args.blocks.act(common, Host::write_uncorrectable)?;
    common.done("write-uncor", args.blocks.place.namespace_id, "NVME Write Uncorrectable Success")
}

pub(crate) fn copy(args: &CopyArgs, common: &CommonArgs) -> Result<(), Error> {
    if args.slbs.len() != args.blocks.len() || !(1..=256).contains(&args.slbs.len()) {
        let text = "--slbs and --blocks must list as many ranges each, 1 to 256";
        return Err(Error::Usage(text.into()));
    }
    let flags = CopyFlags(0).with_format(args.format).with_fua(args.force_unit_access);
    let copy = Copy { sdlba: args.sdlba, flags };
    if args.format > 0xF || copy.range_bytes().is_none() {
        return Err(Error::Usage("--format is 0 or 1".into()));
    }
    let ranges: Vec<CopyRange> = args
        .slbs
        .iter()
        .zip(&args.blocks)
        .map(|(&slba, &nlb_z)| CopyRange { slba, nlb_z })
        .collect();
    common.with(|host| host.copy(args.namespace_id, copy, &ranges))?;
    common.done("copy-blocks", args.namespace_id, "NVMe Copy: success")
}

pub(crate) fn dsm(args: &DsmArgs, common: &CommonArgs) -> Result<(), Error> {
    let (slbs, blocks, attributes) = (&args.slbs, &args.blocks, &args.ctx_attrs);
    if slbs.len() != blocks.len() || !(attributes.is_empty() || attributes.len() == slbs.len()) {
        let text = "--slbs, --blocks and --ctx-attrs (if given) must list as many ranges each";
        return Err(Error::Usage(text.into()));
    }
    if slbs.len() > 256 {
        return Err(Error::Usage("Dataset Management takes at most 256 ranges".into()));
    }
    let ranges: Vec<DsmRange> = slbs
        .iter()
        .zip(blocks)
        .enumerate()
        .map(|(at, (&slba, &blocks))| DsmRange {
            attributes: attributes.get(at).copied().unwrap_or(0),
            blocks,
            slba,
        })
        .collect();
    let wanted = DsmAttributes(0)
        .with_deallocate(args.ad)
        .with_integral_write(args.idw)
        .with_integral_read(args.idr);
    common.with(|host| host.dataset_management(args.namespace_id, wanted, &ranges))?;
    common.done("dsm", args.namespace_id, "NVMe DSM: success")
}

impl Blocks {
    /// Executes a command for these blocks.
    fn act(
        &self,
        common: &CommonArgs,
        act: impl FnOnce(&mut Host, Range, u64) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let blocks = self.block_count.checked_add(1);
        let blocks = blocks.ok_or_else(|| Error::Usage("--block-count is too large".into()))?;
        common.with(|host| {
            let range = self.place.range(host)?;
            act(host, range, blocks)
        })
    }
}
