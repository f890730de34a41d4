//! Fuzzes the text of a configuration.

use nvmfd::config::{Config, ConfigFiles, Source};

/// Any texts, separated by NUL, are a valid configuration, whose sums are consistent, or have
/// errors, each with a position in its text.
pub fn config(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let mut texts = text.split('\0');
    let mut sources = ConfigFiles::from(texts.next().unwrap_or_default());
    let more = texts.map(|text| Source { file: Some("/more".into()), text: text.to_owned() });
    sources.more.extend(more);
    match Config::of(&sources) {
        Ok(config) => {
            let plan = config.pool_plan();
            assert!(plan.total_bytes() >= plan.receive_bytes());
            assert!(config.reactor.count() > 0);
            assert_eq!(config.needs_restart(&config), Vec::<&str>::new());
            config.warnings().iter().for_each(|warning| assert!(!warning.is_empty()));
            let mut other = config.clone();
            other.keep_fixed(&config);
            assert_eq!(other, config);
        }
        Err(errors) => {
            let told = errors.to_string();
            assert!(!told.trim().is_empty());
            // No control character for a terminal is passed through.
            let acts = |c: char| c.is_control() && c != '\n';
            assert!(!told.contains(acts), "{told:?}");
        }
    }
    true
}
