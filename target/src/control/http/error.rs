//! Error responses.

use axum::body::to_bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder};

use crate::api::Problem;

/// The longest text of a refusal, in bytes.
const MOST_REFUSAL_BYTES: usize = 64 << 10;

/// A failed request.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    detail: String,
    remedy: String,
}

impl ApiError {
    /// An error with this text.
    pub(crate) fn new(
        status: StatusCode,
        detail: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ApiError {
        ApiError { status, detail: detail.into(), remedy: remedy.into() }
    }

    /// 404: not found.
    pub(crate) fn not_found(detail: impl Into<String>, remedy: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, detail, remedy)
    }

    /// 409: what is there does not allow that now.
    pub(super) fn conflict(detail: impl Into<String>, remedy: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, detail, remedy)
    }

    /// The same after a part of the request was carried out, which `done` says.
    pub(super) fn after(self, done: &str) -> ApiError {
        ApiError { detail: format!("{done}: {}", self.detail), ..self }
    }

    pub(super) async fn not_enabled() -> ApiError {
        let error = "the management interface is off (`enabled = false` in [management])";
        let remedy = "change that and restart the daemon, or disable nvmfd.socket";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy)
    }

    pub(super) async fn no_such_path(uri: Uri) -> ApiError {
        let error = format!("there is nothing at {}", uri.path());
        ApiError::not_found(error, "see /v1/openapi.json for what there is")
    }

    pub(super) async fn no_such_method(method: Method, uri: Uri) -> ApiError {
        let error = format!("{method} is not possible at {}", uri.path());
        let remedy = "see /v1/openapi.json for what is";
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, error, remedy)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let problem = Problem {
            title: self.status.canonical_reason().unwrap_or_default().to_owned(),
            status: self.status.as_u16(),
            detail: self.detail,
            remedy: self.remedy,
        };
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        (self.status, [(CONTENT_TYPE, Problem::CONTENT_TYPE)], body).into_response()
    }
}

/// Makes a problem of a refusal by an extractor, which is a line of text.
pub(super) async fn refusal_as_problem(response: Response) -> Response {
    let status = response.status();
    let kind = response.headers().get(CONTENT_TYPE);
    let is_text = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !(status.is_client_error() && is_text) {
        return response;
    }
    let text = to_bytes(response.into_body(), MOST_REFUSAL_BYTES).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    ApiError::new(status, text, "see /v1/openapi.json").into_response()
}

/// Completes the description of the interface: every operation may fail with a [`Problem`], and has
/// the first word of its path as its tag; every response has a description, which OpenAPI requires.
pub(super) fn describe(document: &mut OpenApi) {
    let problem = || ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    let default = || ResponseBuilder::new().description("an error").build().into();
    for (path, item) in &mut document.paths.paths {
        let tag = path.trim_start_matches("/v1").split('/').nth(1).unwrap_or_default().to_owned();
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            operation.tags = Some(vec![tag.clone()]);
            let responses = &mut operation.responses.responses;
            responses.entry("default".to_owned()).or_insert_with(default);
            for (status, response) in responses {
                let RefOr::T(response) = response else { continue };
                let succeeds = status.starts_with('2');
                if response.description.is_empty() {
                    let description = if succeeds { "done" } else { "an error" };
                    response.description = description.to_owned();
                }
                if !succeeds {
                    response.content.clear();
                    response.content.insert(Problem::CONTENT_TYPE.to_owned(), RefOr::T(problem()));
                }
            }
        }
    }
}
