//! The text format of a persisted record:
//!
//! ```text
//! nvmfd power 1           kind and version
//! cycles 7                lines of that kind
//! crc32 5f3a9c01          checksum of everything before
//! ```

/// A type that can be persisted as a record.
pub trait Record: Sized {
    /// Its kind in the first line.
    const KIND: &'static str;
    /// Its version. Earlier versions are read too.
    const VERSION: u32 = 1;
    /// When a damaged record may be removed, as the end of a sentence.
    const REMEDY: &'static str;

    /// Its lines, each with its newline.
    fn emit(&self) -> String;

    /// Parses these lines. The caller rejects what [`Record::emit`] would not write.
    fn parse(body: &str) -> Option<Self>;
}

/// The text of a record.
pub fn seal<R: Record>(record: &R) -> String {
    let mut text = format!("nvmfd {} {}\n{}", R::KIND, R::VERSION, record.emit());
    let crc32 = crc32fast::hash(text.as_bytes());
    text += &format!("crc32 {crc32:08x}\n");
    text
}

/// Parses the text of a record that [`seal`] has written.
///
/// # Errors
/// Description of the damage.
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
/// Description of the damage.
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
