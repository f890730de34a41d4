//! Log lines with fields for the journal, for `journalctl NVMFD_HOST=..` and `-o json`.
//!
//! A line is one datagram of `KEY=value` lines, or, where the value has several lines, of a key, its
//! length as 64 bits, lowest byte first, and the value.
//!
//! The journal determines the unit of a datagram by its sending process, and fails if that has ended
//! meanwhile and was not known before. So lines before the daemon serves, such as the reason why it
//! cannot, are plain lines, which always belong to the unit.
//!
//! Source: systemd, "Native Journal Protocol"; systemd.journal-fields(7).

use std::fmt::{Debug, Write as _};
use std::io::{ErrorKind, Write as _, stderr};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::priority;

/// Socket of the journal.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// The connection to the journal.
pub(super) struct JournaldLayer {
    socket: UnixDatagram,
    /// Set when lines with fields may be sent.
    serving: &'static AtomicBool,
    /// Lines that were lost since the last report.
    lost: AtomicU64,
}

impl JournaldLayer {
    /// Connects to the journal at a path, if one listens. Lines with fields are sent once `serving`
    /// is set.
    pub(super) fn at(path: &Path, serving: &'static AtomicBool) -> Option<JournaldLayer> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.connect(path).ok()?;
        // A journal that does not keep up must not stop a reactor.
        socket.set_nonblocking(true).ok()?;
        Some(JournaldLayer { socket, serving, lost: AtomicU64::new(0) })
    }

    /// Sends a line, if the socket has space. An error means that the line can never be sent.
    fn send(&self, line: &[u8]) -> std::io::Result<()> {
        match self.socket.send(line) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(error),
            Ok(_) => {
                self.report_lost();
                Ok(())
            }
        }
    }

    fn report_lost(&self) {
        let lost = match self.lost.load(Ordering::Relaxed) {
            0 => return,
            _ => self.lost.swap(0, Ordering::Relaxed),
        };
        let mut line = Vec::new();
        put(&mut line, "MESSAGE", &format!("{lost} lines were lost: the journal did not keep up"));
        put(&mut line, "PRIORITY", &priority(Level::WARN).to_string());
        put(&mut line, "SYSLOG_IDENTIFIER", "nvmfd");
        if self.socket.send(&line).is_err() {
            self.lost.fetch_add(lost, Ordering::Relaxed);
        }
    }
}

impl<S: Subscriber> Layer<S> for JournaldLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let priority = priority(*metadata.level());
        // The text is complete without the fields.
        let text = format!("{}{}", fields.message, fields.shown);
        let mut line = Vec::new();
        put(&mut line, "MESSAGE", &text);
        put(&mut line, "PRIORITY", &priority.to_string());
        put(&mut line, "SYSLOG_IDENTIFIER", "nvmfd");
        put(&mut line, "CODE_FILE", metadata.file().unwrap_or_default());
        put(&mut line, "CODE_LINE", &metadata.line().unwrap_or_default().to_string());
        line.extend(fields.lines);
        // A line that the journal rejects is written to stderr, like lines without fields. A line that it
        // cannot accept now is lost: stderr leads to the same journal, and writing to it would block.
        if !self.serving.load(Ordering::Relaxed) || self.send(&line).is_err() {
            let _ = writeln!(stderr(), "<{priority}>{text}");
        }
    }
}

/// The fields of one event.
#[derive(Default)]
struct Fields {
    message: String,
    /// Other fields, as text.
    shown: String,
    /// Other fields, for the datagram.
    lines: Vec<u8>,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record(field, &format!("{value:?}"));
    }
}

impl Fields {
    fn record(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
            return;
        }
        let _ = write!(self.shown, " {}={value}", field.name());
        let known = |byte: u8| match byte.to_ascii_uppercase() {
            byte @ (b'A'..=b'Z' | b'0'..=b'9') => char::from(byte),
            _ => '_',
        };
        let name: String = field.name().bytes().map(known).collect();
        put(&mut self.lines, &format!("NVMFD_{name}"), value);
    }
}

