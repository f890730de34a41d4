//! Arguments for the block range of a command.

use clap::Args;
use initiator::host::Range;
use initiator::{Error, Host};

use super::{narrow, number};

/// A namespace and a block in it, named as in nvme-cli.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    pub(crate) namespace_id: u32,
    /// The first block
    #[arg(long, value_name = "LBA", default_value = "0", value_parser = number)]
    pub(crate) start_block: u64,
}

impl Place {
    /// Returns the position of the blocks; gets the block size from the controller.
    pub(crate) fn range(self, host: &mut Host) -> Result<Range, Error> {
        match host.identify_namespace(self.namespace_id)?.block_bytes() {
            Some(block_bytes) => Ok(self.with_blocks_of(block_bytes)),
            None => Err(Error::Local("the namespace has blocks of an impossible size".into())),
        }
    }

    /// Returns the position of the blocks for a known block size.
    pub(crate) fn with_blocks_of(self, block_bytes: u32) -> Range {
        Range { nsid: self.namespace_id, slba: self.start_block, block_bytes }
    }
}
