//! The text of a persisted record:
//!
//! ```text
//! nvmfd power 1           kind and version
//! cycles 7                lines of that kind
//! crc32 5f3a9c01          of all before
//! ```

/// What can be persisted as a record.
pub trait Record: Sized {
    /// What its first line calls it.
    const KIND: &'static str;
    /// Its version. Earlier ones are read as well.
    const VERSION: u32 = 1;
    /// When a damaged one may be removed, as the end of a sentence.
    const REMEDY: &'static str;

    /// Its lines, each with its end.
    fn emit(&self) -> String;

    /// The record of these lines. What [`Record::emit`] would not give is refused by the caller.
    fn parse(body: &str) -> Option<Self>;
}

/// The text of a record.
pub fn seal<R: Record>(record: &R) -> String {
    let mut text = format!("nvmfd {} {}\n{}", R::KIND, R::VERSION, record.emit());
    let crc32 = crc32fast::hash(text.as_bytes());
    text += &format!("crc32 {crc32:08x}\n");
    text
}

/// The record of a text that [`seal`] gave.
///
/// # Errors
/// What is wrong with it.
pub fn unseal<R: Record>(text: &[u8]) -> Result<R, &'static str> {
    let body = body(text, R::KIND, R::VERSION)?;
    let record = R::parse(body).ok_or("a line of it is not known")?;
    match record.emit() == body {
        true => Ok(record),
        false => Err("it contradicts itself"),
    }
}

/// The lines of a record of this kind, up to this version.
///
/// # Errors
/// What is wrong with it.
pub fn body<'t>(text: &'t [u8], kind: &str, version: u32) -> Result<&'t str, &'static str> {
    let text = str::from_utf8(text).map_err(|_| "it is not text")?;
    let at = text.rfind("crc32 ").ok_or("its last line is missing")?;
    let (sealed, last) = text.split_at(at);
    if last != format!("crc32 {:08x}\n", crc32fast::hash(sealed.as_bytes())) {
        return Err("its checksum is wrong");
    }
    let (first, body) = sealed.split_once('\n').ok_or("its first line is missing")?;
    match (1..=version).any(|version| first == format!("nvmfd {kind} {version}")) {
        true => Ok(body),
        false => Err("it is of another kind or version"),
    }
}
