//! Reads Rust source, formatted by rustfmt, line by line.

/// A function with a body.
pub struct Function {
    /// Its name without a path.
    pub name: String,
    /// Number of lines from its `fn` to its closing brace, without blank ones.
    pub lines: usize,
}

pub(super) struct Import {
    pub(super) path: Vec<String>,
    /// Name of the path in this module.
    pub(super) name: String,
    /// Whether other modules may use that name.
    pub(super) is_reexport: bool,
}

/// How attributes of items for tests begin. `any` names a feature too, for tests of other packages.
const FOR_TESTS: [&str; 3] = ["#[cfg(test)]", "#[cfg(all(test", "#[cfg(any(test"];

/// The lines of `text` without comments, contents of string and character literals, and items for
/// tests only.
pub(super) fn production(text: &str) -> Vec<String> {
    split(text).0
}

/// What a program shows: its literals, and comments that clap makes help texts of, with the numbers
/// of their lines. Nothing of items for tests only.
pub fn texts(text: &str) -> Vec<(usize, String)> {
    let (code, mut found) = split(text);
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let is_clap = |line: &String| {
        let traits = ["Args", "Parser", "Subcommand", "ValueEnum"];
        line.contains("#[derive(") && traits.iter().any(|name| line.contains(name))
    };
    for at in (0..code.len()).filter(|at| is_clap(&code[*at])) {
        let above = (0..at).rev().take_while(|n| lines[*n].starts_with("///"));
        let item = above.last().unwrap_or(at)..=end_of_item(&code, at);
        found.extend(item.filter_map(|n| Some((n + 1, lines[n].strip_prefix("///")?.to_owned()))));
    }
    found
}

/// The code of [`production`], and its literals with the numbers of their lines.
fn split(text: &str) -> (Vec<String>, Vec<(usize, String)>) {
    let (bare, mut literals) = without_literals(text);
    let mut lines: Vec<String> = bare.lines().map(|line| line.trim_end().to_owned()).collect();
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at].trim_start();
        if FOR_TESTS.iter().any(|start| line.starts_with(start)) {
            let end = end_of_item(&lines, at + 1);
            lines[at..=end].fill(String::new());
            literals.retain(|(number, _)| !(at..=end).contains(&(number - 1)));
            at = end;
        }
        at += 1;
    }
    (lines, literals)
}

/// Last line of the item that begins at `start`, after attributes.
fn end_of_item(lines: &[String], start: usize) -> usize {
    let mut depth = 0_i64;
    for (i, line) in lines.iter().enumerate().skip(start) {
        let line = line.trim();
        depth += line
            .chars()
            .map(|c| match c {
                '{' | '(' | '[' => 1,
                '}' | ')' | ']' => -1,
                _ => 0,
            })
            .sum::<i64>();
        if depth <= 0 && !line.starts_with("#[") && line.ends_with([';', ',', '}']) {
            return i;
        }
    }
    lines.len() - 1
}

/// Removes comments and literals; the number of lines stays the same. Returns the literals too, with
/// the numbers of their lines.
fn without_literals(text: &str) -> (String, Vec<(usize, String)>) {
    let mut out = String::with_capacity(text.len());
    let chars: Vec<char> = text.chars().collect();
    let newlines =
        |from: usize, to: usize| chars[from..to].iter().filter(|&&c| c == '\n').collect::<String>();
    let (mut i, mut line, mut literals) = (0, 1, Vec::new());
    while i < chars.len() {
        let rest = &chars[i..];
        let end = i + match rest {
            ['/', '/', ..] => rest.iter().position(|&c| c == '\n').unwrap_or(rest.len()),
            ['/', '*', ..] => block_comment(rest),
            ['"', ..] => string(rest),
            ['r', '"' | '#', ..] if !is_word(out.chars().last()) => raw_string(rest),
            ['\'', '\\', ..] => 3 + rest[3..].iter().position(|&c| c == '\'').unwrap_or(0),
            ['\'', _, '\'', ..] => 3,
            _ => 0,
        };
        if end == i {
            out.push(chars[i]);
            line += usize::from(chars[i] == '\n');
            i += 1;
        } else {
            let end = end.min(chars.len());
            if chars[i] == '"' || chars[i] == 'r' {
                out.push_str("\"\"");
                literals.push((line, contents(&chars[i..end])));
            }
            let newlines = newlines(i, end);
            line += newlines.len();
            out.push_str(&newlines);
            i = end;
        }
    }
    (out, literals)
}

