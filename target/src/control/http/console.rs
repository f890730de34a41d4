//! The console: a page for browsers that shows what the interface has, at `/`.
//!
//! It is part of the program and loads nothing from elsewhere. It uses the same requests as any
//! other client, and offers changes where its listener accepts them.

use axum::Router;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::routing::get;

use crate::control::handle::ControlHandle;

const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const CSS: HeaderValue = HeaderValue::from_static("text/css; charset=utf-8");
const SCRIPT: HeaderValue = HeaderValue::from_static("text/javascript; charset=utf-8");

/// Paths, with type and content.
const FILES: [(&str, HeaderValue, &[u8]); 7] = [
    ("/", HTML, include_bytes!("console/index.html")),
    ("/console/style.css", CSS, include_bytes!("console/style.css")),
    ("/console/main.js", SCRIPT, include_bytes!("console/main.js")),
    ("/console/sections.js", SCRIPT, include_bytes!("console/sections.js")),
    ("/console/changes.js", SCRIPT, include_bytes!("console/changes.js")),
    ("/console/rates.js", SCRIPT, include_bytes!("console/rates.js")),
    ("/console/dom.js", SCRIPT, include_bytes!("console/dom.js")),
];

/// The files of the page. They are no part of the described interface.
pub(super) fn routes() -> Router<ControlHandle> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, content)| {
        router.route(path, get(async move || ([(CONTENT_TYPE, kind)], content)))
    })
}

#[cfg(test)]
mod tests {
    use crate::control::http::console::*;

    #[test]
    fn the_page_is_small_and_refers_to_its_own_files_only() {
        let size: usize = FILES.iter().map(|(_, _, content)| content.len()).sum();
        assert!(size <= 60 << 10, "{size} bytes");
        for (path, _, content) in &FILES {
            let text = std::str::from_utf8(content).unwrap();
            // The name of a namespace of XML is no address.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for refused in
                ["http:", "https:", "//cdn", "innerHTML", "outerHTML", "eval(", " style="]
            {
                assert!(!text.contains(refused), "{path}: {refused}");
            }
            for (other, _, _) in &FILES[1..] {
                let name = other.strip_prefix("/console/").unwrap();
                let is_used = FILES.iter().any(|(_, _, content)| {
                    std::str::from_utf8(content).unwrap().contains(&format!("/{name}\""))
                });
                assert!(is_used, "{other}");
            }
        }
    }
}
