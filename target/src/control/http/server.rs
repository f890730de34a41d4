//! Sockets and connections of the management interface.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use listenfd::ListenFd;
use nix::unistd::{Group, chown};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::browser::{not_by_domain, only_by_address};
use super::changes::Caller;
use super::{ApiError, MOST_BODY_BYTES, router};
use crate::api::ChangeAccess;
use crate::config::ManagementConfig;
use crate::control::change::Requester;
use crate::control::handle::ControlHandle;

/// Connections at once, of each of the two kinds.
const MOST_CONNECTIONS: usize = 32;

/// Time limit for the arrival of the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Time limit of a connection to the loopback address, which is open to any user.
const LOOPBACK_TIME: Duration = Duration::from_secs(300);

/// Interval between attempts to listen at an address that is in use.
const RETRY: Duration = Duration::from_secs(1);

/// Bytes that a connection may buffer.
const BUFFER_BYTES: usize = 64 << 10;

/// The open interface; closed when dropped.
pub(crate) struct Server {
    tasks: Vec<AbortHandle>,
    socket: Option<PathBuf>,
}

impl Server {
    /// Opens the configured sockets. The default socket may fail with a warning.
    ///
    /// # Errors
    /// One sentence: a configured socket or address is not available.
    pub(crate) fn open(
        config: &ManagementConfig,
        managed: &ControlHandle,
    ) -> Result<Server, String> {
        let mut server = Server { tasks: Vec::new(), socket: None };
        if !config.enabled {
            // The service manager's socket accepts connections anyway: clients would wait.
            if let Ok(Some(listener)) = given() {
                let router = Router::new().fallback(ApiError::not_enabled);
                server.accept(move || accept_unix(listener, router));
            }
            return Ok(server);
        }
        let path = config.path(std::env::var_os("RUNTIME_DIRECTORY").as_deref());
        let unix = match given()? {
            Some(listener) => Ok(listener),
            None => bind(&path, config).inspect(|_| {
                info!("management interface at {}", path.display());
                server.socket = Some(path);
            }),
        };
        match unix {
            Ok(listener) => {
                let router = router(managed.clone(), ChangeAccess::Yes, config.console);
                let router = router.layer(from_fn(not_by_domain));
                server.accept(move || accept_unix(listener, router));
            }
            Err(sentence) if config.socket.is_some() => return Err(sentence),
            Err(sentence) => warn!(
                "no management interface: {sentence}; name another path as `socket` in \
                 [management]"
            ),
        }
        if let Some(at) = config.http {
            let listener = bind_loopback(at)?;
            let access = match config.http_token_file {
                None => ChangeAccess::No,
                Some(_) => ChangeAccess::WithToken,
            };
            let router = router(managed.clone(), access, config.console);
            let router = router.layer(from_fn(only_by_address));
            server.accept(move || accept_loopback(at, access, listener, router));
        }
        Ok(server)
    }

    fn accept<F: Future<Output = ()> + Send + 'static>(&mut self, task: impl FnOnce() -> F) {
        self.tasks.push(tokio::spawn(task()).abort_handle());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        if let Some(path) = &self.socket
            && let Err(error) = fs::remove_file(path)
        {
            debug!("cannot remove {}: {error}", path.display());
        }
    }
}

/// The connections of a socket.
#[derive(Default)]
struct Connections(VecDeque<JoinHandle<()>>);

impl Connections {
    /// Serves one more. Beyond the maximum the oldest is closed: clients that stand still, and any
    /// user at the loopback address, would keep all others out. A change that it has begun continues.
    fn add(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        self.0.retain(|task| !task.is_finished());
        if self.0.len() == MOST_CONNECTIONS
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        self.0.push_back(tokio::spawn(connection));
    }
}

async fn accept_unix(listener: UnixListener, router: Router) {
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let peer = stream.peer_cred().map(|peer| Requester::User(peer.uid()));
                let caller = Caller(peer.unwrap_or_default());
                connections.add(serve(stream, router.clone().layer(Extension(caller))));
            }
            Err(error) => not_accepted(&error).await,
        }
    }
}

