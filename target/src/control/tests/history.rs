//! Tests of the history: what was changed, and who has requested it.

use tokio::sync::oneshot::{Receiver, channel};

use super::{TEXT, stage};
use crate::api::{Change, Wanted};
use crate::control::change::{ChangeRequest, ChangeResult, ConfigRequest};
use crate::control::*;

/// A request for another size of the namespace.
fn resize(size: &str, by: Requester) -> (Order, Receiver<ChangeResult>) {
    let subsystem = "nqn.2026-11.io.nvmfd:disk1".to_owned();
    let settings = [("size".to_owned(), size.into())].into();
    let changes = vec![Change::SetNamespace { subsystem, nsid: 1, settings }];
    let wanted = Wanted { changes, dry_run: false };
    let (answer, answered) = channel();
    let work = ConfigRequest::Change(ChangeRequest { wanted, by, if_match: None });
    (Order { work, answer }, answered)
}

#[test]
fn reloads_that_changed_something_are_in_the_history_with_their_user() {
    let stage = stage(|_| ());
    let file = stage.directory.path().join("nvmfd.toml");
    let two = "[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"\nsize = \"1GiB\"\n";
    let mut served = stage.served;
    for text in ["nonsense", TEXT, &format!("{TEXT}{two}")] {
        std::fs::write(&file, text).unwrap();
        let (answer, _answered) = channel();
        let work = ConfigRequest::Reload { by: Requester::User(5), if_match: None };
        served = served.execute(Order { work, answer });
    }
    std::fs::write(&file, TEXT).unwrap();
    served = served.reload();
    let list = served.shown.borrow().history.list();
    let users: Vec<Option<u32>> = list.iter().map(|entry| entry.uid).collect();
    assert_eq!(users, [None, Some(5)], "{list:?}");
    assert!(list[0].differences[0].starts_with("- namespace 2"), "{list:?}");
    assert!(list[1].differences[0].starts_with("+ namespace 2"), "{list:?}");
}

/// A program that sets the same each minute would leave nothing else.
#[test]
fn changes_that_change_nothing_are_not_in_the_history() {
    let mut served = stage(|_| ()).served;
    for size in ["1GiB", "2GiB", "2GiB"] {
        let (order, answered) = resize(size, Requester::Unknown);
        served = served.execute(order);
        answered.blocking_recv().unwrap().unwrap();
    }
    let list = served.shown.borrow().history.list();
    assert_eq!(list.len(), 1, "{list:?}");
    assert!(list[0].differences[0].contains("2GiB"), "{list:?}");
}

#[test]
fn the_history_names_the_token_where_no_user_is_known() {
    let stage = stage(|_| ());
    let (mut served, mut named) = (stage.served, Vec::new());
    for (size, by) in [("2GiB", Requester::Token), ("3GiB", Requester::User(5))] {
        let (order, _answered) = resize(size, by);
        named.push(order.name());
        served = served.execute(order);
    }
    let list = served.shown.borrow().history.list();
    let by = list.iter().map(|entry| (entry.uid, entry.by_token));
    assert_eq!(by.collect::<Vec<_>>(), [(Some(5), false), (None, true)], "the latest first");
    assert!(named[0].contains("the change by the token of `http_token_file`"), "{named:?}");
}
