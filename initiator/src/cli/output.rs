//! Output: JSON for programs, text for users, raw bytes on request.

use clap::Args;

/// Raw bytes instead of JSON or text.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Raw {
    /// Print the bytes as received
    #[arg(short = 'b', long)]
    pub(super) raw_binary: bool,
}

/// Formats bytes like a dump of nvme-cli: 16 per line, with their text.
pub(crate) fn dump(bytes: &[u8]) -> String {
    let mut text = "       0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f\n".to_owned();
    for (row, bytes) in bytes.chunks(16).enumerate() {
        text += &format!("{:04x}:", row * 16);
        bytes.iter().for_each(|byte| text += &format!(" {byte:02x}"));
        text += &"   ".repeat(16 - bytes.len());
        let readable = bytes.iter().map(|&byte| match byte {
            b'!'..=b'~' => char::from(byte),
            _ => '.',
        });
        text += &format!(" \"{}\"\n", readable.collect::<String>());
    }
    text
}

/// Formats lines with aligned columns, the first line as heading; numbers are right-aligned.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |cells: Vec<String>| {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        text += &line(row.clone());
        if index == 0 {
            text += &line(widths.iter().map(|&width| "-".repeat(width)).collect());
        }
    }
    text
}

/// Formats a number of bytes in powers of 1000, like nvme-cli.
pub(crate) fn bytes(count: u128) -> String {
    let mut value = count as f64;
    for unit in ["B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB", "RB"] {
        if value < 1000.0 {
            return match unit {
                "B" => format!("{count} B"),
                unit => format!("{value:.2} {unit}"),
            };
        }
        value /= 1000.0;
    }
    format!("{value:.2} QB")
}

#[cfg(test)]
mod tests {
    use crate::cli::output::*;

    #[test]
    fn a_dump_looks_as_that_of_nvme_cli() {
        let bytes: Vec<u8> = (0x1b..0x2d).collect();
        let expected = "       0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f\n\
            0000: 1b 1c 1d 1e 1f 20 21 22 23 24 25 26 27 28 29 2a \"......!\"#$%&'()*\"\n\
            0010: 2b 2c                                           \"+,\"\n";
        assert_eq!(dump(&bytes), expected);
    }

    #[test]
    fn tables_are_aligned() {
        let cells = |row: [&str; 2]| row.map(str::to_owned).to_vec();
        let rows = [cells(["Node", "SN"]), cells(["a", "longer"])];
        assert_eq!(table(&rows), "Node  SN\n----  ------\na     longer\n");
    }

    #[test]
    fn byte_counts_are_printed_in_powers_of_1000() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1 << 20), "1.05 MB");
        assert_eq!(bytes(u128::MAX), "340282366.92 QB");
    }
}
