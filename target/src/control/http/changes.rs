//! `/v1/changes`, `/v1/reload`: changes and reloads of the configuration.

use axum::Extension;
use axum::Json;
use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, Request, State};
use axum::http::header::{ETAG, IF_MATCH};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::{ApiError, BODY_TIME, MOST_BODY_BYTES};
use crate::api::{Changes, Outcome, Problem, UNCHANGED, Wanted};
use crate::control::change::{ChangeRequest, ChangeResult, ConfigRequest, Requester};
use crate::control::handle::{ChangeError, ControlHandle};
use crate::overlay::EditError;

/// Who sends a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Caller(pub(super) Requester);

fn requester(caller: Option<Extension<Caller>>) -> Requester {
    caller.map(|Extension(Caller(by))| by).unwrap_or_default()
}

/// Unsaved changes: in force, and not in the configuration file. The entity tag is that of the
/// configuration in force.
#[utoipa::path(
    operation_id = "list_changes",
    get,
    path = "/v1/changes",
    responses((status = 200, body = Changes, headers(("etag" = String))))
)]
pub(super) async fn list(State(managed): State<ControlHandle>) -> impl IntoResponse {
    let declared = &managed.running().declared;
    ([(ETAG, format!("\"{}\"", declared.digest()))], Json(declared.changes().clone()))
}

/// Applies changes: all of them, or none. When this answers, they survive a restart.
#[utoipa::path(
    operation_id = "make_changes",
    post,
    path = "/v1/changes",
    params(("if-match" = Option<String>, Header, description = "entity tags of `GET /v1/changes`")),
    request_body = Wanted,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "a named object does not exist"),
        (status = 409, body = Problem, description = "an object to add exists, or another gateway has \
                                                      applied a newer shared configuration"),
        (status = 412, body = Problem, description = "no entity tag of `If-Match` is that of the \
                                                      configuration in force"),
        (status = 422, body = Problem, description = "the resulting configuration cannot be served"),
        (status = 503, body = Problem, description = "the shared configuration cannot be written"),
        (status = 507, body = Problem, description = "it cannot be kept"),
    )
)]
pub(super) async fn make(
    State(managed): State<ControlHandle>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    Body(wanted): Body<Wanted>,
) -> Result<Json<Outcome>, ApiError> {
    let (by, if_match) = (requester(caller), if_match(&headers));
    answer(managed.order(ConfigRequest::Change(ChangeRequest { wanted, by, if_match })).await)
}

/// The strong entity tags of `If-Match` (RFC 9110), if it does not match everything. A field that
/// cannot be read has none, and so matches nothing.
pub(super) fn if_match(headers: &HeaderMap) -> Option<Vec<String>> {
    let mut tags = Vec::new();
    for field in headers.get_all(IF_MATCH) {
        for tag in field.to_str().unwrap_or_default().split(',').map(str::trim) {
            if tag == "*" {
                return None;
            }
            tags.extend(
                tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).map(String::from),
            );
        }
    }
    headers.contains_key(IF_MATCH).then_some(tags)
}

/// Drops changes that no longer apply.
#[utoipa::path(operation_id = "forget_changes", delete, path = "/v1/changes", responses((status = 200, body = Outcome)))]
pub(super) async fn forget(
    State(managed): State<ControlHandle>,
) -> Result<Json<Outcome>, ApiError> {
    answer(managed.order(ConfigRequest::Forget).await)
}

/// Reloads the configuration file.
#[utoipa::path(
    post,
    path = "/v1/reload",
    params(("if-match" = Option<String>, Header, description = "entity tags of `GET /v1/changes`")),
    responses(
        (status = 200, body = Outcome),
        (status = 412, body = Problem, description = "no entity tag of `If-Match` is that of the \
                                                      configuration in force"),
        (status = 422, body = Problem),
    )
)]
pub(super) async fn reload(
    State(managed): State<ControlHandle>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
) -> Result<Json<Outcome>, ApiError> {
    let (by, if_match) = (requester(caller), if_match(&headers));
    answer(managed.order(ConfigRequest::Reload { by, if_match }).await)
}

fn answer(answer: ChangeResult) -> Result<Json<Outcome>, ApiError> {
    answer.map(Json).map_err(|not_made| match not_made {
        ChangeError::Misfit(EditError::Missing(error)) => {
            ApiError::not_found(error, "see `nvmfctl status` and the lists")
        }
        ChangeError::Misfit(EditError::Exists(error)) => {
            ApiError::conflict(error, "change it, or choose another identifier")
        }
        ChangeError::Misfit(EditError::Wrong(error)) | ChangeError::Unservable(error) => {
            ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, UNCHANGED)
        }
        ChangeError::Unkept(error) => {
            let remedy = "nothing was changed; make room in the state directory";
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, error, remedy)
        }
        ChangeError::Stale => ApiError::new(
            StatusCode::PRECONDITION_FAILED,
            "the configuration has changed meanwhile",
            "look at it again (GET /v1/changes has its entity tag), and repeat the change",
        ),
        ChangeError::Outrun(error) => {
            let remedy = "look at it (`nvmfctl gateway config`), and repeat the change";
            ApiError::conflict(error, remedy)
        }
        ChangeError::Unshared(error) => {
            let remedy = "see `ceph -s`, or use another gateway of the group";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy)
        }
        ChangeError::Stopping => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the daemon is stopping",
            "ask again when it serves",
        ),
    })
}

/// The body of a request, parsed: it must arrive in time and be no longer than allowed.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<ControlHandle> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &ControlHandle) -> Result<Body<T>, ApiError> {
        let bad = |status, error: String| ApiError::new(status, error, "see /v1/openapi.json");
        let bytes: Bytes = timeout(BODY_TIME, to_bytes(request.into_body(), MOST_BODY_BYTES))
            .await
            .map_err(|_| bad(StatusCode::REQUEST_TIMEOUT, "the request is too slow".to_owned()))?
            .map_err(|error| bad(StatusCode::PAYLOAD_TOO_LARGE, error.to_string()))?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|e| bad(StatusCode::BAD_REQUEST, format!("not what is expected: {e}")))?;
        Ok(Body(value))
    }
}
