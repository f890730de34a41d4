//! Logging to stderr.
//!
//! Lines have the time, and colours on a terminal. The journal adds the time, and receives each
//! line with its fields ([`journald`]) or, if it cannot be reached or before the daemon serves,
//! with the level as its prefix. JSON is one object a line, wherever it goes.

mod journald;

use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use journald::JournaldLayer;
use nix::sys::stat::fstat;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::reload::{Handle, Layer};
use tracing_subscriber::{fmt, registry};

/// Handle to change the level while the process runs.
static FILTER: OnceLock<Handle<LevelFilter, Registry>> = OnceLock::new();

/// The format of the lines.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// The daemon serves, or has served.
static SERVING: AtomicBool = AtomicBool::new(false);

/// Sends lines with fields to the journal from now on.
pub(super) fn serving() {
    SERVING.store(true, Ordering::Relaxed);
}

/// Format of the lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum LogFormat {
    /// Text with fields.
    Text,
    /// JSON.
    Json,
}

/// Starts logging, once per process. Without a format: lines of a command that ends at once, which
/// have no time.
pub fn start(level: LevelFilter, format: Option<LogFormat>) {
    let (filter, handle) = Layer::new(level);
    let lines = fmt::layer().with_writer(stderr).with_target(false);
    let base = registry().with(filter);
    let started = if format == Some(LogFormat::Json) {
        let objects = lines.json().flatten_event(true);
        tracing::subscriber::set_global_default(base.with(objects))
    } else if let Some(journal) = journal() {
        tracing::subscriber::set_global_default(base.with(journal))
    } else if is_journal() {
        tracing::subscriber::set_global_default(base.with(lines.event_format(ForJournal)))
    } else {
        let lines = lines.with_ansi(stderr().is_terminal());
        match format {
            Some(_) => tracing::subscriber::set_global_default(base.with(lines)),
            None => tracing::subscriber::set_global_default(base.with(lines.without_time())),
        }
    };
    debug_assert!(started.is_ok(), "logging is started once");
    let _ = FILTER.set(handle);
    let _ = FORMAT.set(format.unwrap_or(LogFormat::Text));
}

/// The arguments for another process of this program that logs like this one.
pub(super) fn arguments() -> Vec<String> {
    let format = match FORMAT.get() {
        Some(LogFormat::Json) => "json",
        Some(LogFormat::Text) | None => "text",
    };
    let level = level().unwrap_or(LevelFilter::INFO);
    vec![format!("--log={level}"), format!("--log-format={format}")]
}

/// The log level; `None` if logging was not started.
pub(super) fn level() -> Option<LevelFilter> {
    FILTER.get().and_then(Handle::clone_current)
}

/// Sets the log level; false if logging was not started.
pub(super) fn set_level(level: LevelFilter) -> bool {
    FILTER.get().is_some_and(|filter| filter.reload(level).is_ok())
}

/// Connects to the journal, if stderr is connected to it and it listens: `$NVMFD_JOURNAL_SOCKET` is
/// its socket, if it is not the default one.
fn journal() -> Option<JournaldLayer> {
    let path = std::env::var_os("NVMFD_JOURNAL_SOCKET");
    let path = path.map_or_else(|| PathBuf::from(journald::SOCKET), PathBuf::from);
    is_journal().then(|| JournaldLayer::at(&path, &SERVING)).flatten()
}

/// Whether stderr is the very stream that the service manager connected to the journal.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = fstat(stderr()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Formats `<priority>text`, as in sd-daemon(3).
struct ForJournal;

impl<S, N> FormatEvent<S, N> for ForJournal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            write!(writer, "{}", span.name())?;
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>()
                && !fields.is_empty()
            {
                write!(writer, "{{{fields}}}")?;
            }
            write!(writer, ": ")?;
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// The syslog priority of a level.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}
