//! The token of requests that change the target at the loopback address (RFC 6750).
//!
//! Any program of this machine may try tokens. A wrong one is answered after a second, so that the
//! few connections of the address are the limit of all attempts together, and is counted. A right one
//! is never delayed: no program can keep the administrator out.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use rdma::log_interval::LogInterval;
use tokio::time::sleep;
use tracing::warn;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, ResponseBuilder};
use utoipa_axum::router::OpenApiRouter;

use super::ApiError;
use super::changes::Caller;
use crate::control::change::Requester;
use crate::control::handle::ControlHandle;

/// Time until a wrong token is answered.
const DELAY: Duration = Duration::from_secs(1);

/// Interval between log lines about wrong tokens.
const QUIET: Duration = Duration::from_secs(60);

/// Name of the scheme in the description.
const SCHEME: &str = "token";

/// Wrong tokens since the start, and when they were logged.
#[derive(Default)]
struct Attempts(Mutex<(u64, LogInterval)>);

impl Attempts {
    fn note(&self, now: Instant) {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.0 += 1;
        if noted.1.is_due(now, QUIET) {
            warn!("wrong tokens at management.http since the start: {}", noted.0);
        }
    }
}

/// These routes for requests with the token only, and described so.
pub(super) fn required(
    mut routes: OpenApiRouter<ControlHandle>,
    managed: &ControlHandle,
) -> OpenApiRouter<ControlHandle> {
    let document = routes.get_openapi_mut();
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let components = document.components.get_or_insert_with(Components::new);
    components.add_security_scheme(SCHEME, SecurityScheme::Http(scheme));
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let none: [&str; 0] = [];
            operation.security = Some(vec![SecurityRequirement::new(SCHEME, none)]);
            let refused =
                ResponseBuilder::new().description("without the token, or with a wrong one");
            operation.responses.responses.insert("401".to_owned(), refused.build().into());
        }
    }
    let state = (managed.clone(), Arc::new(Attempts::default()));
    routes.route_layer(from_fn_with_state(state, check))
}

async fn check(
    State((managed, attempts)): State<(ControlHandle, Arc<Attempts>)>,
    mut request: Request,
    next: Next,
) -> Response {
    let (error, scheme) = match presented(request.headers()) {
        Some(token) if managed.running().token.admits(token) => {
            request.extensions_mut().insert(Caller(Requester::Token));
            return next.run(request).await;
        }
        Some(_) => {
            attempts.note(Instant::now());
            sleep(DELAY).await;
            ("this is not the token", "Bearer error=\"invalid_token\"")
        }
        None => ("a change at this address needs the token", "Bearer"),
    };
    let remedy = "send that of `http_token_file` (`Authorization: Bearer`), or use `nvmfctl`";
    let refused = ApiError::new(StatusCode::UNAUTHORIZED, error, remedy);
    ([(WWW_AUTHENTICATE, HeaderValue::from_static(scheme))], refused).into_response()
}

/// The token of a request.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("Bearer").then(|| token.trim())
}
