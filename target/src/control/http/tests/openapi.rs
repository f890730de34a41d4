//! Tests of the OpenAPI document: it describes what is answered.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{get, stage, text};
use crate::control::http::*;

#[test]
fn every_api_path_is_documented_and_conforms_to_its_schema() {
    stage("").visit(|socket| {
        let (status, document) = get(socket, "/v1/openapi.json");
        assert_eq!(status, 200);
        let paths = document["paths"].as_object().unwrap();
        let described: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
        for path in ["/v1/status", "/v1/subsystems", "/v1/hosts", "/v1/controllers"] {
            assert!(described.contains(path), "{path} is described");
        }
        let mut looked_at = 0;
        for (path, item) in paths {
            let ok = &item["get"]["responses"]["200"]["content"]["application/json"]["schema"];
            if ok.is_null() {
                continue;
            }
            let (status, answer) = get(socket, &path.replace("{nqn}", "nqn.2026-11.io.nvmfd:a"));
            if path == "/v1/gateway-group/configuration" {
                assert_eq!(status, 404, "it uses no shared configuration: {answer}");
                continue;
            }
            assert_eq!(status, 200, "{path}: {answer}");
            check(&document, ok, &answer, path);
            looked_at += 1;
        }
        assert!(looked_at >= 6);
        let mut ids = BTreeSet::new();
        for (path, item) in paths {
            for (method, operation) in item.as_object().unwrap() {
                let id = operation["operationId"].as_str().unwrap();
                assert!(ids.insert(id), "{id} is twice, at {method} {path}");
                assert!(operation["responses"]["default"].is_object(), "{method} {path}");
                for (status, response) in operation["responses"].as_object().unwrap() {
                    assert!(response["description"].is_string(), "{status} of {method} {path}");
                }
            }
        }
        let (status, answer) = get(socket, "/v1/subsystems/nqn.2026-11.io.nvmfd:b");
        let schema = &document["components"]["schemas"]["Problem"];
        check(&document, schema, &answer, "a refusal");
        assert_eq!(status, 404);
    });
}

/// Client generators number variants without a name, or leave them out.
#[test]
fn every_variant_of_a_change_and_of_an_event_has_a_schema_with_a_name() {
    stage("").visit(|socket| {
        let (_, document) = get(socket, "/v1/openapi.json");
        let schemas = &document["components"]["schemas"];
        for (name, variants, variant) in
            [("Change", 16, "ChangeSetAna"), ("Event", 7, "EventDegraded")]
        {
            let schema = &schemas[name];
            let mapping = schema["discriminator"]["mapping"].as_object().unwrap();
            assert_eq!(mapping.len(), variants, "{schema}");
            assert_eq!(schema["oneOf"].as_array().unwrap().len(), variants, "{schema}");
            assert!(schemas[variant]["properties"].is_object(), "{schemas}");
        }
        // Nothing refers to a schema that is not there.
        for reference in document.to_string().split("#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(schemas[name].is_object(), "{name}");
        }
        let change = json!({ "change": "deny_host", "subsystem": "a", "host": "b" });
        check(&document, &schemas["Change"], &change, "a change");
        let lines = text(socket, "/v1/watch?events=1");
        let line = lines.lines().find(|line| line.starts_with('{')).expect("an event");
        let event = serde_json::from_str(line).unwrap();
        check(&document, &schemas["Event"], &event, "an event");
    });
}

#[test]
fn the_schema_checker_detects_violations() {
    let (_, document) = routes(ChangeAccess::Yes, &stage("").managed);
    let document = serde_json::to_value(document).unwrap();
    let schema = &document["components"]["schemas"]["Problem"];
    let right = r#"{"title": "a", "status": 404, "detail": "a", "remedy": "a"}"#;
    check(&document, schema, &serde_json::from_str(right).unwrap(), "right");
    for wrong in [&right.replace("404", "\"404\""), r#"{"detail": "a", "remedy": "a"}"#, "[]"] {
        let wrong: Value = serde_json::from_str(wrong).unwrap();
        let judged = std::panic::catch_unwind(|| check(&document, schema, &wrong, "wrong"));
        assert!(judged.is_err(), "{wrong}");
    }
}

/// Checks that a value conforms to a schema of the document.
fn check(document: &Value, schema: &Value, value: &Value, place: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.strip_prefix("#/components/schemas/").expect("a schema of the document");
        let schema = &document["components"]["schemas"][name];
        assert!(schema.is_object(), "{place}: there is no schema {name}");
        return check(document, schema, value, &format!("{place} {name}"));
    }
    if let Some(tag) = schema["discriminator"]["propertyName"].as_str() {
        let variant = value[tag].as_str().expect("the property that tells variants apart");
        let variant = json!({ "$ref": schema["discriminator"]["mapping"][variant] });
        return check(document, &variant, value, place);
    }
    if let Some(either) = schema["oneOf"].as_array() {
        // An optional value: null or the other schema.
        let is_nothing = |schema: &&Value| schema["type"] == "null";
        assert!(either.len() == 2 && either.iter().any(|schema| is_nothing(&schema)), "{place}");
        let other = either.iter().find(|schema| !is_nothing(schema));
        return match value {
            Value::Null => {}
            value => check(document, other.unwrap(), value, place),
        };
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        _ => panic!("{place}: a schema without a type: {schema}"),
    };
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{place}: type {other}"),
    };
    assert!(types.iter().any(|kind| is(kind)), "{place}: {value} is none of {types:?}");
    if let Some(names) = schema["enum"].as_array() {
        assert!(names.contains(value), "{place}: {value} is none of {names:?}");
    }
    for each in value.as_array().into_iter().flatten() {
        check(document, &schema["items"], each, place);
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(value.get(name.as_str().unwrap()).is_some(), "{place}: {name} is missing");
    }
    for (name, each) in value.as_object().into_iter().flatten() {
        let of_name = &schema["properties"][name];
        let schema = if of_name.is_null() { &schema["additionalProperties"] } else { of_name };
        assert!(schema.is_object(), "{place}: {name} is not described");
        check(document, schema, each, &format!("{place} {name}"));
    }
}
