//! `nvmf bench`: how fast a namespace is.

use std::process::ExitCode;

use crate::Error;
use crate::options::TargetArgs;

/// Options of `nvmf bench`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which target.
    #[command(flatten)]
    pub target: TargetArgs,
}

/// Runs it.
///
/// # Errors
/// A sentence for a person.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let _ = args;
    todo!()
}
