//! `nvmf read`, `write`, `compare`, `compare-and-write`: blocks from and to files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use initiator::bench::report::print;
use initiator::host::Range;
use initiator::options::OptionDefaults;
use initiator::{Error, Host};

use super::lba_range::Place;
use super::nvme_cli_json::object;
use super::{CommonArgs, number};

/// Maximum number of bytes that one command of the tool transfers.
const MOST_BYTES: u64 = 1 << 30;

/// Options of `nvmf read`, `write` and `compare`.
#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    /// Number of blocks, less one: 0 is one block [default: from --data-size]
    #[arg(short = 'c', long, value_name = "COUNT", value_parser = number)]
    block_count: Option<u64>,
    /// Bytes [default: from --block-count, or all of the input]
    #[arg(short = 'z', long, value_name = "BYTES", value_parser = number)]
    data_size: Option<u64>,
    /// File with the data [default: standard input or output]
    #[arg(short = 'd', long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Force unit access: to the medium before the command is done
    #[arg(short = 'f', long)]
    force_unit_access: bool,
    /// Print the latency
    #[arg(long)]
    latency: bool,
}

/// Options of `nvmf compare-and-write`.
#[derive(ClapArgs, Debug)]
pub(crate) struct FusedArgs {
    #[command(flatten)]
    place: Place,
    /// File with what the blocks should be
    #[arg(long, value_name = "FILE")]
    compare_data: PathBuf,
    /// File with what they shall become, as long as the other
    #[arg(short = 'd', long, value_name = "FILE")]
    data: PathBuf,
    /// Force unit access: to the medium before the command is done
    #[arg(short = 'f', long)]
    force_unit_access: bool,
}

pub(crate) fn compare_and_write(args: &FusedArgs, common: &CommonArgs) -> Result<(), Error> {
    let [with, from] =
        [&args.compare_data, &args.data].map(|path| input(Some(path.as_path()), None));
    let (with, from) = (with?, from?);
    let mut host =
        common.target.connect(OptionDefaults { queue_entries: 32, ..OptionDefaults::default() })?;
    let page = host.identify_namespace(args.place.namespace_id);
    let outcome = page.and_then(|page| {
        let Some(block_bytes) = page.block_bytes() else {
            return Err(Error::Local("the namespace has blocks of an impossible size".into()));
        };
        if with.len() != from.len() || !with.len().is_multiple_of(block_bytes as usize) {
            return Err(Error::Usage(format!(
                "{} bytes to compare and {} to write: both must be as many whole blocks of \
                 {block_bytes} bytes",
                with.len(),
                from.len()
            )));
        }
        let range = args.place.with_blocks_of(block_bytes);
        host.compare_and_write(1, range, &with, &from, args.force_unit_access)
    });
    host.disconnect();
    outcome?;
    let json = || {
        object([
            ("command", "compare-and-write".into()),
            ("namespace-id", args.place.namespace_id.into()),
            ("start-block", args.place.start_block.into()),
            ("bytes", from.len().into()),
        ])
    };
    common.print(json, || "compare-and-write: Success\n".into())
}

pub(crate) fn read(args: &Args, common: &CommonArgs) -> Result<(), Error> {
    if common.output.is_json() && args.data.is_none() {
        let text = "the data would mix with the JSON: name a file for them with --data";
        return Err(Error::Usage(text.into()));
    }
    let mut host = common.target.connect(args.usual())?;
    let outcome = args.range(&mut host).and_then(|range| {
        let blocks = args.blocks(range, None)?;
        let mut bytes = vec![0; (blocks * u64::from(range.block_bytes)) as usize];
        let began = Instant::now();
        host.read(range, &mut bytes)?;
        let took = began.elapsed();
        // Possibly only a part of the last block was requested.
        bytes.truncate(args.data_size.map_or(bytes.len(), |size| size as usize));
        Ok((bytes, took))
    });
    host.disconnect();
    let (bytes, took) = outcome?;
    match &args.data {
        Some(path) => save(path, &bytes)?,
        None => print(&bytes)?,
    }
    args.print("read", bytes.len(), took, common)
}

pub(crate) fn write(args: &Args, common: &CommonArgs) -> Result<(), Error> {
    let act =
        |host: &mut Host, range, bytes: &[u8]| host.write(range, bytes, args.force_unit_access);
    args.send("write", act, common)
}

pub(crate) fn compare(args: &Args, common: &CommonArgs) -> Result<(), Error> {
    args.send("compare", Host::compare, common)
}

impl Args {
    fn usual(&self) -> OptionDefaults {
        OptionDefaults { queue_entries: 32, ..OptionDefaults::default() }
    }

    /// Returns the position of the blocks; gets the block size from the controller.
    fn range(&self, host: &mut Host) -> Result<Range, Error> {
        let page = host.identify_namespace(self.place.namespace_id)?;
        let Some(block_bytes) = page.block_bytes() else {
            return Err(Error::Local("the namespace has blocks of an impossible size".into()));
        };
        let format = page.lbaf.get(usize::from(page.format_index()));
        if format.is_some_and(|format| format.metadata_bytes != 0) {
            return Err(Error::Local("the namespace has metadata, which this host has not".into()));
        }
        Ok(self.place.with_blocks_of(block_bytes))
    }

