//! Lenient JSON of other programs: numbers and flags also as strings.

use serde_json::Value;

const NONE: &Value = &Value::Null;

/// The member `key` of an object, or null.
pub(super) fn at<'v>(value: &'v Value, key: &str) -> &'v Value {
    value.get(key).unwrap_or(NONE)
}

/// A text, or a number as text, without spaces around it; nothing if it is empty.
pub(super) fn text(value: &Value, key: &str) -> Option<String> {
    let text = match at(value, key) {
        Value::String(text) => text.trim().to_owned(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    (!text.is_empty()).then_some(text)
}

/// A number that is not negative, also as text.
pub(super) fn number(value: &Value, key: &str) -> Option<u64> {
    text(value, key)?.parse().ok()
}

/// Whether it is true, 1, or one of them as text.
pub(super) fn flag(value: &Value, key: &str) -> bool {
    matches!(at(value, key), Value::Bool(true))
        || text(value, key).is_some_and(|text| text == "1" || text.eq_ignore_ascii_case("true"))
}

/// The elements of a list; none if it is not one.
pub(super) fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    at(value, key).as_array().map_or(&[], Vec::as_slice)
}
