//! Error responses.

use axum::Json;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use crate::api::Problem;

/// A failed request: its HTTP status and text.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    problem: Problem,
}

impl ApiError {
    /// An error with this text.
    pub(crate) fn new(
        status: StatusCode,
        error: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ApiError {
        ApiError { status, problem: Problem::new(error, remedy) }
    }

    /// 404: not found.
    pub(crate) fn not_found(error: impl Into<String>, remedy: impl Into<String>) -> ApiError {
        ApiError { status: StatusCode::NOT_FOUND, problem: Problem::new(error, remedy) }
    }

    pub(super) async fn no_such_path(uri: Uri) -> ApiError {
        let error = format!("there is nothing at {}", uri.path());
        ApiError::not_found(error, "see /v1/openapi.json for what there is")
    }

    pub(super) async fn no_such_method(method: Method, uri: Uri) -> ApiError {
        let error = format!("{method} is not possible at {}", uri.path());
        let problem = Problem::new(error, "see /v1/openapi.json for what is");
        ApiError { status: StatusCode::METHOD_NOT_ALLOWED, problem }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.problem)).into_response()
    }
}
