//! Tests of single changes: what each does to the text of a configuration.

use crate::overlay::tests::*;

#[test]
fn a_comment_behind_a_value_survives_a_change_of_the_value() {
    let mut settings = settings(json!({"size": "2GiB"}));
    for size in ["2GiB", "1GiB"] {
        settings.insert("size".to_owned(), size.into());
        let settings = settings.clone();
        let change = Change::SetNamespace { subsystem: A.to_owned(), nsid: 1, settings };
        let text = edit(TEXT, &change).unwrap();
        assert_eq!(text, TEXT.replace("1GiB", size));
    }
}

#[test]
fn each_change_has_its_effect_and_preserves_the_rest() {
    let mut text = TEXT.to_owned();
    let b = "nqn.2026-11.io.nvmfd:b";
    let named = |nqn: &str| nqn.to_owned();
    let changes = [
        (add(2, "2GiB"), "+ namespace 2: null of 2GiB"),
        (
            Change::SetNamespace {
                subsystem: named(A),
                nsid: 1,
                settings: settings(json!({"size": "3GiB", "ana_group": 2})),
            },
            "~ namespace 1: null of 3GiB",
        ),
        (remove(2), "- namespace 2: null of 2GiB"),
        (Change::AllowHost { subsystem: named(A), host: named(HOST) }, "+ host nqn.2026-11.org"),
        (
            Change::DenyHost { subsystem: named(A), host: "nqn.2026-11.org.example:g".into() },
            "- host nqn.2026-11.org.example:g",
        ),
        (
            Change::SetSubsystem { nqn: named(b), settings: settings(json!({"queue_depth": 8})) },
            "b queue_depth none becomes 8 (for hosts that connect from now on; others when they",
        ),
        (
            Change::AddListener { id: 7, settings: settings(json!({"address": "127.0.0.2"})) },
            "+ listener 127.0.0.2:4420 (id 7)",
        ),
        (
            Change::SetAna { listener: 1, group: Some(2), state: "inaccessible".into() },
            "becomes 127.0.0.1:4420 (id 1), group 2 inaccessible",
        ),
        (
            Change::SetAna { listener: 7, group: None, state: "non-optimized".into() },
            "becomes 127.0.0.2:4420 (id 7), all groups non-optimized",
        ),
        (
            Change::SetAna { listener: 7, group: Some(3), state: "optimized".into() },
            "becomes 127.0.0.2:4420 (id 7), group 1 non-optimized, group 2 non-optimized, group 4",
        ),
        (
            Change::SetListener { id: 7, settings: settings(json!({"keep_alive_min_ms": 9})) },
            "keep alive of at least 9 ms",
        ),
        (Change::RemoveListener { id: 1 }, "- listener 127.0.0.1:4420 (id 1)"),
        (
            Change::SetHost {
                nqn: named(HOST),
                settings: settings(json!({"dhchap_key_file": "/k"})),
            },
            "+ key of host",
        ),
        (
            Change::SetHost {
                nqn: named(HOST),
                settings: settings(json!({"hashes": ["sha384"], "groups": ["null"]})),
            },
            "may use SHA-384 with NULL (from the next authentication on)",
        ),
        (
            Change::SetHost { nqn: named(HOST), settings: settings(json!({"hashes": null})) },
            "may use SHA-256, SHA-384, SHA-512 with NULL (from",
        ),
        (Change::RemoveHost { nqn: named(HOST) }, "- key of host"),
        (Change::RemoveSubsystem { nqn: named(b) }, "- subsystem nqn.2026-11.io.nvmfd:b"),
        (
            Change::AddSubsystem {
                nqn: named(b),
                settings: settings(json!({"hosts": [HOST], "serial": "7"})),
            },
            "+ subsystem nqn.2026-11.io.nvmfd:b",
        ),
    ];
    for (change, says) in &changes {
        let next = edit(&text, change).unwrap_or_else(|misfit| panic!("{change}: {misfit}"));
        let old = Config::parse(&text).unwrap();
        let new =
            Config::parse(&next).unwrap_or_else(|errors| panic!("{change}: {errors}\n{next}"));
        let lines = differences(&old, &new);
        assert_eq!(lines.len(), 1, "{change}: {lines:?}\n{next}");
        assert!(lines[0].contains(says), "{change}: {lines:?}");
        assert_eq!(differences(&new, &new), Vec::<String>::new());
        text = next;
    }
    for kept in ["# our disks", "# no adapter yet", "# the first", "# who may", "[limits]\nqueue"] {
        assert!(text.contains(kept), "{kept} is still there:\n{text}");
    }
}

