//! Protection against web pages of other sites, which can make a browser send requests to this
//! machine: to the loopback address, and to a socket that SSH forwards to such an address.
//!
//! Such a page cannot read a response, unless its name resolves to this machine (DNS rebinding):
//! so names that may be in DNS are refused. And it cannot change anything, because browsers name
//! the origin of every request other than GET and HEAD.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderValue, ORIGIN, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ApiError;

/// What every response demands of a browser. Nothing is loaded from elsewhere or framed, and
/// no text becomes markup.
const POLICY: [(HeaderName, HeaderValue); 5] = [
    (
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
             require-trusted-types-for 'script'; trusted-types 'none'",
        ),
    ),
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (CACHE_CONTROL, HeaderValue::from_static("no-store")),
];

/// On the loopback address: requests name such an address, or `localhost`.
pub(super) async fn only_by_address(request: Request, next: Next) -> Response {
    match host(request.headers()) {
        Some(name) if is_loopback(name) => guarded(request, next).await,
        _ => foreign(),
    }
}

/// On the Unix socket: clients name the host as they like, but not by a name that may be in DNS.
pub(super) async fn not_by_domain(request: Request, next: Next) -> Response {
    match host(request.headers()) {
        Some(name) if name.contains('.') && !is_loopback(name) => foreign(),
        _ => guarded(request, next).await,
    }
}

/// Refuses the requests of pages of other origins, and adds the policy to the response.
async fn guarded(request: Request, next: Next) -> Response {
    let headers = request.headers();
    let is_own = |origin: &HeaderValue| {
        let own = headers.get(HOST).and_then(|host| host.to_str().ok());
        let origin = origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"));
        own.is_some() && own == origin
    };
    let mut response = match headers.get_all(ORIGIN).iter().all(is_own) {
        true => next.run(request).await,
        false => {
            let error = "the request is one of a web page of another site";
            ApiError::new(StatusCode::FORBIDDEN, error, "use `nvmfctl`").into_response()
        }
    };
    response.headers_mut().extend(POLICY);
    response
}

fn foreign() -> Response {
    ApiError::not_found("this is no name of the interface", "ask for it by its address")
        .into_response()
}

/// The name of the host that a request is for, without its port.
fn host(headers: &HeaderMap) -> Option<&str> {
    let host = headers.get(HOST)?.to_str().ok()?;
    let port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    Some(match host.parse::<IpAddr>() {
        Ok(_) => host,
        Err(_) => port.map_or(host, |(name, _)| name),
    })
}

/// Whether a name is `localhost` or a loopback address.
fn is_loopback(name: &str) -> bool {
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name == "localhost" || bare.parse().is_ok_and(|at: IpAddr| at.is_loopback())
}
