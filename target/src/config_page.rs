//! The manual page nvmfd.toml(5), from the page of the book about every key.

use std::fs;
use std::io;
use std::path::Path;

/// The page of the book.
const BOOK: &str = include_str!("../../docs/src/configuration.md");

/// The example that the packages install.
const EXAMPLE: &str = include_str!("../../configs/nvmfd.toml");

/// Writes the page below a directory such as `/usr/share`.
///
/// # Errors
/// A directory or file cannot be created or written.
pub fn write(share: &Path) -> io::Result<()> {
    let directory = share.join("man/man5");
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("nvmfd.toml.5"), page())
}

fn page() -> String {
    let (_, body) = BOOK.split_once("\n\n").unwrap_or_default();
    let mut page = String::from(
        ".TH nvmfd.toml 5 \"\" nvmfd nvmfd\n.SH NAME\nnvmfd.toml \\- configuration of nvmfd\n\
         .SH DESCRIPTION\n",
    );
    page += &roff(body);
    page += ".SH FILES\n.I /etc/nvmfd/nvmfd.toml\n.br\n.I /etc/nvmfd/conf.d/*.toml\n.SH EXAMPLES\n.nf\n";
    EXAMPLE.lines().for_each(|line| page += &format!("{}\n", plain(line)));
    page + ".fi\n.SH SEE ALSO\n.BR nvmfd (8),\n.BR nvmfctl (8),\n.BR nvmf (1)\n"
}

/// Converts the Markdown that the page uses: headings, paragraphs, lists, tables and code.
fn roff(markdown: &str) -> String {
    let mut roff = String::new();
    let (mut is_code, mut is_paragraph, mut has_head) = (false, false, false);
    for line in markdown.lines() {
        let was_paragraph = std::mem::take(&mut is_paragraph);
        if line.starts_with("```") {
            roff += if is_code { ".fi\n" } else { ".PP\n.nf\n" };
            is_code = !is_code;
        } else if is_code {
            roff += &format!("{}\n", plain(line));
        } else if let Some(title) = line.strip_prefix("## ") {
            roff += &format!(".SH {}\n", text(title).to_uppercase());
        } else if let Some(row) = line.strip_prefix("| ") {
            // The head of a table, and the line below it, are no rows.
            if std::mem::replace(&mut has_head, true) {
                roff += &table_row(row);
            }
            continue;
        } else if line.starts_with("|--") || line.is_empty() {
            continue;
        } else if let Some(item) = line.strip_prefix("* ") {
            roff += &format!(".IP \\(bu 2\n{}\n", text(item));
            is_paragraph = true;
        } else {
            let line = text(line.trim_start());
            roff += &if was_paragraph { format!("{line}\n") } else { format!(".PP\n{line}\n") };
            is_paragraph = true;
        }
        has_head = false;
    }
    roff
}

/// A row as an item: the first cell, the default, the meaning.
fn table_row(row: &str) -> String {
    let cells: Vec<&str> = row.trim_end_matches('|').split(" | ").map(str::trim).collect();
    let (key, rest) = cells.split_first().unwrap_or((&"", &[]));
    let (default, meaning) = match rest {
        [default, meaning @ ..] if !meaning.is_empty() => (*default, meaning.join(" | ")),
        _ => ("", rest.join(" | ")),
    };
    let default = if default.is_empty() { String::new() } else { format!(" (default: {default})") };
    format!(".TP\n{}\n{}\n", text(&format!("{key}{default}")), text(&meaning))
}

/// Text without the marks of code, emphasis and links.
fn text(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[') {
        text += before;
        match link.split_once("](") {
            Some((shown, after)) if !shown.contains('[') => {
                text += shown;
                rest = after.split_once(')').map_or("", |(_, rest)| rest);
            }
            _ => {
                text.push('[');
                rest = link;
            }
        }
    }
    plain(&(text + rest).replace("**", "").replace('`', ""))
}

/// Escapes a line for roff.
fn plain(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use crate::config::known_keys;
    use crate::config_page::*;

    #[test]
    fn the_page_has_every_key_of_the_configuration() {
        let page = page();
        for (title, keys) in known_keys() {
            for key in keys {
                let item = format!("\n.TP\n{key}");
                assert!(page.contains(&item), "{title}: {key}\n{page}");
            }
        }
        let body = roff(BOOK);
        assert!(!body.contains("**") && !body.contains("]("), "{body}");
    }

    #[test]
    fn markdown_becomes_roff() {
        let of = "* a `b`\n  c\n\n| key | x |\n|---|---|\n| `-k` | `1` | see [p](p.md) |\n.d\n";
        let says = ".IP \\(bu 2\na b\nc\n.TP\n\\-k (default: 1)\nsee p\n.PP\n\\&.d\n";
        assert_eq!(roff(of), says);
    }
}
