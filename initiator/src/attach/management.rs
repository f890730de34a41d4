//! The management interface of a daemon on this machine: HTTP with JSON at a Unix socket.
//!
//! Source: RFC 9112. Requests have version 1.0, so a response ends with the connection and is not
//! chunked.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use serde_json::Value;

use crate::Error;

/// Time limit of a response: a change waits for devices and for every reactor.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The longest response.
const RESPONSE_BYTES_MAX: u64 = 16 << 20;
/// The most headers of a response.
const HEADERS_MAX: usize = 32;

/// Sends requests to a daemon.
#[derive(Debug)]
pub(super) struct Management {
    /// Its socket.
    pub(super) socket: PathBuf,
}

impl Management {
    /// Returns the response to a GET.
    ///
    /// # Errors
    /// The daemon cannot be reached, or its refusal with the remedy.
    pub(super) fn get(&self, path: &str) -> Result<Value, Error> {
        self.request("GET", path, "")
    }

    /// Returns the response to a POST.
    ///
    /// # Errors
    /// As [`Management::get`].
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, Error> {
        self.request("POST", path, &body.to_string())
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Result<Value, Error> {
        let response = self.exchange(method, path, body).map_err(|error| self.unreachable(&error));
        parse(&response?).map_err(Error::Local)
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> std::io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: nvmfd\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )?;
        let mut response = Vec::new();
        stream.take(RESPONSE_BYTES_MAX).read_to_end(&mut response)?;
        Ok(response)
    }

    fn unreachable(&self, error: &std::io::Error) -> Error {
        let shown = self.socket.display();
        Error::Local(match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => format!(
                "no daemon is at {shown}: name its management socket with --management or \
                 NVMFD_SOCKET"
            ),
            ErrorKind::PermissionDenied => format!(
                "{shown} is not for this user: become root, or a member of its group (`group` in \
                 [management] sets it)"
            ),
            _ => format!("the daemon at {shown} does not answer: {error}"),
        })
    }
}

/// Escapes a part of a path.
pub(super) fn escaped(part: &str) -> PercentEncode<'_> {
    utf8_percent_encode(part, NON_ALPHANUMERIC)
}

/// Parses a response: its JSON, or the sentence and the remedy of a refusal.
fn parse(response: &[u8]) -> Result<Value, String> {
    let strange = || "the daemon answers no HTTP with JSON: is it nvmfd?".to_owned();
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Response::new(&mut headers);
    let Ok(httparse::Status::Complete(length)) = head.parse(response) else {
        return Err(strange());
    };
    let status = head.code.unwrap_or_default();
    let value: Value = serde_json::from_slice(&response[length..]).map_err(|_| match status {
        200..=299 => strange(),
        status => format!("the daemon answers {status}"),
    })?;
    let field = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default();
    match status {
        200..=299 => Ok(value),
        _ => Err(format!("{}: {}", field("detail"), field("remedy"))),
    }
}

#[cfg(test)]
mod tests {
    use crate::attach::management::*;

    #[test]
    fn responses_parse_to_json_or_to_an_error_with_its_remedy() {
        let of = |text: &str| parse(text.as_bytes());
        assert_eq!(of("HTTP/1.0 200 OK\r\na: b\r\n\r\n{\"a\":1}"), Ok(serde_json::json!({"a": 1})));
        let refusal = "HTTP/1.0 409 Conflict\r\n\r\n{\"detail\":\"no\",\"remedy\":\"wait\"}";
        assert_eq!(of(refusal), Err("no: wait".to_owned()));
        assert_eq!(of("HTTP/1.0 502 Bad\r\n\r\n<p>"), Err("the daemon answers 502".to_owned()));
        for strange in ["", "220 mail\r\n", "HTTP/1.0 200 OK\r\n\r\n{", "HTTP/1.0 x\r\n\r\n{}"] {
            assert!(of(strange).is_err_and(|why| why.ends_with("is it nvmfd?")), "{strange:?}");
        }
    }
}
