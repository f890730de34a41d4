//! Manual pages and shell completions, generated from the command line of a program.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, Command};
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
    let version = command.get_version().unwrap_or_default().to_owned();
    let directory = share.join("man").join(format!("man{section}"));
    fs::create_dir_all(&directory)?;
    pages(&command, None, &version, section, &directory)?;
    let page = directory.join(format!("{name}.{section}"));
    OpenOptions::new().append(true).open(page)?.write_all(more.as_bytes())?;
    complete(Bash, &mut command, &name, &share.join("bash-completion/completions"))?;
    // bash-completion expects the plain name.
    let directory = share.join("bash-completion/completions");
    fs::rename(directory.join(format!("{name}.bash")), directory.join(&name))?;
    complete(Zsh, &mut command, &name, &share.join("zsh/vendor-completions"))?;
    complete(Fish, &mut command, &name, &share.join("fish/vendor_completions.d"))
}

/// The page of a command and those of its subcommands. `program`: whose subcommand it is.
fn pages(
    command: &Command,
    program: Option<&str>,
    version: &str,
    section: &str,
    directory: &Path,
) -> io::Result<()> {
    let name = program.unwrap_or(command.get_name());
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        pages(inner, Some(name), version, section, directory)?;
    }
    let usage = synopsis(command, program.is_some());
    let mut shown = command.clone().override_usage(usage);
    if program.is_some() {
        shown = shown.mut_args(|arg| if arg.is_global_set() { arg.hide(true) } else { arg });
    }
    let page = Man::new(shown).section(section).manual("nvmfd manual");
    let page = page.source(format!("nvmfd {version}")).date(date(version));
    let path = page.generate_to(directory)?;
    if program.is_some() {
        let more = format!(".SH SEE ALSO\n.BR {name} ({section}) has options of all commands\n");
        OpenOptions::new().append(true).open(path)?.write_all(more.as_bytes())?;
    }
    Ok(())
}

/// A command with its options and their values. Global options are in the page of the program.
fn synopsis(command: &Command, is_inner: bool) -> String {
    let mut text = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let shown = |arg: &&Arg| {
        !(arg.is_hide_set() || arg.get_id() == "help" || is_inner && arg.is_global_set())
    };
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(shown).partition(|arg| arg.is_positional());
    for option in options {
        text +=
            &if option.is_required_set() { format!(" {option}") } else { format!(" [{option}]") };
    }
    for argument in positional {
        text += &format!(" {argument}");
    }
    if command.has_subcommands() {
        text += if command.is_subcommand_required_set() { " <COMMAND>" } else { " [COMMAND]" };
    }
    text
}

/// The day of the sources, which the version of a package has (`0.1.0+20261129.24126e3bd`).
fn date(version: &str) -> String {
    let day = version.split_once('+').and_then(|(_, rest)| rest.get(..8));
    match day.filter(|day| day.bytes().all(|digit| digit.is_ascii_digit())) {
        Some(day) => format!("{}-{}-{}", &day[..4], &day[4..6], &day[6..]),
        None => String::new(),
    }
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
            .version("1.0+20261129.24126e3bd")
            .arg(Arg::new("socket").long("socket").global(true))
            .subcommand(
                Command::new("shown")
                    .about("does it")
                    .arg(Arg::new("size").long("size").value_name("SIZE"))
                    .arg(Arg::new("nsid").value_name("NSID").required(true))
                    .subcommand(Command::new("deep")),
            )
            .subcommand(Command::new("hidden").hide(true));
        let share = tempfile::tempdir().unwrap();
        write(command, "8", ".SH EXAMPLES\n", share.path()).unwrap();
        let read = |path: &str| fs::read_to_string(share.path().join(path)).unwrap();
        let title = "prog 8 2026-11-29 \"nvmfd 1.0+20261129.24126e3bd\" \"nvmfd manual\"";
        assert!(read("man/man8/prog.8").contains(title), "{}", read("man/man8/prog.8"));
        assert!(read("man/man8/prog.8").contains("\\-\\-socket"));
        let shown = read("man/man8/prog-shown.8").replace("\\-", "-");
        assert!(shown.contains(" [--size <SIZE>] <NSID> [COMMAND]"), "{shown}");
        assert!(!shown.contains("--socket") && shown.contains(".BR prog (8)"), "{shown}");
        assert!(read("man/man8/prog.8").ends_with(".SH EXAMPLES\n"));
        assert!(read("man/man8/prog-shown.8").contains("does it"));
        assert!(read("man/man8/prog-shown-deep.8").contains(".SH SYNOPSIS"));
        assert_eq!(fs::read_dir(share.path().join("man/man8")).unwrap().count(), 3);
        assert!(read("bash-completion/completions/prog").contains("shown"));
        assert!(read("zsh/vendor-completions/_prog").contains("#compdef prog"));
        assert!(read("fish/vendor_completions.d/prog.fish").contains("shown"));
    }
}
