//! HTTP over the Unix socket of the daemon.

use std::cell::OnceCell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::handshake;
use hyper::header::{CONTENT_TYPE, ETAG, HOST, HeaderValue, IF_MATCH};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use nvmfd::api::{Problem, UNCHANGED};
use percent_encoding::{NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::output::{Failure, Output};
use crate::ssh::{Forward, Target};

/// Time limit of a response: a change waits for devices and for every reactor.
const PATIENCE: Duration = Duration::from_secs(60);

/// The longest response, in bytes.
const MOST_ANSWER_BYTES: usize = 64 << 20;

/// What drives requests: this thread.
///
/// # Errors
/// The system has refused it.
pub(crate) fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Where the daemon is.
pub(crate) enum Place {
    /// On this machine, at a socket.
    Local(PathBuf),
    /// On another machine. The first request has its socket forwarded.
    Remote(Target, OnceCell<Result<Forward, Failure>>),
}

impl Place {
    pub(crate) fn remote(target: Target) -> Place {
        Place::Remote(target, OnceCell::new())
    }
}

/// Connection to the daemon, and where its responses are printed.
pub(crate) struct Client {
    place: Place,
    pub(crate) output: Output,
}

impl Client {
    pub(crate) fn new(place: Place, output: Output) -> Client {
        Client { place, output }
    }

    /// Whether the files of the daemon are those of another machine.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self.place, Place::Remote(..))
    }

    /// Makes a path absolute: the daemon has another working directory.
    pub(crate) fn absolute(&self, path: &Path) -> Result<String, Failure> {
        if self.is_remote() && path.is_relative() {
            let shown = path.display();
            return Err(Failure::new(format!("{shown} is on the target: write an absolute path")));
        }
        let whole = std::path::absolute(path).ok();
        let text = whole.and_then(|path| path.into_os_string().into_string().ok());
        text.ok_or_else(|| Failure::new(format!("{path:?} cannot be written down")))
    }

    /// The socket of this machine at which the daemon is reached.
    fn socket(&self) -> Result<&Path, Failure> {
        match &self.place {
            Place::Local(socket) => Ok(socket),
            Place::Remote(target, forward) => {
                let forward = forward.get_or_init(|| Forward::open(target));
                forward.as_ref().map(|it| &*it.socket).map_err(Clone::clone)
            }
        }
    }

    async fn connect(&self) -> Result<UnixStream, Failure> {
        UnixStream::connect(self.socket()?).await.map_err(|error| self.unreachable(&error))
    }

    /// Gets `path`, and prints the response.
    pub(crate) async fn show<T: DeserializeOwned>(
        &self,
        path: &str,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        self.output.answer(&self.get(path).await?, text);
        Ok(())
    }

    /// As [`Client::show`], for a list.
    pub(crate) async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
        text: impl FnOnce(&[T]) -> String,
    ) -> Result<(), Failure> {
        self.show(path, |all: &Vec<T>| text(all)).await
    }

    /// Whether a process of root listens. That of a socket of the service manager is not known.
    pub(crate) async fn is_of_root(&self) -> Result<bool, Failure> {
        let stream = self.connect().await?;
        let peer = stream.peer_cred().map_err(|error| self.broken(&Method::GET, &error))?;
        Ok(peer.uid() == 0 && peer.pid() != Some(1))
    }

    /// Gets `path`: the parsed response, and the response as sent.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<(T, Value), Failure> {
        self.ask(Method::GET, path, None).await
    }

    /// As [`Client::get`]; `None` if the daemon has no such object.
    pub(crate) async fn find<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>, Failure> {
        let (status, _, body) = self.exchange(Method::GET, path, None, None).await?;
        match status {
            StatusCode::NOT_FOUND => Ok(None),
            status => read(status, &body).map(|(found, _)| Some(found)),
        }
    }

    /// As [`Client::get`], with the entity tag of the response.
    pub(crate) async fn get_tagged<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<(T, Option<HeaderValue>), Failure> {
        let (status, tag, body) = self.exchange(Method::GET, path, None, None).await?;
        Ok((read(status, &body)?.0, tag))
    }

    /// Sends a change that is refused if the entity tag of what it changes is another one: `None`.
    pub(crate) async fn send_if<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        tag: Option<&HeaderValue>,
    ) -> Result<Option<(T, Value)>, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| Failure::new(error.to_string()))?;
        let (status, _, body) = self.exchange(Method::POST, path, Some(body), tag).await?;
        match status {
            StatusCode::PRECONDITION_FAILED => Ok(None),
            status => read(status, &body).map(Some),
        }
    }

    /// Sends a change and returns its response.
    pub(crate) async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(T, Value), Failure> {
        let body = serde_json::to_vec(body).map_err(|error| Failure::new(error.to_string()))?;
        self.ask(method, path, Some(body)).await
    }

    /// Streams `path`, one JSON value per line, until the daemon closes the connection.
    pub(crate) async fn follow(
        &self,
        path: &str,
        mut each: impl FnMut(&Value),
    ) -> Result<(), Failure> {
        let mut body = self.request(Method::GET, path, None, None).await?;
        if !body.status().is_success() {
            let (status, all) = (body.status(), body.into_body().collect().await);
            let all = all.map_err(|error| self.broken(&Method::GET, &error))?.to_bytes();
            return read::<Value>(status, &all).map(drop);
        }
        let mut rest: Vec<u8> = Vec::new();
        while let Some(frame) = body.body_mut().frame().await {
            let frame = frame.map_err(|error| self.broken(&Method::GET, &error))?;
            rest.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                each(&read::<Value>(StatusCode::OK, &line)?.1);
            }
            if rest.len() > MOST_ANSWER_BYTES {
                return Err(self.broken(&Method::GET, &"a line without end"));
            }
        }
        Err(Failure::new("the daemon has stopped"))
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(T, Value), Failure> {
        let (status, _, body) = self.exchange(method, path, body, None).await?;
        read(status, &body)
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        if_match: Option<&HeaderValue>,
    ) -> Result<(StatusCode, Option<HeaderValue>, Bytes), Failure> {
        // Whoever types a password takes longer.
        self.socket()?;
        let failure = late(&method);
        let answer = async {
            let response = self.request(method.clone(), path, body, if_match).await?;
            let (status, tag) = (response.status(), response.headers().get(ETAG).cloned());
            let body = Limited::new(response.into_body(), MOST_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| self.broken(&method, &error))?.to_bytes();
            Ok((status, tag, body))
        };
        timeout(PATIENCE, answer).await.map_err(|_| failure)?
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        if_match: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, Failure> {
        let stream = self.connect().await?;
        let (mut sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(&method, &error))?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(method.clone()).uri(path).header(HOST, "nvmfd");
        if let Some(tag) = if_match {
            request = request.header(IF_MATCH, tag);
        }
        let request = match body {
            Some(body) => {
                request.header(CONTENT_TYPE, "application/json").body(Full::new(Bytes::from(body)))
            }
            None => request.body(Full::default()),
        };
        let request = request.map_err(|error| Failure::new(format!("not a request: {error}")))?;
        sender.send_request(request).await.map_err(|error| self.broken(&method, &error))
    }

    fn unreachable(&self, error: &std::io::Error) -> Failure {
        let shown = match &self.place {
            Place::Local(socket) => socket.display(),
            Place::Remote(target, _) => {
                return Failure::new(format!("the connection of ssh to {target} has ended"));
            }
        };
        Failure::new(match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => format!(
                "no daemon is at {shown}: start nvmfd (systemctl start nvmfd), or name its socket \
                 with --socket or NVMFD_SOCKET"
            ),
            ErrorKind::PermissionDenied => format!(
                "you may not use {shown}: become root, or a member of its group (`ls -l {shown}` \
                 shows it; `group` in [management] sets it)"
            ),
            _ => format!("{shown} cannot be reached: {error}"),
        })
    }

    /// The failure of a request whose connection has ended before the response.
    fn broken(&self, method: &Method, error: &dyn std::fmt::Display) -> Failure {
        let carried = match *method {
            Method::GET => "",
            _ => ", and may have carried this out",
        };
        Failure::new(match &self.place {
            Place::Local(socket) => {
                let shown = socket.display();
                format!("the daemon at {shown} has broken off{carried}: {error}; see its log")
            }
            // An SSH server does not report why it cannot connect a socket.
            Place::Remote(target @ Target { socket, .. }, _) => format!(
                "the daemon at {target}{socket} does not respond{carried}: {error}; see there \
                 whether nvmfd runs, whether {socket} is its socket, and whether this user may use it"
            ),
        })
    }
}

