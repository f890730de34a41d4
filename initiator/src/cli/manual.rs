//! Manual pages and shell completions of a program, from its own command line.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::aot::{Bash, Fish, Generator, Zsh, generate_to};
use clap_mangen::Man;

/// Writes the pages of `command` and of its commands, for a section of the manual, and completions
/// for bash, zsh and fish, into the places that they have below a folder such as `/usr/share`.
///
/// # Errors
/// A folder or file cannot be made or written.
pub(crate) fn write(command: Command, section: &str, share: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let folder = share.join("man").join(format!("man{section}"));
    fs::create_dir_all(&folder)?;
    pages(&command, section, &folder)?;
    complete(Bash, &mut command, &name, &share.join("bash-completion/completions"))?;
    // bash-completion looks for the plain name.
    let folder = share.join("bash-completion/completions");
    fs::rename(folder.join(format!("{name}.bash")), folder.join(&name))?;
    complete(Zsh, &mut command, &name, &share.join("zsh/vendor-completions"))?;
    complete(Fish, &mut command, &name, &share.join("fish/vendor_completions.d"))
}

fn pages(command: &Command, section: &str, folder: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        pages(inner, section, folder)?;
    }
    let page = Man::new(command.clone()).section(section).manual("nvmfd");
    page.generate_to(folder).map(drop)
}

fn complete(shell: impl Generator, command: &mut Command, name: &str, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    generate_to(shell, command, name, to).map(drop)
}
