//! Command lines in documents, for tests that the program accepts each of them. Tests of the programs
//! include this file, because a parser is in the program itself.

use std::fs;
use std::path::Path;

use clap::error::{Error, ErrorKind};

/// Where documents are: their directories, and the ends of their names.
const DIRECTORIES: [&str; 6] =
    [".", "docs", "docs/src", "configs", "initiator/src/cli", "target/src/manpages"];
const KINDS: [&str; 6] = ["md", "roff", "service", "conf", "toml", "yml"];

/// Values for what stands for one.
const VALUES: [(&str, &str); 6] = [
    ("NSID", "1"),
    ("ID", "1"),
    ("ADDRESS", "192.0.2.1"),
    ("N", "1"),
    ("${DEVICE}", "auto"),
    ("$OPTIONS", "--traddr=192.0.2.1"),
];

/// Parses every command line of a program, and reports those that it refuses. One in running text may
/// leave out arguments.
pub(crate) fn assert_accepted(program: &str, parse: impl Fn(Vec<String>) -> Result<(), Error>) {
    let (mut found, mut refused) = (0, Vec::new());
    for (name, text) in documents() {
        let (lines, spans) = parts(&name, &text);
        let lines = lines.iter().map(|line| (line, false));
        for (text, is_prose) in lines.chain(spans.iter().map(|span| (span, true))) {
            for words in commands(text, program) {
                found += 1;
                let line = words.join(" ");
                if let Err(error) = parse(words)
                    && error.use_stderr()
                    && !(is_prose && is_incomplete(&line, &error))
                {
                    refused.push(format!("{name}: {line}: {error}"));
                }
            }
        }
    }
    assert!(found > 5, "{found} command lines of {program}");
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

fn documents() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the checkout");
    let mut all = Vec::new();
    for directory in DIRECTORIES {
        for entry in fs::read_dir(root.join(directory)).expect("a directory") {
            let path = entry.expect("an entry").path();
            let kind = path.extension().and_then(|kind| kind.to_str());
            if kind.is_some_and(|kind| KINDS.contains(&kind)) && path.is_file() {
                let text = fs::read_to_string(&path).expect("text");
                all.push((path.strip_prefix(root).expect("inside").display().to_string(), text));
            }
        }
    }
    all
}

/// Lines that are typed, and code in running text.
fn parts(name: &str, text: &str) -> (Vec<String>, Vec<String>) {
    let text = text.replace("\\\n", " ").replace("\\-", "-");
    let (mut lines, mut prose, mut is_code) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        let is_typed = match name.rsplit('.').next() {
            Some("md") if line.trim_start().starts_with("```") => {
                is_code = !is_code;
                continue;
            }
            Some("md") => is_code,
            Some("toml" | "yml") => false,
            _ => !line.starts_with('#'),
        };
        match is_typed {
            true => lines.push(line.to_owned()),
            false => prose += &format!("{} ", line.trim_start_matches(['#', ' '])),
        }
    }
    (lines, prose.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

/// The command lines of a program in a line of a shell.
fn commands(line: &str, program: &str) -> Vec<Vec<String>> {
    // A root prompt begins a line, a comment does not.
    let prompt = line.trim_start().trim_start_matches(['$', '#']);
    let typed = prompt.split(" #").next().unwrap_or_default();
    let segments = typed.split([';', '&', '|', '(', ')', '>', '<']);
    segments.filter_map(|segment| command(segment, program)).collect()
}

fn command(segment: &str, program: &str) -> Option<Vec<String>> {
    let is_before = |word: &&str| {
        ["sudo", "env", "exec", "!"].contains(word) || word.ends_with('$') || word.contains('=')
    };
    let segment = segment.replace("ExecStart=", "");
    let mut words = segment.split_whitespace().skip_while(is_before).peekable();
    if words.next()?.rsplit('/').next() != Some(program) || words.peek().is_none() {
        return None;
    }
    let is_unclear = |word: &str| word.contains("..") || word.contains('…') || word == "\"$";
    let value = |word: &str| {
        let word = word.trim_matches(['"', '\'', '[', ']']);
        VALUES.iter().find(|(name, _)| *name == word).map_or(word, |(_, value)| value).to_owned()
    };
    let all: Vec<String> = words.map(value).collect();
    let is_command = |word: &String| word.starts_with(|c: char| c.is_ascii_lowercase() || c == '-');
    let is_good = all.first().is_some_and(is_command) && !all.iter().any(|word| is_unclear(word));
    is_good.then(|| std::iter::once(program.to_owned()).chain(all).collect())
}

/// Whether something was left out: arguments, the subcommand of an option, or the value of the last
/// option.
fn is_incomplete(line: &str, error: &Error) -> bool {
    let is_option = |word: Option<&str>| word.is_some_and(|word| word.starts_with('-'));
    match error.kind() {
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        ErrorKind::InvalidValue => is_option(line.split(' ').next_back()),
        ErrorKind::UnknownArgument => is_option(line.split(' ').nth(1)),
        _ => false,
    }
}
