//! Commands of `nvmf`, one file per family. Each connects, acts and disconnects.

pub(crate) mod data_management;
pub(crate) mod discover;
pub(crate) mod feature;
pub(crate) mod identify;
pub(crate) mod lba_range;
pub(crate) mod list;
pub(crate) mod log_page;
#[path = "../../../target/src/manpages.rs"]
#[expect(unreachable_pub, reason = "the daemon's library has it as well, for its own programs")]
pub(crate) mod manpages;
pub(crate) mod ns_management;
pub(crate) mod nvme_cli_json;
pub(crate) mod output;
pub(crate) mod read_write;
pub(crate) mod reservation;
pub(crate) mod show_regs;
pub(crate) mod supported;

use clap::Args as ClapArgs;
use initiator::bench::report::{Output, print};
use initiator::options::{OptionDefaults, TargetArgs};
use initiator::{Error, Host};
use serde_json::Value;

use output::Raw;

/// Options of a command that sends something to a controller: those of all, and its own.
#[derive(ClapArgs, Debug)]
pub(crate) struct With<A: ClapArgs> {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    args: A,
    #[command(flatten)]
    output: Output,
}

impl<A: ClapArgs> With<A> {
    /// Runs a command, and prints its failure as JSON too if that is requested.
    pub(crate) fn run(
        &self,
        act: impl FnOnce(&A, &CommonArgs) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let common = CommonArgs { target: self.target.clone(), output: self.output };
        act(&self.args, &common).inspect_err(|error| {
            if self.output.is_json() {
                let json = nvme_cli_json::object([("error", error.to_string().into())]);
                // A failure to print the error is ignored.
                let _ = print(format!("{json:#}\n"));
            }
        })
    }
}

/// Options of all such commands.
pub(crate) struct CommonArgs {
    target: TargetArgs,
    output: Output,
}

impl CommonArgs {
    /// Connects, acts and disconnects.
    fn with<T>(&self, act: impl FnOnce(&mut Host) -> Result<T, Error>) -> Result<T, Error> {
        let mut host = self.target.connect(OptionDefaults::default())?;
        let outcome = act(&mut host);
        host.disconnect();
        outcome
    }

    /// Prints JSON or text.
    fn print(
        &self,
        json: impl FnOnce() -> Value,
        text: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        match self.output.is_json() {
            true => print(format!("{:#}\n", json())),
            false => print(text()),
        }
    }

    /// Prints the raw bytes if requested, else JSON or text.
    fn print_or_raw(
        &self,
        raw: Raw,
        bytes: &[u8],
        json: impl FnOnce() -> Value,
        text: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        match raw.raw_binary {
            true => print(bytes),
            false => self.print(json, text),
        }
    }

    /// Prints the result of a command without data.
    fn done(&self, command: &str, nsid: u32, text: &str) -> Result<(), Error> {
        let fields = [("command", command.into()), ("namespace-id", nsid.into())];
        self.print(|| nvme_cli_json::object(fields), || format!("{text}\n"))
    }
}

/// Parses a number as nvme-cli does: decimal or with `0x`, optionally with a binary suffix (`4k`).
pub(crate) fn number(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']) {
        Some(digits) if !text.starts_with("0x") => {
            let shift = match text.as_bytes().last().map(u8::to_ascii_lowercase) {
                Some(b'k') => 10,
                Some(b'm') => 20,
                Some(b'g') => 30,
                _ => 40,
            };
            (digits, shift)
        }
        _ => (text, 0),
    };
    let parsed = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let value = parsed.map_err(|e| e.to_string())?;
    value.checked_mul(1 << shift).ok_or_else(|| "too large a number".to_owned())
}

/// As [`number`], for types with fewer bits.
pub(crate) fn narrow<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    T::try_from(number(text)?).map_err(|_| format!("{text} is too large here"))
}

#[cfg(test)]
mod tests {
    use crate::cli::*;

    #[test]
    fn numbers_are_read_as_nvme_cli_does() {
        assert_eq!(number("17"), Ok(17));
        assert_eq!(number("0xfF"), Ok(255));
        assert_eq!(number("4k"), Ok(4096));
        assert_eq!(number("2M"), Ok(2 << 20));
        assert_eq!(number("0x1000"), Ok(4096));
        assert!(number("").is_err() && number("k").is_err() && number("-1").is_err());
        assert!(number("99999999t").is_err(), "it overflows");
        assert_eq!(narrow::<u8>("255"), Ok(255));
        assert_eq!(narrow::<u8>("256"), Err("256 is too large here".into()));
    }
}