/// What is between quotes, on one line where it is continued, and with a space for each escape.
fn contents(literal: &[char]) -> String {
    let is_raw = literal[0] == 'r';
    let literal: String = literal.iter().collect();
    let inner = literal.split_once('"').and_then(|(_, rest)| rest.rsplit_once('"'));
    let mut rest = inner.map_or("", |(inner, _)| inner).chars();
    let mut found = String::new();
    while let Some(c) = rest.next() {
        match c {
            '\\' if !is_raw => match rest.next() {
                Some('\n') => rest = rest.as_str().trim_start().chars(),
                _ => found.push(' '),
            },
            c => found.push(c),
        }
    }
    found
}

fn is_word(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

fn block_comment(text: &[char]) -> usize {
    let (mut depth, mut i) = (0, 0);
    while i < text.len() {
        match text[i..] {
            ['/', '*', ..] => (depth, i) = (depth + 1, i + 2),
            ['*', '/', ..] if depth == 1 => return i + 2,
            ['*', '/', ..] => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
    }
    i
}

fn string(text: &[char]) -> usize {
    let mut i = 1;
    while i < text.len() && text[i] != '"' {
        i += if text[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// Length of a raw string prefix; 0 if it is none: `r#type`.
fn raw_string(text: &[char]) -> usize {
    let hashes = text[1..].iter().take_while(|&&c| c == '#').count();
    if text.get(1 + hashes) != Some(&'"') {
        return 0;
    }
    let mut i = 2 + hashes;
    while i < text.len() {
        let closes = text[i] == '"' && text[i + 1..].iter().take(hashes).all(|&c| c == '#');
        if closes && text.len() > i + hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

/// Modules in other files of the same directory, and whether they are `pub`.
pub(super) fn declared_modules(code: &[String]) -> Vec<(String, bool)> {
    let mut found = Vec::new();
    let mut elsewhere = false;
    for line in code {
        elsewhere |= line.starts_with("#[path");
        if line.is_empty() || line.starts_with("#[") {
            continue;
        }
        let (line, public) = visibility(line);
        let name = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';'));
        if let Some(name) = name.filter(|_| !elsewhere) {
            found.push((name.to_owned(), public));
        }
        elsewhere = false;
    }
    found
}

/// The line without `pub` or `pub(..)`, and whether it is `pub`.
fn visibility(line: &str) -> (&str, bool) {
    if let Some(rest) = line.strip_prefix("pub ") {
        return (rest, true);
    }
    match line.strip_prefix("pub(").and_then(|rest| rest.split_once(") ")) {
        Some((_, rest)) => (rest, false),
        None => (line, false),
    }
}

/// Paths of `use` statements.
pub(super) fn imports(code: &[String]) -> Vec<Import> {
    let mut found = Vec::new();
    let mut i = 0;
    while i < code.len() {
        let line = code[i].trim_start();
        let first = visibility(line).0;
        if let Some(mut statement) = first.strip_prefix("use ").map(str::to_owned) {
            while !statement.ends_with(';') && i + 1 < code.len() {
                i += 1;
                statement.push_str(code[i].trim());
            }
            let old = found.len();
            expand(&[], statement.trim_end_matches(';'), &mut found);
            let is_reexport = first.len() < line.len();
            found[old..].iter_mut().for_each(|import| import.is_reexport = is_reexport);
        }
        i += 1;
    }
    found
}

fn expand(prefix: &[String], tree: &str, found: &mut Vec<Import>) {
    let tree = tree.trim();
    if let Some((head, group)) = tree.split_once('{') {
        let parts = head.split("::").map(str::trim).filter(|part| !part.is_empty());
        let prefix = prefix.iter().cloned().chain(parts.map(str::to_owned)).collect::<Vec<_>>();
        let group = group.strip_suffix('}').unwrap_or(group);
        let (mut depth, mut start) = (0, 0);
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand(&prefix, &group[start..i], found);
                    start = i + 1;
                }
                _ => {}
            }
        }
        expand(&prefix, &group[start..], found);
    } else if !tree.is_empty() {
        let (tree, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let parts = tree.split("::").map(|part| part.trim().to_owned());
        let mut path: Vec<String> = prefix.iter().cloned().chain(parts).collect();
        path.retain(|part| part != "*");
        if path.len() > 1 && path.last().is_some_and(|part| part == "self") {
            path.pop();
        }
        let last = path.last().cloned().unwrap_or_default();
        let name = if alias.is_empty() { last } else { alias.to_owned() };
        found.push(Import { path, name, is_reexport: false });
    }
}

/// Paths of at least two segments outside of `use`.
pub(super) fn inline_paths(code: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut is_use = false;
    for line in code {
        is_use |= visibility(line.trim_start()).0.starts_with("use ");
        if !is_use {
            paths_of(line, &mut found);
        }
        is_use &= !line.ends_with(';');
    }
    found
}

/// Paths of at least two segments.
fn paths_of(line: &str, found: &mut Vec<Vec<String>>) {
    let mut rest = line;
    while let Some(start) = rest.find(|c| is_word(Some(c))) {
        let is_first = !rest[..start].ends_with("::");
        rest = &rest[start..];
        let mut path = Vec::new();
        loop {
            let end = rest.find(|c| !is_word(Some(c))).unwrap_or(rest.len());
            path.push(rest[..end].to_owned());
            rest = &rest[end..];
            let next = rest.strip_prefix("::").filter(|next| is_word(next.chars().next()));
            let Some(next) = next else { break };
            rest = next;
        }
        if is_first && path.len() > 1 {
            found.push(path);
        }
    }
}

/// Functions that have a body, those in `impl` blocks included.
pub(super) fn functions(code: &[String]) -> Vec<Function> {
    let mut found = Vec::new();
    for (i, line) in code.iter().enumerate() {
        let mut text = visibility(line.trim_start()).0;
        for word in ["default ", "const ", "async ", "unsafe ", "extern \"\" "] {
            text = text.strip_prefix(word).unwrap_or(text);
        }
        let Some(rest) = text.strip_prefix("fn ") else { continue };
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let last = end_of_item(code, i);
        if code[last].trim_end().ends_with('}') {
            let lines = code[i..=last].iter().filter(|line| !line.trim().is_empty()).count();
            found.push(Function { name: rest[..end].to_owned(), lines });
        }
    }
    found
}

/// Functions of a trait, with or without a body.
pub(super) fn trait_functions(code: &[String], name: &str) -> usize {
    let head = format!("trait {name}");
    let is_head = |line: &String| {
        let rest = visibility(line).0.strip_prefix(&head);
        rest.is_some_and(|rest| rest.starts_with([' ', ':', '<']))
    };
    let Some(start) = code.iter().position(is_head) else { return 0 };
    let own = code[start..=end_of_item(code, start)].iter();
    own.filter(|line| line.starts_with("    fn ")).count()
}

/// Names of structures, enumerations, unions, traits and aliases, and whether other modules see
/// them.
pub(super) fn type_names(code: &[String]) -> Vec<(String, bool)> {
    let names = code.iter().filter_map(|line| {
        let (bare, is_visible) = (visibility(line).0, line.starts_with("pub"));
        let bare = bare.strip_prefix("unsafe ").unwrap_or(bare);
        let rest = ["struct ", "enum ", "union ", "trait ", "type "]
            .iter()
            .find_map(|word| bare.strip_prefix(word))?;
        let end = rest.find(|c| !is_word(Some(c))).unwrap_or(rest.len());
        Some((rest[..end].to_owned(), is_visible))
    });
    names.collect()
}

/// Variants of enumerations that clap turns into subcommands.
pub(super) fn subcommands(code: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for (i, line) in code.iter().enumerate() {
        let derives = line.strip_prefix("#[derive(").and_then(|rest| rest.strip_suffix(")]"));
        if !derives.is_some_and(|list| list.split(", ").any(|each| each == "Subcommand")) {
            continue;
        }
        let body = &code[i..=end_of_item(code, i)];
        found.extend(body.iter().filter_map(|line| {
            let name =
                line.strip_prefix("    ").filter(|rest| rest.starts_with(char::is_uppercase))?;
            let end = name.find(|c| !is_word(Some(c))).unwrap_or(name.len());
            Some(name[..end].to_owned())
        }));
    }
    found
}

/// The type of an `impl` that is not of a trait.
pub(super) fn inherent_impl(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl").filter(|rest| rest.starts_with(['<', ' ']))?;
    let rest = match rest.strip_prefix('<') {
        Some(generics) => {
            let mut depth = 1;
            let end = generics.find(|c| {
                depth += i32::from(c == '<') - i32::from(c == '>');
                depth == 0
            })?;
            &generics[end + 1..]
        }
        None => rest,
    };
    if rest.contains(" for ") {
        return None;
    }
    let name = rest.trim_start();
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    name[..end.unwrap_or(name.len())].rsplit("::").next()
}

#[cfg(test)]
mod tests {
    use crate::structure::code::*;

    #[test]
    fn comments_and_literals_are_removed_and_lines_preserved() {
        let text = "let a = \"// {\"; // x\n/* {\n/* } */ */let b = '{';\nlet c = r#\"\"}\"#;\nfn f<'a>() {}\n";
        let expected = ["let a = \"\";", "", "let b = ;", "let c = \"\";", "fn f<'a>() {}"];
        assert_eq!(production(text), expected);
    }

    #[test]
    fn items_for_tests_are_left_out() {
        let text = "#[cfg(test)]\n#[allow(x)]\npub(crate) fn f(\n    a: u8,\n) -> u8 {\n    a\n}\nfn g() {}\n#[cfg(test)]\nmod tests;\nmod b;\n#[cfg(any(test, feature = \"testing\"))]\npub mod testing;\n#[cfg(not(any(test, feature = \"testing\")))]\nmod c;\n";
        assert_eq!(
            production(text).concat(),
            "fn g() {}mod b;#[cfg(not(any(test, feature = \"\")))]mod c;"
        );
    }

    #[test]
    fn texts_are_literals_and_help_outside_of_tests() {
        let text = "/// No.\nconst A: &str = \"a \\\n    b\\\"\\n//c\";\n#[cfg(test)]\nmod tests {\n    const B: &str = \"no\";\n}\n/// About.\n#[derive(clap::Args)]\nstruct Args {\n    /// Help.\n    a: u8,\n}\nfn f() {\n    g(r#\"\\d\"#);\n}\n";
        let expected = [(2, "a b  //c"), (15, "\\d"), (8, " About."), (11, " Help.")];
        assert_eq!(texts(text), expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn groups_of_imports_are_expanded() {
        let code = production("pub use crate::{\n    a::{self, B as C},\n    d::*,\n};\n");
        let seen: Vec<_> =
            imports(&code).into_iter().map(|i| (i.path.join("::"), i.name)).collect();
        let expected = [("crate::a", "a"), ("crate::a::B", "C"), ("crate::d", "d")];
        assert_eq!(seen, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn complete_paths_outside_of_use_are_found() {
        let text = "use a::{\n    b::C,\n};\nlet x: Vec<d::E> = ::f::g(h, self::i::<j::K>());\n";
        let seen = inline_paths(&production(text));
        let seen: Vec<_> = seen.into_iter().map(|path| path.join("::")).collect();
        assert_eq!(seen, ["d::E", "self::i", "j::K"]);
    }

    #[test]
    fn subcommands_are_the_variants_alone() {
        let text = "#[derive(Subcommand, Debug)]\nenum A {\n    #[command(hide = true)]\n    Show {\n        Not: u8,\n    },\n    AddAll(Args),\n}\n#[derive(Debug)]\nenum B {\n    C,\n}\n";
        assert_eq!(subcommands(&production(text)), ["Show", "AddAll"]);
    }

    #[test]
    fn impls_of_a_type_differ_from_those_of_a_trait() {
        assert_eq!(inherent_impl("implicit"), None);
        assert_eq!(inherent_impl("impl<T: A<B>> Queue<T> {"), Some("Queue"));
        assert_eq!(inherent_impl("impl super::Queue {"), Some("Queue"));
        assert_eq!(inherent_impl("impl Drop for Queue {"), None);
    }
}
