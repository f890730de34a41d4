//! Schemas for client generators, which leave variants out or number them where these have no name.

use serde_json::{Map, Value, json};

/// Gives every variant of the types that are told apart by a constant property (`oneOf`) a schema
/// of its own, named by the type and the constant, and names the property (`discriminator`).
pub(super) fn name(document: &mut Value) {
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut)
    else {
        return;
    };
    add_flattened(schemas);
    let mut named = Map::new();
    for (name, schema) in schemas.iter_mut() {
        let Some(variants) = schema.get_mut("oneOf").and_then(Value::as_array_mut) else {
            continue;
        };
        let Some(tag) = tag(variants) else { continue };
        let mut mapping = Map::new();
        for variant in variants {
            let constant = constant(variant, &tag).unwrap_or_default().to_owned();
            let own = format!("{name}{}", pascal_case(&constant));
            let reference = format!("#/components/schemas/{own}");
            mapping.insert(constant, reference.clone().into());
            named.insert(own, std::mem::replace(variant, json!({ "$ref": reference })));
        }
        let discriminator = json!({ "propertyName": tag, "mapping": mapping });
        schema["discriminator"] = discriminator;
    }
    schemas.extend(named);
}

/// A struct with a flattened enum (`allOf` of the enum and of an object with the other fields)
/// becomes variants that have these fields. The enum is used nowhere else.
fn add_flattened(schemas: &mut Map<String, Value>) {
    let names: Vec<String> = schemas.keys().cloned().collect();
    for name in names {
        let Some(schema) = schemas.get(&name) else { continue };
        let Some([first, fields]) = schema["allOf"].as_array().map(Vec::as_slice) else {
            continue;
        };
        let reference = first["$ref"].as_str().unwrap_or_default();
        let base = reference.trim_start_matches("#/components/schemas/").to_owned();
        let of_base = schemas.get(&base).and_then(|base| base["oneOf"].as_array());
        let Some(mut variants) = of_base.cloned() else { continue };
        for variant in variants.iter_mut().filter_map(Value::as_object_mut) {
            for list in ["properties", "required"] {
                match (variant.get_mut(list), &fields[list]) {
                    (Some(Value::Object(own)), Value::Object(more)) => own.extend(more.clone()),
                    (Some(Value::Array(own)), Value::Array(more)) => own.extend(more.clone()),
                    _ => {}
                }
            }
        }
        let schema = json!({ "oneOf": variants, "description": schema["description"] });
        schemas.insert(name, schema);
        schemas.remove(&base);
    }
}

/// The property that is a constant in every variant.
fn tag(variants: &[Value]) -> Option<String> {
    let properties = variants.first()?["properties"].as_object()?;
    let tells = |name: &&String| variants.iter().all(|each| constant(each, name).is_some());
    properties.keys().find(tells).cloned()
}

/// The only value that a property of an object may have.
fn constant<'a>(schema: &'a Value, property: &str) -> Option<&'a str> {
    match schema["properties"][property]["enum"].as_array().map(Vec::as_slice) {
        Some([only]) => only.as_str(),
        _ => None,
    }
}

fn pascal_case(snake_case: &str) -> String {
    let word = |word: &str| {
        word.chars().next().map(|c| c.to_uppercase().chain(word.chars().skip(1)).collect())
    };
    snake_case.split('_').filter_map(word).collect::<Vec<String>>().concat()
}