#[test]
fn inapplicable_changes_are_rejected_and_change_nothing() {
    let missing = |change: &Change| matches!(edit(TEXT, change), Err(EditError::Missing(_)));
    let a = || A.to_owned();
    assert!(missing(&remove(2)));
    assert!(missing(&Change::RemoveSubsystem { nqn: "nqn.c".into() }));
    assert!(missing(&Change::RemoveListener { id: 2 }));
    assert!(missing(&Change::DenyHost { subsystem: a(), host: HOST.into() }));
    // It would connect again at once.
    let deny = Change::DenyHost { subsystem: "nqn.2026-11.io.nvmfd:b".into(), host: HOST.into() };
    let refused = edit(TEXT, &deny).unwrap_err().to_string();
    assert!(refused.contains("set nqn.2026-11.io.nvmfd:b allow_any_host=false"), "{refused}");
    assert!(missing(&Change::SetAna { listener: 9, group: None, state: "change".into() }));
    assert!(matches!(edit(TEXT, &add(1, "1MiB")), Err(EditError::Exists(_))));
    let listener = Change::AddListener { id: 1, settings: Settings::new() };
    assert!(matches!(edit(TEXT, &listener), Err(EditError::Exists(_))));
    let rename =
        Change::SetSubsystem { nqn: a(), settings: settings(json!({"nqn": "nqn.2026-11.x:y"})) };
    assert!(matches!(edit(TEXT, &rename), Err(EditError::Wrong(_))));
    let long = replace(" ".repeat(MOST_TEXT_BYTES + 1));
    assert!(matches!(edit(TEXT, &long), Err(EditError::Wrong(_))));

    let (_directory, declared) = stage(TEXT);
    let says =
        |change: Change| declared.with(&[add(5, "1MiB"), change], AT).unwrap_err().to_string();
    assert!(says(add(6, "5 apples")).contains("`size`"));
    let unknown = settings(json!({"colour": 1}));
    let said = says(Change::SetSubsystem { nqn: a(), settings: unknown });
    assert!(said.contains("unknown key `colour`"), "{said}");
    let elsewhere = format!("state_directory = \"/elsewhere\"\n{TEXT}");
    assert!(says(replace(elsewhere)).contains("cannot be changed while"));
    assert_eq!(nsids(&declared), [1]);
}

#[test]
fn sections_that_are_written_inline_can_be_changed_as_well() {
    let text = "listener = [{ address = \"::1\" }]\nsubsystem = [{ nqn = \"nqn.2026-11.io.nvmfd:a\", \
                allow_any_host = true, namespace = [{ nsid = 1, kind = \"null\", size = \"1MiB\" }] }]\n";
    let mut text = text.to_owned();
    for change in [add(2, "2MiB"), remove(1)] {
        text = edit(&text, &change).unwrap();
    }
    let config = Config::parse(&text).unwrap_or_else(|errors| panic!("{errors}\n{text}"));
    let namespaces = &config.subsystems[0].namespaces;
    assert_eq!((namespaces.len(), namespaces[0].nsid), (1, 2));
    assert_eq!(namespaces[0].kind, NamespaceKind::Null { size: 2 << 20 });
}

#[test]
fn listener_ids_survive_the_removal_of_other_listeners() {
    let text = format!("{TEXT}[[listener]]\naddress = \"127.0.0.3\"\n");
    let text = edit(&text, &Change::RemoveListener { id: 1 }).unwrap();
    let config = Config::parse(&text).unwrap();
    assert_eq!((config.listeners.len(), config.listeners[0].id), (1, 2));
}
