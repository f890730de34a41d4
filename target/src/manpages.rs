//! Manual pages and shell completions, generated from the command line of a program.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_complete::aot::{Bash, Fish, Generator, Zsh, generate_to};
use clap_mangen::Man;

/// Writes the pages of `command` and of its subcommands, for a section of the manual, and completions for
/// bash, zsh and fish, to their standard places below a directory such as `/usr/share`. `more`: sections that
/// its command line does not have, such as EXAMPLES, in the language of man(7).
///
/// # Errors
/// A directory or file cannot be created or written.
pub fn write(command: Command, section: &str, more: &str, share: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let directory = share.join("man").join(format!("man{section}"));
    fs::create_dir_all(&directory)?;
    pages(&command, section, &directory)?;
    let page = directory.join(format!("{name}.{section}"));
    OpenOptions::new().append(true).open(page)?.write_all(more.as_bytes())?;
    complete(Bash, &mut command, &name, &share.join("bash-completion/completions"))?;
    // bash-completion expects the plain name.
    let directory = share.join("bash-completion/completions");
    fs::rename(directory.join(format!("{name}.bash")), directory.join(&name))?;
    complete(Zsh, &mut command, &name, &share.join("zsh/vendor-completions"))?;
    complete(Fish, &mut command, &name, &share.join("fish/vendor_completions.d"))
}

fn pages(command: &Command, section: &str, directory: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        pages(inner, section, directory)?;
    }
    let page = Man::new(command.clone()).section(section).manual("nvmfd");
    page.generate_to(directory).map(drop)
}

fn complete(shell: impl Generator, command: &mut Command, name: &str, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    generate_to(shell, command, name, to).map(drop)
}

#[cfg(test)]
mod tests {
    use crate::manpages::*;

    #[test]
    fn every_command_has_a_man_page_and_every_shell_completions() {
        let command = Command::new("prog")
            .version("1")
            .subcommand(Command::new("shown").about("does it").subcommand(Command::new("deep")))
            .subcommand(Command::new("hidden").hide(true));
        let share = tempfile::tempdir().unwrap();
        write(command, "8", ".SH EXAMPLES\n", share.path()).unwrap();
        let read = |path: &str| fs::read_to_string(share.path().join(path)).unwrap();
        assert!(read("man/man8/prog.8").contains(".TH prog 8"));
        assert!(read("man/man8/prog.8").ends_with(".SH EXAMPLES\n"));
        assert!(read("man/man8/prog-shown.8").contains("does it"));
        assert!(read("man/man8/prog-shown-deep.8").contains(".SH SYNOPSIS"));
        assert_eq!(fs::read_dir(share.path().join("man/man8")).unwrap().count(), 3);
        assert!(read("bash-completion/completions/prog").contains("shown"));
        assert!(read("zsh/vendor-completions/_prog").contains("#compdef prog"));
        assert!(read("fish/vendor_completions.d/prog.fish").contains("shown"));
    }
}
