//! Tests of requests that come from elsewhere: other sites, other names, other methods.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use super::{ask, get, stage, text};

#[test]
fn invalid_http_requests_are_refused_with_a_problem_document() {
    stage("").visit(|socket| {
        for (head, status) in
            [("GET /v2 HTTP/1.1\r\nHost: x", 404), ("DELETE /v1/status HTTP/1.1\r\nHost: x", 405)]
        {
            let (found, problem) = ask(UnixStream::connect(socket).unwrap(), head);
            assert_eq!(found, status, "{head}");
            assert_eq!(problem["status"], status, "{problem}");
            assert!(problem["remedy"].as_str().unwrap().contains("openapi"), "{problem}");
        }
        // Data that is not HTTP ends the connection, and nothing else.
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(&[0xFF; 100_000]).ok();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(get(socket, "/v1/hosts").0, 200);
    });
}

#[test]
fn the_loopback_listener_is_read_only_and_checks_the_host_header() {
    // An address of its own, which no other process on this machine is expected to use.
    stage("http = \"127.0.43.9:4480\"\n").visit(|_| {
        let at = SocketAddr::from(([127, 0, 43, 9], 4480));
        let get = |host: &str| {
            let stream = TcpStream::connect(at).unwrap();
            ask(stream, &format!("GET /v1/status HTTP/1.1\r\nHost: {host}")).0
        };
        for good in ["127.0.43.9:4480", "localhost", "[::1]:80"] {
            assert_eq!(get(good), 200, "{good}");
        }
        for bad in ["evil.example", "localhost.evil.example:80", "192.0.2.1:80"] {
            assert_eq!(get(bad), 404, "{bad}");
        }
        let (_, document) =
            ask(TcpStream::connect(at).unwrap(), "GET /v1/openapi.json HTTP/1.1\r\nHost: [::1]");
        for (path, item) in document["paths"].as_object().unwrap() {
            let methods: Vec<_> = item.as_object().unwrap().keys().collect();
            assert_eq!(methods, ["get"], "{path}");
        }
    });
}

/// A response as it is sent, to a request with these fields.
pub(super) fn raw(mut stream: impl Read + Write, request: &str, fields: &str) -> String {
    write!(stream, "{request} HTTP/1.1\r\n{fields}Connection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn pages_of_other_sites_change_nothing_and_read_nothing() {
    let served = "http = \"127.0.43.10:4480\"\n";
    stage(served).visit(|socket| {
        let unix = |request: &str, fields: &str| {
            let answer = raw(UnixStream::connect(socket).unwrap(), request, fields);
            answer.split(' ').nth(1).unwrap().to_owned()
        };
        let tcp = |request: &str, fields: &str| {
            let stream = TcpStream::connect("127.0.43.10:4480").unwrap();
            raw(stream, request, fields).split(' ').nth(1).unwrap().to_owned()
        };
        // A forwarded socket: 405 has passed all checks.
        let post = "POST /v1/status";
        for (origin, status) in [
            ("", "405"),
            ("Origin: http://localhost:9000\r\n", "405"),
            ("Origin: https://localhost:9000\r\n", "403"),
            ("Origin: http://localhost:9001\r\n", "403"),
            ("Origin: http://evil.example\r\n", "403"),
            ("Origin: null\r\n", "403"),
            ("Origin: http://localhost:9000\r\nOrigin: null\r\n", "403"),
        ] {
            let fields = format!("Host: localhost:9000\r\n{origin}");
            assert_eq!(unix(post, &fields), status, "{origin}");
            assert_eq!(tcp(post, &fields), status, "{origin}");
        }
        // A name of the site that resolves to this machine.
        let rebound = "Host: evil.example:9000\r\nOrigin: http://evil.example:9000\r\n";
        for request in [post, "GET /v1/status", "GET /"] {
            assert_eq!(
                (unix(request, rebound), tcp(request, rebound)),
                ("404".into(), "404".into())
            );
        }
        for (host, on_unix, on_tcp) in [
            ("Host: nvmfd\r\n", "200", "404"),
            ("Host: 127.0.0.1:4480\r\n", "200", "200"),
            ("Host: [::1]:4480\r\n", "200", "200"),
            ("Host: ::1\r\n", "200", "200"),
            ("Host: 192.0.2.1\r\n", "404", "404"),
            ("Host: localhost.\r\n", "404", "404"),
        ] {
            let found = (unix("GET /v1/status", host), tcp("GET /v1/status", host));
            assert_eq!(found, (on_unix.into(), on_tcp.into()), "{host}");
        }
    });
}

#[test]
fn the_console_is_served_with_a_csp_unless_it_is_disabled() {
    let paths = ["/", "/console/main.js", "/console/style.css"];
    stage("").visit(move |socket| {
        for path in paths {
            let answer = text(socket, path);
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
            for field in [
                "content-security-policy: default-src 'none'; script-src 'self'; ",
                "frame-ancestors 'none'",
                "x-content-type-options: nosniff",
                "cross-origin-resource-policy: same-origin",
            ] {
                assert!(answer.contains(field), "{path}: {field}: {answer}");
            }
        }
        assert!(text(socket, "/console/main.js").contains("content-type: text/javascript"));
        let (_, document) = get(socket, "/v1/openapi.json");
        assert!(document["paths"]["/"].is_null() && document["paths"]["/v1/plan"].is_object());
    });
    stage("console = false\n").visit(move |socket| {
        for path in paths {
            assert!(text(socket, path).starts_with("HTTP/1.1 404 "), "{path}");
        }
        assert_eq!(get(socket, "/v1/status").0, 200);
    });
}