/// The failure of a request without a response in time.
fn late(method: &Method) -> Failure {
    let seconds = PATIENCE.as_secs();
    Failure::new(match *method {
        Method::GET => format!("the daemon has not answered within {seconds} s: see its log"),
        _ => format!(
            "the daemon has not answered within {seconds} s, and may still carry this out: see \
             `nvmfctl inflight` for a device that hangs, and its log"
        ),
    })
}

/// Escapes a part of a path.
pub(crate) fn escaped(part: &str) -> PercentEncode<'_> {
    utf8_percent_encode(part, NON_ALPHANUMERIC)
}

fn read<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<(T, Value), Failure> {
    let strange = |error: serde_json::Error| {
        Failure::new(format!(
            "the daemon speaks another version ({error}): restart it, if it was upgraded and still \
             serves as before, or use the nvmfctl that came with it"
        ))
    };
    if !status.is_success() {
        return Err(match serde_json::from_slice::<Problem>(body) {
            // The error contains its own remedy.
            Ok(Problem { detail, remedy, .. }) if remedy == UNCHANGED => {
                Failure::new(format!("{detail} ({remedy})"))
            }
            Ok(Problem { detail, remedy, .. }) => Failure::new(format!("{detail}: {remedy}")),
            Err(_) => Failure::new(format!("the daemon answers {status}")),
        });
    }
    let value: Value = serde_json::from_slice(body).map_err(strange)?;
    let typed = T::deserialize(&value).map_err(strange)?;
    Ok((typed, value))
}

#[cfg(test)]
mod tests {
    use crate::client::*;

    /// A device that hangs delays a change; the daemon does not forget it.
    #[test]
    fn a_change_without_a_response_in_time_may_still_take_effect() {
        assert!(late(&Method::POST).sentence().contains("may still carry this out"));
        assert!(!late(&Method::GET).sentence().contains("carry"));
    }

    #[test]
    fn daemon_errors_are_reported_with_detail_and_remedy() {
        let problem = |detail: &str, remedy: &str| {
            let (title, detail, remedy) = (String::new(), detail.to_owned(), remedy.to_owned());
            serde_json::to_vec(&Problem { title, status: 404, detail, remedy }).unwrap()
        };
        let body = problem("there is no disk", "add one");
        let failure = read::<Value>(StatusCode::NOT_FOUND, &body).unwrap_err();
        assert!(format!("{failure:?}").contains("there is no disk: add one"));
        let body = problem("0 is none: write 1", UNCHANGED);
        let failure = read::<Value>(StatusCode::UNPROCESSABLE_ENTITY, &body).unwrap_err();
        assert!(format!("{failure:?}").contains("0 is none: write 1 (nothing was changed)"));
        let failure = read::<Value>(StatusCode::OK, b"{").unwrap_err();
        assert!(format!("{failure:?}").contains("another version"));
    }
}