async fn accept_loopback(
    at: SocketAddr,
    access: ChangeAccess,
    listener: Option<TcpListener>,
    router: Router,
) {
    let listener = match listener {
        Some(listener) => listener,
        None => once_free(at).await,
    };
    let rights = match access {
        ChangeAccess::No => "read-only",
        ChangeAccess::WithToken | ChangeAccess::Yes => "changes need the token",
    };
    info!("management interface at http://{at}: {rights}");
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = timeout(LOOPBACK_TIME, serve(stream, router.clone()));
                connections.add(async move {
                    let _ = served.await;
                });
            }
            Err(error) => not_accepted(&error).await,
        }
    }
}

/// Waits: descriptors are usually exhausted, and others may be closed soon.
async fn not_accepted(error: &io::Error) {
    debug!("cannot accept a management connection: {error}");
    sleep(Duration::from_millis(100)).await;
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, router: Router) {
    let router = router.layer(DefaultBodyLimit::max(MOST_BODY_BYTES));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = served {
        debug!("management connection failed: {error}");
    }
}

/// Returns the socket that the service manager passes, if any (`nvmfd.socket`). It remains when
/// this process ends, and has the permissions of the unit.
fn given() -> Result<Option<UnixListener>, String> {
    let taken = ListenFd::from_env().take_unix_listener(0);
    let refuse = |error: io::Error| format!("the socket of the service manager is no use: {error}");
    let Some(listener) = taken.map_err(refuse)? else { return Ok(None) };
    listener.set_nonblocking(true).map_err(refuse)?;
    let at = listener.local_addr().ok();
    let path = at.as_ref().and_then(|at| at.as_pathname()).unwrap_or(Path::new("unnamed"));
    info!("management interface at {}, from the service manager", path.display());
    UnixListener::from_std(listener).map(Some).map_err(refuse)
}

/// `None` while the address is in use: any user of this machine may take it, which must keep nobody
/// from being served.
fn bind_loopback(at: SocketAddr) -> Result<Option<TcpListener>, String> {
    let refuse = |error| format!("management.http {at} cannot be had: {error}");
    let listener = match std::net::TcpListener::bind(at) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => return Ok(None),
        bound => bound.map_err(refuse)?,
    };
    listener.set_nonblocking(true).map_err(refuse)?;
    TcpListener::from_std(listener).map(Some).map_err(refuse)
}

/// Waits until an address is free.
async fn once_free(at: SocketAddr) -> TcpListener {
    warn!(
        "management.http {at} is in use, and is not served before it is free (ss -ltnp shows by \
         whom); `nvmfctl` is not affected"
    );
    loop {
        sleep(RETRY).await;
        if let Ok(Some(listener)) = bind_loopback(at) {
            return listener;
        }
    }
}

/// Creates the socket with its permissions: under a temporary name, so that no other user can
/// connect before they are set.
fn bind(path: &Path, config: &ManagementConfig) -> Result<UnixListener, String> {
    let shown = path.display();
    let refuse = |what: &str, error: &dyn std::fmt::Display| {
        format!("management.socket {shown} {what}: {error}")
    };
    clear(path)?;
    if config.socket.is_none()
        && let Some(directory) = path.parent()
    {
        let _ = fs::create_dir(directory);
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let _ = fs::remove_file(&beside);
    let listener = UnixListener::bind(&beside).map_err(|error| refuse("cannot be made", &error))?;
    let set = || {
        let mut mode = config.mode;
        if let Some(name) = &config.group {
            let group = Group::from_name(name).ok().flatten();
            let group = group.ok_or_else(|| refuse("has no group", &format!("{name:?}")))?;
            // No other user has access then; root and the daemon's user still have, and may
            // correct it.
            if let Err(error) = chown(&beside, None, Some(group.gid)) {
                warn!(
                    "{}; no group may connect: the daemon must be a member of that group \
                     (SupplementaryGroups= in a drop-in of the unit)",
                    refuse(&format!("cannot belong to {name:?}"), &error)
                );
                mode &= !0o070;
            }
        }
        fs::set_permissions(&beside, fs::Permissions::from_mode(mode))
            .and_then(|()| fs::rename(&beside, path))
            .map_err(|error| refuse("cannot be set up", &error))
    };
    if let Err(sentence) = set() {
        let _ = fs::remove_file(&beside);
        return Err(sentence);
    }
    Ok(listener)
}

/// Checks that a name may be used: it is free, or the socket of a daemon that has ended.
fn clear(path: &Path) -> Result<(), String> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(format!("{shown} is there and is no socket: remove it, or name another"))
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            Err(format!("another daemon has {shown}: give each a `socket` of its own"))
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{shown} cannot be looked at: {error}")),
    }
}
