//! The socket of a daemon on another machine, forwarded by the user's own `ssh`.

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;

use nix::unistd::mkdtemp;
use nvmfd::config::DEFAULT_SOCKET;

use crate::output::Failure;

/// Becomes `ssh`. When the input ends, and however this process has ended so has its input, a process
/// beside it removes the directory `$0` and ends `ssh`. An interrupt from the terminal does not end that
/// process first.
const SCRIPT: &str = r#"exec 3<&0 </dev/null
(trap '' HUP INT QUIT TERM; read -r _; rm -rf "$0"; kill $$) <&3 >/dev/null 2>&1 &
exec ssh "$@" 3<&-"#;

/// Tells by a line of output that the socket is forwarded: `ssh` runs the command then. A connection
/// shared with other commands would keep the socket forwarded after the end of this one.
const OPTIONS: [&str; 7] =
    ["-N", "-S", "none", "-o", "PermitLocalCommand=yes", "-o", "LocalCommand=echo"];

/// A daemon on another machine: `ssh://[USER@]HOST[:PORT][/SOCKET]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// `ssh://[USER@]HOST[:PORT]`, which `ssh` parses.
    destination: String,
    pub(crate) socket: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(url: &str) -> Result<Target, String> {
        let form = || "write ssh://[USER@]HOST[:PORT][/PATH/OF/SOCKET]".to_owned();
        let rest = url.strip_prefix("ssh://").ok_or_else(form)?;
        let (place, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let host = place.rsplit_once('@').map_or(place, |(_, host)| host);
        if host.is_empty() || [place, host].iter().any(|it| it.starts_with(['-', '@'])) {
            return Err(form());
        }
        // Commands in the configuration of ssh may hand the host to a shell.
        plain(place, "@:[]%")?;
        plain(path, "/")?;
        let socket = if path.len() > 1 { path } else { DEFAULT_SOCKET };
        Ok(Target { destination: format!("ssh://{place}"), socket: socket.to_owned() })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.destination)
    }
}

/// Accepts what neither `ssh` nor a shell expands.
fn plain(text: &str, also: &str) -> Result<(), String> {
    let is_plain =
        |c: &char| c.is_ascii_alphanumeric() || "-._~+,=".contains(*c) || also.contains(*c);
    match text.chars().find(|c| !is_plain(c)) {
        Some(c) => Err(format!("{c:?} is not possible in {text:?}, because ssh may expand it")),
        None => Ok(()),
    }
}

/// A forwarded socket. `ssh` ends with it.
pub(crate) struct Forward {
    ssh: Child,
    pub(crate) socket: PathBuf,
}

impl Forward {
    /// Runs `ssh`, which may ask for a password on the terminal, until the socket is forwarded.
    pub(crate) fn open(target: &Target) -> Result<Forward, Failure> {
        Forward::start(target)
            .map_err(|why| Failure::new(format!("ssh does not reach {target}: {why}")))
    }

    fn start(target: &Target) -> Result<Forward, String> {
        let parent = std::env::temp_dir();
        plain(&parent.to_string_lossy(), "/").map_err(|why| format!("TMPDIR: {why}"))?;
        // Nobody else may open what this makes.
        let directory = mkdtemp(&parent.join("nvmfctl.XXXXXX"));
        let directory = directory.map_err(|error| format!("{}: {error}", parent.display()))?;
        let socket = directory.join("socket");
        let ssh = Command::new("sh")
            .args(["-c", SCRIPT])
            .arg(&directory)
            .args(OPTIONS)
            .args(["-L", &format!("{}:{}", socket.display(), target.socket)])
            .args(["--", &target.destination])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut ssh = ssh.map_err(|error| {
            let _ = fs::remove_dir(&directory);
            format!("sh: {error}")
        })?;
        if ssh.stdout.as_mut().is_some_and(|output| output.read_exact(&mut [0]).is_ok()) {
            return Ok(Forward { ssh, socket });
        }
        let status = ssh.wait().map_err(|error| error.to_string())?;
        Err(format!("its own message is on stderr ({status})"))
    }
}

impl Drop for Forward {
    /// Waits until `ssh` has ended, so that nothing of it remains when the command ends.
    fn drop(&mut self) {
        let _ = self.ssh.wait();
    }
}

#[cfg(test)]
mod tests {
    use crate::ssh::*;

    #[test]
    fn a_url_names_what_ssh_connects_and_the_socket_there() {
        let parse = |url: &str| url.parse::<Target>().map(|it| (it.destination, it.socket));
        for (url, destination, socket) in [
            ("ssh://target", "ssh://target", DEFAULT_SOCKET),
            ("ssh://target/", "ssh://target", DEFAULT_SOCKET),
            ("ssh://a@b@target:22/run/x.sock", "ssh://a@b@target:22", "/run/x.sock"),
            ("ssh://root@[2001:db8::1]:2222", "ssh://root@[2001:db8::1]:2222", DEFAULT_SOCKET),
        ] {
            assert_eq!(parse(url), Ok((destination.to_owned(), socket.to_owned())));
        }
    }

    #[test]
    fn a_url_has_no_option_of_ssh_and_nothing_that_is_expanded() {
        for wrong in [
            "target",
            "unix:///run/x",
            "ssh://",
            "ssh:///run/x",
            "ssh://@target",
            "ssh://root@",
            "ssh://-oProxyCommand=x",
            "ssh://root@-oProxyCommand=x",
            "ssh://$(x)",
            "ssh://a b",
            "ssh://a;b",
            "ssh://a/run/x:y",
            "ssh://a/run/%h",
            "ssh://a/run/${HOME}",
            "ssh://a/b\\c",
        ] {
            assert!(wrong.parse::<Target>().is_err(), "{wrong}");
        }
    }
}
