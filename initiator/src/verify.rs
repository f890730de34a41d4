//! `nvmf verify`: does a namespace keep what it promised.

pub mod model;
mod register;
pub mod state;
mod violation;

pub use model::{Change, Model, Op, Shape};
pub use register::{Standing, Value};
pub use violation::{Difference, Expected, Kind, Violation};

use std::process::ExitCode;

use crate::Error;
use crate::options::TargetArgs;

/// Options of `nvmf verify`.
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
