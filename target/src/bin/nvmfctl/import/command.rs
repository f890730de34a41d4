//! `nvmfctl import`: converts the saved configuration of another target.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::{ImportError, Imported, nvmet, spdk};
use clap::Subcommand;
use serde_json::json;

use crate::output::{Failure, Output};

/// Print the configuration; remarks are comments at its end, and on stderr.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Convert a file of `nvmetcli save FILE`: the kernel's target
    Nvmet {
        /// Read this file; "-" is stdin
        file: PathBuf,
    },
    /// Convert the output of `rpc.py save_config` of SPDK
    Spdk {
        /// Read this file; "-" is stdin
        file: PathBuf,
    },
}

pub(crate) fn run(command: &Command, output: Output) -> Result<(), Failure> {
    let (Command::Nvmet { file } | Command::Spdk { file }) = command;
    let text = read(file)?;
    let imported = match command {
        Command::Nvmet { .. } => nvmet(&text, block_size_bytes),
        Command::Spdk { .. } => spdk(&text, block_size_bytes),
    };
    let Imported { text, remarks } = imported.map_err(|error| refused(file, &error))?;
    if output.json {
        output
            .answer(&((), json!({"configuration": text, "remarks": remarks})), |()| String::new());
        return Ok(());
    }
    output.print(&text);
    for remark in &remarks {
        eprintln!("nvmfctl: {remark}");
    }
    Ok(())
}

fn read(file: &Path) -> Result<String, Failure> {
    let read = if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(file)
    };
    read.map_err(|error| Failure::new(format!("{} cannot be read: {error}", file.display())))
}

fn refused(file: &Path, error: &ImportError) -> Failure {
    let shown = file.display();
    let advice = match error {
        ImportError::NotJson(_) | ImportError::NotThis(_) => {
            "; save it with `nvmetcli save FILE` or `rpc.py save_config > FILE`"
        }
        ImportError::Nothing(_) | ImportError::Mistakes { .. } => "",
    };
    Failure::new(format!("{shown}: {error}{advice}"))
}

/// Returns the logical block size of the block device at a path of this machine, in bytes.
fn block_size_bytes(path: &Path) -> Option<u32> {
    let device = std::fs::canonicalize(path).ok()?;
    let name = device.strip_prefix("/dev").ok()?.to_str()?.replace('/', "!");
    let of = Path::new("/sys/class/block").join(name).canonicalize().ok()?;
    // The queue directory of a partition is one level up, at its whole device.
    let queues = [of.join("queue"), of.parent()?.join("queue")];
    let read = |queue: &PathBuf| std::fs::read_to_string(queue.join("logical_block_size")).ok();
    queues.iter().find_map(read)?.trim().parse().ok()
}
