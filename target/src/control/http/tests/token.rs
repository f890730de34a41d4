//! Tests of changes at the loopback address, which need the token.

use std::fs::{Permissions, set_permissions, write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use serde_json::json;

use super::{Stage, ask, get, stage_of};
use crate::control::http::*;

const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";

/// A request that changes nothing, but only if it has passed all checks: 404.
const CHANGE: &str = "POST /v1/controllers/7/disconnect HTTP/1.1";

/// The interface with an address, and a file with this text and mode as its token.
fn stage_with_token(http: &str, text: &str, mode: u32) -> Stage {
    stage_of(Vec::new(), |directory| {
        let path = directory.join("token");
        write(&path, text).unwrap();
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        format!("http = \"{http}\"\nhttp_token_file = {path:?}\n")
    })
}

#[test]
fn changes_at_the_loopback_address_need_the_token_and_reads_need_none() {
    const HTTP: &str = "127.0.43.11:4480";
    stage_with_token(HTTP, &format!("{TOKEN}\n"), 0o600).visit(|socket| {
        let tcp = |head: &str, fields: &str| {
            let stream = TcpStream::connect(HTTP).unwrap();
            ask(stream, &format!("{head}\r\nHost: {HTTP}{fields}"))
        };
        let with = |token: &str| format!("\r\nAuthorization: Bearer {token}");
        let (status, problem) = tcp(CHANGE, &with(TOKEN));
        assert_eq!(status, 404, "{problem}");
        assert_eq!(tcp(CHANGE, &format!("\r\nauthorization: bearer {TOKEN}")).0, 404);
        for fields in [
            String::new(),
            format!("\r\nAuthorization: Basic {TOKEN}"),
            format!("\r\nAuthorization: {TOKEN}"),
            with(&TOKEN.replace('f', "e")),
        ] {
            let (status, problem) = tcp(CHANGE, &fields);
            assert_eq!((status, &problem["status"]), (401, &json!(401)), "{fields}: {problem}");
            let remedy = problem["remedy"].as_str().unwrap();
            assert!(remedy.contains("`http_token_file`"), "{problem}");
        }
        let (_, status) = tcp("GET /v1/status HTTP/1.1", "");
        assert_eq!(status["accepts_changes"], "with_token");
        assert_eq!(tcp("POST /v1/status HTTP/1.1", "").0, 405);
        // A token is no exception from what keeps pages of other sites out.
        for (origin, status) in [
            (format!("http://{HTTP}"), 404),
            ("http://evil.example".to_owned(), 403),
            ("null".to_owned(), 403),
        ] {
            let fields = format!("\r\nOrigin: {origin}{}", with(TOKEN));
            assert_eq!(tcp(CHANGE, &fields).0, status, "{origin}");
        }
        let stream = TcpStream::connect(HTTP).unwrap();
        let rebound = format!("{CHANGE}\r\nHost: evil.example{}", with(TOKEN));
        let (status, problem) = ask(stream, &rebound);
        assert!(status == 404 && problem["detail"].as_str().unwrap().contains("no name"));
        // The socket needs none, and ignores one.
        for fields in [String::new(), with("a")] {
            let stream = UnixStream::connect(socket).unwrap();
            assert_eq!(ask(stream, &format!("{CHANGE}\r\nHost: x{fields}")).0, 404, "{fields}");
        }
        assert_eq!(get(socket, "/v1/status").1["accepts_changes"], "yes");
    });
}

#[test]
fn a_refused_change_names_the_bearer_scheme() {
    const HTTP: &str = "127.0.43.12:4480";
    stage_with_token(HTTP, TOKEN, 0o600).visit(|_| {
        for (fields, scheme) in [
            ("", "www-authenticate: Bearer\r\n"),
            ("Authorization: Bearer a\r\n", "www-authenticate: Bearer error=\"invalid_token\"\r\n"),
        ] {
            let stream = TcpStream::connect(HTTP).unwrap();
            let fields = format!("Host: {HTTP}\r\n{fields}");
            let answer = super::origins::raw(stream, "POST /v1/reload", &fields);
            assert!(answer.starts_with("HTTP/1.1 401 ") && answer.contains(scheme), "{answer}");
            assert!(answer.contains("content-type: application/problem+json"), "{answer}");
        }
    });
}

#[test]
fn an_unusable_token_file_makes_the_address_read_only() {
    let usable = (TOKEN, 0o600, 404);
    for (at, (text, mode, expected)) in
        [usable, (TOKEN, 0o644, 401), (&TOKEN[..31], 0o600, 401), ("", 0o600, 401)]
            .into_iter()
            .enumerate()
    {
        let http = format!("127.0.43.{}:4480", 13 + at);
        stage_with_token(&http.clone(), text, mode).visit(move |_| {
            let fields = format!("Host: {http}\r\nAuthorization: Bearer {text}");
            let ask = |head: &str| {
                ask(TcpStream::connect(&http).unwrap(), &format!("{head}\r\n{fields}")).0
            };
            assert_eq!(ask(CHANGE), expected, "{text:?} {mode:o}");
            assert_eq!(ask("GET /v1/status HTTP/1.1"), 200);
        });
    }
}

#[test]
fn the_description_has_the_scheme_where_changes_need_the_token() {
    let stage = super::stage("");
    let paths = |access| {
        let document = description(access, &stage.managed);
        let scheme = document["components"]["securitySchemes"]["token"].clone();
        (document["paths"].clone(), scheme)
    };
    let (all, scheme) = paths(ChangeAccess::WithToken);
    assert_eq!(scheme, json!({ "type": "http", "scheme": "bearer" }));
    let (on_socket, none) = paths(ChangeAccess::Yes);
    assert!(none.is_null());
    let (read_only, _) = paths(ChangeAccess::No);
    let mut changes = 0;
    for (path, item) in all.as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            assert!(on_socket[path][method].is_object(), "{method} {path}");
            let is_change = read_only[path][method].is_null();
            changes += usize::from(is_change);
            let [security, refusal] = [&operation["security"], &operation["responses"]["401"]];
            match is_change {
                true => assert_eq!(security, &json!([{ "token": [] }]), "{method} {path}"),
                false => assert!(security.is_null(), "{method} {path}"),
            }
            let problem = &refusal["content"]["application/problem+json"];
            assert_eq!(problem.is_object(), is_change, "{method} {path}: {refusal}");
        }
    }
    assert!(changes > 10, "{changes}");
}
