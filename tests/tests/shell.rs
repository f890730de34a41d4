//! The scripts of the tree run on machines other than ours: under another awk, in another locale.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[path = "shell/samples.rs"]
mod samples;

use crate::samples::{SAMPLES, Sample};

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the checkout").canonicalize().expect("the checkout")
}

/// Files of the tree that are shell, with their text: by their first line, or by their ending.
fn scripts() -> Vec<(String, String)> {
    let mut directories =
        [".ci", "configs", "fuzz", "initiator", "nvme", "rdma", "target", "tests"]
            .map(|name| root().join(name))
            .to_vec();
    let mut found = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.is_symlink() {
                directories.push(path);
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let first = text.lines().next().unwrap_or_default();
            let shell = first.starts_with("#!") && first.ends_with("sh");
            if shell || path.extension().is_some_and(|ending| ending == "sh") {
                let name = path.strip_prefix(root()).expect("inside").display().to_string();
                found.push((name, text));
            }
        }
    }
    assert!(found.len() > 50, "the scripts are found");
    found.sort();
    found
}

/// The end of the shell word that begins `text`: what blanks outside of quotes and of `$(..)` end.
fn word_end(text: &str) -> usize {
    let (mut double, mut single, mut depth) = (false, false, 0_u32);
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '\'' if !double => single = !single,
            '"' if !single && depth == 0 => double = !double,
            '(' if !single && (before == '$' || depth > 0) => depth += 1,
            ')' if !single && depth > 0 => depth -= 1,
            _ if c.is_whitespace() && !double && !single && depth == 0 => return at,
            _ => {}
        }
        before = c;
    }
    text.len()
}

/// The awk programs of a script in order: the options before each, and its text.
fn programs<'a>(name: &str, text: &'a str) -> Vec<(Vec<&'a str>, &'a str)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("awk ") {
        let line = rest[..at].rfind('\n').map_or(0, |end| end + 1);
        let begins = rest[..at].chars().next_back().is_none_or(|c| " \n|(".contains(c));
        let comment = rest[line..at].trim_start().starts_with('#');
        rest = &rest[at + 4..];
        if !begins || comment {
            continue;
        }
        let mut options = Vec::new();
        loop {
            rest = rest.trim_start_matches([' ', '\\', '\n']);
            let word = &rest[..word_end(rest)];
            if let Some(program) = word.strip_prefix('\'') {
                let program = program.split('\'').next().expect("its end");
                found.push((options, program));
                break;
            }
            assert!(word.starts_with('-'), "{name}: the shell changes an awk program: {word}");
            options.push(word);
            rest = &rest[word.len()..];
            if word == "-v" || word == "-F" {
                rest = rest.trim_start();
                options.push(&rest[..word_end(rest)]);
                rest = &rest[word_end(rest)..];
            }
        }
    }
    found
}

/// Runs a program under one awk, as a script in German surroundings would.
fn awk(awk: &[&str], separator: Option<&str>, program: &str, sample: &Sample) -> Output {
    let mut command = Command::new(awk[0]);
    command.args(&awk[1..]).envs([("LC_ALL", "C"), ("LANG", "de_DE.UTF-8")]);
    if let Some(separator) = separator {
        command.args(["-F", separator]);
    }
    for variable in sample.variables {
        command.args(["-v", variable]);
    }
    let mut child = command
        .arg(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{awk:?}: {error}: `make test-packages` installs it"));
    // One that reads nothing has ended by then.
    let _ = child.stdin.take().expect("a pipe").write_all(sample.input.as_bytes());
    child.wait_with_output().expect("its end")
}

#[test]
fn awk_programs_print_the_same_under_gawk_mawk_and_busybox() {
    let mut samples = SAMPLES.iter();
    for (name, text) in scripts() {
        for (options, program) in programs(&name, &text) {
            let sample = samples.next().filter(|sample| sample.script == name);
            let sample = sample.unwrap_or_else(|| panic!("{name}: no sample for: {program}"));
            // The value of -F follows at once, or as a word of its own.
            let separator = options.iter().enumerate().find_map(|(at, option)| {
                let here = option.strip_prefix("-F")?;
                let value = if here.is_empty() { options[at + 1] } else { here };
                Some(value.trim_matches('\''))
            });
            let declared = options.iter().filter(|each| **each == "-v").count();
            assert_eq!(sample.variables.len(), declared, "{name}: {program}");
            for kind in [&["gawk"][..], &["mawk"], &["busybox", "awk"]] {
                let output = awk(kind, separator, program, sample);
                let said = String::from_utf8_lossy(&output.stdout);
                let complaint = String::from_utf8_lossy(&output.stderr);
                assert_eq!(complaint, "", "{kind:?}: {name}: {program}");
                assert_eq!(said, sample.output, "{kind:?}: {name}: {program}");
                assert_eq!(output.status.code(), Some(sample.status), "{kind:?}: {name}");
            }
        }
    }
    assert!(samples.next().is_none(), "a sample is for no program");
}

#[test]
fn shellcheck_finds_nothing() {
    let names = scripts().into_iter().map(|(name, _)| name);
    let mut command = Command::new("shellcheck");
    let output = command.args(["-f", "gcc"]).args(names).current_dir(root()).output();
    let output = output.expect("shellcheck is there: `make test-packages` installs it");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// What is sorted, formatted and read by scripts is not the user's language, and what they make
/// can be read by the users whom they create. Guests set their own locale; a shell of Debian's
/// packages parses nothing.
#[test]
fn scripts_depend_on_neither_locale_nor_umask() {
    for (name, text) in scripts() {
        let inside = name.starts_with("tests/vm/guest/") || name.starts_with("configs/debian/p");
        let first = ["tests/vm/agent", "tests/vm/init-uml", "tests/vm/init-qemu"];
        if inside || first.contains(&name.as_str()) {
            continue;
        }
        for line in ["export LC_ALL=C", "umask 022"] {
            assert!(text.lines().any(|each| each == line), "{name} needs the line: {line}");
        }
    }
}
