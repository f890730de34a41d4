//! Reading the vectors: hexadecimal text, `#` for comments.

/// The bytes of a vector file, with zeros appended up to `N`.
pub(crate) fn bytes<const N: usize>(text: &str) -> [u8; N] {
    let digits: String = rows(text).collect();
    let given = hex(&digits);
    assert!(given.len() <= N, "{} bytes do not fit in {N}", given.len());
    std::array::from_fn(|i| given.get(i).copied().unwrap_or(0))
}

/// The lines that are not comments.
pub(crate) fn rows(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with('#'))
}

/// The bytes of `digits`.
pub(crate) fn hex(digits: &str) -> Vec<u8> {
    assert!(digits.len().is_multiple_of(2), "half a byte in {digits}");
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal"))
        .collect()
}
