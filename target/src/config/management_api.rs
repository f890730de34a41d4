//! `[management]`: the interface to query and change the running daemon.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;

use super::key_tree;
use super::table_reader::{At, TableReader};

/// Configuration of programs that are given none.
pub const DEFAULT_CONFIG: &str = "/etc/nvmfd/nvmfd.toml";

/// Default path of the socket.
pub const DEFAULT_SOCKET: &str = "/run/nvmfd/nvmfd.sock";

/// Longest path of a socket (`sun_path`, with its NUL), less the suffix while it is created.
const MAX_PATH_BYTES: usize = 107 - ".new".len();

/// The management interface.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ManagementConfig {
    /// The interface is enabled.
    pub enabled: bool,
    /// Absolute path of its Unix socket; `None`: see [`ManagementConfig::path`].
    pub socket: Option<PathBuf>,
    /// Permissions of the socket: every user that may connect may change everything.
    #[serde(serialize_with = "key_tree::mode")]
    pub mode: u32,
    /// The group of the socket; `None`: that of the daemon.
    pub group: Option<String>,
    /// An address of the loopback interface with read-only access for all users of this machine.
    pub http: Option<SocketAddr>,
    /// A file with the token of requests that may change the target at that address; `None`: none may.
    pub http_token_file: Option<PathBuf>,
    /// The console, a page for browsers, is served.
    pub console: bool,
}

impl Default for ManagementConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            socket: None,
            mode: 0o660,
            group: None,
            http: None,
            http_token_file: None,
            console: true,
        }
    }
}

impl ManagementConfig {
    /// Path of the socket: as configured, else in the runtime directory of the service manager
    /// (`$RUNTIME_DIRECTORY`; it may name several, with colons between them), else
    /// [`DEFAULT_SOCKET`].
    pub fn path(&self, runtime_directory: Option<&OsStr>) -> PathBuf {
        if let Some(path) = &self.socket {
            return path.clone();
        }
        let given = runtime_directory.and_then(OsStr::to_str).and_then(|all| all.split(':').next());
        let directory = given.map(PathBuf::from).filter(|path| path.is_absolute());
        directory
            .map_or_else(|| PathBuf::from(DEFAULT_SOCKET), |directory| directory.join("nvmfd.sock"))
    }
}

pub(super) fn management(root: &mut TableReader<'_>) -> ManagementConfig {
    let mut section = root.table("management", "[management]");
    let mut config = ManagementConfig::default();
    config.enabled = section.flag("enabled", config.enabled);
    let form = format!("an absolute path of at most {MAX_PATH_BYTES} bytes");
    if let Some(At { value, span }) = section.take::<PathBuf>("socket", &form) {
        let bytes = value.as_os_str().as_encoded_bytes();
        let fits = bytes.len() <= MAX_PATH_BYTES && !bytes.contains(&0);
        if !fits || !value.is_absolute() || value.file_name().is_none() {
            section.add(&span, format!("`socket` is {value:?}"), format!("write {form}"));
        }
        config.socket = Some(value);
    }
    let form = "permissions in quotes, such as \"0660\"";
    if let Some(At { value, span }) = section.take::<String>("mode", form) {
        let digits = value.bytes().all(|byte| byte.is_ascii_digit());
        match u32::from_str_radix(&value, 8) {
            Ok(mode) if digits && mode <= 0o777 => config.mode = mode,
            _ => section.add(&span, format!("`mode` is {value:?}"), format!("write {form}")),
        }
    }
    config.group = section.take("group", "the name of a group").map(|at| at.value);
    let form = "an address of this machine for itself, such as \"127.0.0.1:4480\"";
    if let Some(At { value, span }) = section.take::<SocketAddr>("http", form) {
        if !value.ip().to_canonical().is_loopback() || value.port() == 0 {
            let what = format!("`http` is {value}, and this interface is for this machine only");
            section.add(&span, what, format!("write {form}"));
        }
        config.http = Some(value);
    }
    if let Some(At { value, span }) = section.take::<PathBuf>("http_token_file", "a path") {
        if config.http.is_none() {
            let what = "`http_token_file` is for requests at `http`, and there is none";
            section.add(&span, what, "write `http` too, or remove this line");
        }
        config.http_token_file = Some(value);
    }
    config.console = section.flag("console", config.console);
    section.end();
    config
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::management_api::*;

    fn config(management: &str) -> Result<Config, String> {
        let text = format!(
            "[[listener]]\naddress = \"::1\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:x\"\n\
             allow_any_host = true\n[management]\n{management}\n"
        );
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    #[test]
    fn socket_path_is_configured_or_given_by_the_service_manager() {
        let config = config(
            "socket = \"/run/a.sock\"\nmode = \"0600\"\ngroup = \"disk\"\nhttp = \"127.0.0.1:80\"\n\
             http_token_file = \"/run/token\"\nconsole = false",
        );
        let config = config.unwrap().management;
        assert_eq!(config.path(Some(OsStr::new("/run/b"))), PathBuf::from("/run/a.sock"));
        let plain = ManagementConfig::default();
        assert_eq!(plain.path(None), PathBuf::from(DEFAULT_SOCKET));
        let of = |given: &str| plain.path(Some(OsStr::new(given)));
        assert_eq!(of("/run/b:/run/c"), PathBuf::from("/run/b/nvmfd.sock"));
        assert_eq!(of("relative"), PathBuf::from(DEFAULT_SOCKET));
    }

    #[test]
    fn invalid_management_settings_are_reported() {
        let long = format!("socket = \"/{}\"", "a".repeat(103));
        for (text, says) in [
            ("socket = \"a.sock\"", "write an absolute path"),
            (&long, "at most 103 bytes"),
            ("mode = \"0999\"", "permissions in quotes"),
            ("mode = \"+1\"", "permissions in quotes"),
            ("mode = \"1777\"", "permissions in quotes"),
            ("http = \"0.0.0.0:80\"", "for this machine only"),
            ("http = \"192.0.2.1:80\"", "for this machine only"),
            ("http = \"127.0.0.1:0\"", "for this machine only"),
            ("http_token_file = \"/run/token\"", "write `http` too"),
            ("console = 1", "true or false"),
            ("port = 7", "unknown key `port`"),
        ] {
            let said = config(text).unwrap_err();
            assert!(said.contains(says), "{text}: {said}");
        }
        assert!(!config("enabled = false").unwrap().management.enabled);
    }
}