    /// Returns the number of blocks, with `given` bytes available.
    fn blocks(&self, range: Range, given: Option<u64>) -> Result<u64, Error> {
        let block = u64::from(range.block_bytes);
        let size = self.data_size.or(given);
        let blocks = match (self.block_count, size) {
            (Some(count), _) => count.checked_add(1),
            (None, Some(size)) => Some(size.div_ceil(block)),
            (None, None) => Some(1),
        };
        let blocks = blocks.filter(|&blocks| {
            blocks.checked_mul(block).is_some_and(|bytes| (1..=MOST_BYTES).contains(&bytes))
        });
        let Some(blocks) = blocks else {
            return Err(Error::Usage("1 byte to 1 GiB can be moved at once".into()));
        };
        match self.data_size {
            Some(size) if size > blocks * block => Err(Error::Usage(format!(
                "--data-size says {size} bytes, but {blocks} blocks of {block} bytes hold only {}",
                blocks * block
            ))),
            _ => Ok(blocks),
        }
    }

    /// Returns the size of the blocks of --block-count, with the block size from the controller.
    fn total(&self, common: &CommonArgs) -> Result<u64, Error> {
        let mut host = common.target.connect(self.usual())?;
        let range = self.range(&mut host);
        host.disconnect();
        let range = range?;
        Ok(self.blocks(range, None)? * u64::from(range.block_bytes))
    }

    fn send(
        &self,
        what: &'static str,
        act: impl FnOnce(&mut Host, Range, &[u8]) -> Result<(), Error>,
        common: &CommonArgs,
    ) -> Result<(), Error> {
        let wanted = match (self.data_size, self.block_count) {
            (None, Some(_)) => Some(self.total(common)?),
            (size, _) => size,
        };
        // No association exists while the tool waits for the data.
        let mut bytes = input(self.data.as_deref(), wanted.map(|wanted| wanted as usize))?;
        let mut host = common.target.connect(self.usual())?;
        let outcome = self.range(&mut host).and_then(|range| {
            let blocks = self.blocks(range, Some(bytes.len() as u64))?;
            let total = (blocks * u64::from(range.block_bytes)) as usize;
            if self.data_size.is_none() && bytes.len() != total {
                return Err(Error::Usage(format!(
                    "{} bytes are no whole blocks of {} bytes: pad them, or say --data-size",
                    bytes.len(),
                    range.block_bytes
                )));
            }
            // The rest of the last block after --data-size is filled with zeros, as in nvme-cli.
            bytes.resize(total, 0);
            let began = Instant::now();
            act(&mut host, range, &bytes)?;
            Ok((total, began.elapsed()))
        });
        host.disconnect();
        let (total, took) = outcome?;
        self.print(what, total, took, common)
    }

    fn print(
        &self,
        what: &str,
        bytes: usize,
        took: Duration,
        common: &CommonArgs,
    ) -> Result<(), Error> {
        let us = took.as_micros() as u64;
        if common.output.is_json() {
            let done = object([
                ("command", what.into()),
                ("namespace-id", self.place.namespace_id.into()),
                ("start-block", self.place.start_block.into()),
                ("bytes", bytes.into()),
                ("latency_us", us.into()),
            ]);
            return print(format!("{done:#}\n"));
        }
        let mut text = String::new();
        if self.latency {
            text += &format!(" latency: {what}: {us} us\n");
        }
        text += &format!("{what}: Success\n");
        // The data of a read may be written to stdout.
        let _ = io::stderr().write_all(text.as_bytes());
        Ok(())
    }
}

/// Reads `wanted` bytes, or all, of a file or of stdin.
pub(crate) fn input(path: Option<&Path>, wanted: Option<usize>) -> Result<Vec<u8>, Error> {
    let name = path.map_or("the standard input".to_owned(), |path| path.display().to_string());
    let failed = |e: io::Error| Error::Local(format!("{name} cannot be read: {e}"));
    let mut bytes = Vec::new();
    let most = wanted.map_or(MOST_BYTES + 1, |wanted| wanted as u64).min(MOST_BYTES + 1);
    match path {
        Some(path) => File::open(path).map_err(failed)?.take(most).read_to_end(&mut bytes),
        None => io::stdin().lock().take(most).read_to_end(&mut bytes),
    }
    .map_err(failed)?;
    match wanted {
        Some(wanted) if bytes.len() < wanted => {
            Err(Error::Local(format!("{name} has {} bytes, but {wanted} are needed", bytes.len())))
        }
        None if bytes.len() as u64 > MOST_BYTES => {
            Err(Error::Usage("at most 1 GiB can be moved at once: say how much".into()))
        }
        None if bytes.is_empty() => Err(Error::Local(format!("{name} is empty"))),
        _ => Ok(bytes),
    }
}

fn save(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    std::fs::write(path, bytes)
        .map_err(|e| Error::Local(format!("{} cannot be written: {e}", path.display())))
}