fn put(line: &mut Vec<u8>, key: &str, value: &str) {
    line.extend(key.as_bytes());
    if value.contains('\n') {
        line.push(b'\n');
        line.extend((value.len() as u64).to_le_bytes());
    } else {
        line.push(b'=');
    }
    line.extend(value.as_bytes());
    line.push(b'\n');
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::control::logging::journald::*;
    use tracing_subscriber::layer::SubscriberExt;

    /// Parses a datagram as the journal does.
    fn read(mut datagram: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while let Some(end) = datagram.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&datagram[..end], &datagram[end + 1..]);
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            let (key, value) = match line.iter().position(|byte| *byte == b'=') {
                Some(at) => {
                    datagram = rest;
                    (&line[..at], &line[at + 1..])
                }
                None => {
                    let (length, rest) = rest.split_first_chunk::<8>().unwrap();
                    let length = u64::from_le_bytes(*length) as usize;
                    assert_eq!(rest[length], b'\n');
                    datagram = &rest[length + 1..];
                    (line, &rest[..length])
                }
            };
            assert!(fields.insert(text(key), text(value)).is_none());
        }
        assert!(datagram.is_empty());
        fields
    }

    #[test]
    fn the_journal_gets_every_field_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        static SERVING: AtomicBool = AtomicBool::new(false);
        assert!(JournaldLayer::at(&path, &SERVING).is_none(), "nobody listens");
        let listener = UnixDatagram::bind(&path).unwrap();
        let subscriber = tracing_subscriber::registry().with(JournaldLayer::at(&path, &SERVING));
        let host = "nqn.2026-11.org.example:h";
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!("this goes to stderr");
            SERVING.store(true, Ordering::Relaxed);
            tracing::warn!(cause = "no-key", host = %host, r#type = ?Some(1), "it was refused");
            tracing::info!("two\nPRIORITY=0");
        });
        let mut datagram = [0; 4096];
        let mut next = || {
            let length = listener.recv(&mut datagram).unwrap();
            read(&datagram[..length])
        };
        let first = next();
        assert_eq!(
            first["MESSAGE"],
            format!("it was refused cause=no-key host={host} type=Some(1)")
        );
        assert_eq!((first["PRIORITY"].as_str(), first["NVMFD_CAUSE"].as_str()), ("4", "no-key"));
        assert_eq!((first["NVMFD_HOST"].as_str(), first["NVMFD_TYPE"].as_str()), (host, "Some(1)"));
        assert!(
            first["CODE_FILE"].ends_with("journald.rs") && first["SYSLOG_IDENTIFIER"] == "nvmfd"
        );
        let second = next();
        assert_eq!(second["MESSAGE"], "two\nPRIORITY=0", "a text cannot add fields");
        assert_eq!(second["PRIORITY"], "6");
    }

    #[test]
    fn a_stalled_journal_blocks_no_logging_and_lost_lines_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        static SERVING: AtomicBool = AtomicBool::new(true);
        let listener = UnixDatagram::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let subscriber = tracing_subscriber::registry().with(JournaldLayer::at(&path, &SERVING));
        let read_all = || {
            let mut datagram = [0; 4096];
            let lines = std::iter::from_fn(|| {
                let length = listener.recv(&mut datagram).ok()?;
                Some(read(&datagram[..length])["MESSAGE"].clone())
            });
            lines.collect::<Vec<String>>()
        };
        const SENT: usize = 20_000;
        tracing::subscriber::with_default(subscriber, || {
            (0..SENT).for_each(|n| tracing::info!("line {n}"));
            let kept = read_all();
            assert!(kept.len() < SENT, "there was room for all: nothing is tested");
            tracing::info!("once more");
            let lost = SENT - kept.len();
            let told = format!("{lost} lines were lost: the journal did not keep up");
            assert_eq!(read_all(), ["once more".to_owned(), told]);
            tracing::info!("well again");
            assert_eq!(read_all(), ["well again"]);
        });
    }
}
