//! Tests of the rules of Get LBA Status, without a device.

use std::sync::Arc;

use nvme::log::AnaState;
use nvme::{NSID_ALL, Sgl};

use crate::command::admin::tests::{MDTS, ask, discovery_controller, given, keyed, nvm, refused};
use crate::command::lba_status::*;
use crate::subsystem::ana::AnaStates;
use crate::subsystem::bad_blocks::Change;
use crate::subsystem::lba_format::Progress;

/// Of namespace 2, which has 2^20 blocks of 512 bytes.
fn get(slba: u64, rl: u16, dwords: u32) -> GetLbaStatus {
    let action = ActionType::ALLOCATED;
    GetLbaStatus { nsid: 2, slba, mndw_z: dwords - 1, rl, action }
}

fn emit(get: GetLbaStatus) -> Sqe {
    get.emit(keyed((get.len_bytes() as u32).min(1 << 20)))
}

#[track_caller]
fn query(sqe: Sqe) -> LbaStatusQuery {
    let Ok(Plan::LbaStatus(query)) = ask(sqe, &mut nvm()) else { panic!() };
    *query
}

#[test]
fn lba_status_of_a_range_is_searched_up_to_the_end_of_the_namespace() {
    let range = |get| {
        let ExtentSearch { at, end, block_size_bytes, most } = query(emit(get)).search;
        (at / 512, end / 512, block_size_bytes, most)
    };
    assert_eq!(range(get(0, 0, 1024)), (0, 1 << 20, 512, 255));
    assert_eq!(range(get(7, 0, 6)), (7, 1 << 20, 512, 1));
    assert_eq!(range(get(7, 8, 5)), (7, 15, 512, 0));
    assert_eq!(range(get((1 << 20) - 1, 1, 1)), ((1 << 20) - 1, 1 << 20, 512, 0));
    assert_eq!(range(get(0, 0xFFFF, MDTS / 4)), (0, 0xFFFF, 512, DESCRIPTORS_MAX));
}

#[test]
fn invalid_fields_of_get_lba_status_are_refused() {
    let valid = get(0, 0, 1024);
    let action = |action| emit(GetLbaStatus { action: ActionType(action), ..valid });
    let table = [
        ("all namespaces", emit(valid).with_nsid(NSID_ALL), 0x00B),
        ("no namespace", emit(valid).with_nsid(0), 0x00B),
        ("unknown namespace", emit(valid).with_nsid(3), 0x00B),
        ("no action type", action(0), 0x002),
        ("a scan for unreadable blocks", action(0x10), 0x002),
        ("tracked unreadable blocks", action(0x11), 0x002),
        ("begins at the end", emit(get(1 << 20, 0, 1024)), 0x080),
        ("begins behind the end", emit(get(u64::MAX, 0, 1024)), 0x080),
        ("ends behind the end", emit(get((1 << 20) - 1, 2, 1024)), 0x080),
        ("overflows", emit(get(u64::MAX, 0xFFFF, 1024)), 0x080),
        ("buffer too short", valid.emit(keyed(4092)), 0x00F),
        ("no buffer", valid.emit(Sgl::NONE), 0x00F),
        ("in the capsule", valid.emit(Sgl::in_capsule(0, 4096)), 0x002),
        ("more than MDTS", get(0, 0, MDTS / 4 + 1).emit(keyed(MDTS + 4)), 0x002),
        ("16 GiB", GetLbaStatus { mndw_z: u32::MAX, ..valid }.emit(keyed(0xFF_FFFF)), 0x002),
    ];
    for (what, sqe, code) in table {
        assert_eq!(refused(ask(sqe, &mut nvm())), code, "{what}");
    }
    assert_eq!(refused(ask(emit(valid), &mut discovery_controller())), 0x001);
}

#[test]
fn lba_status_is_not_returned_where_blocks_cannot_be_read() {
    let mut controller = nvm();
    let states = AnaStates::all(AnaState::INACCESSIBLE);
    controller.association.reach.set(&states);
    let status = ask(emit(get(0, 0, 1024)), &mut controller).unwrap_err();
    assert!(status.is(Status::ANA_INACCESSIBLE) && !status.dnr(), "{status}");

    let mut subsystem = crate::subsystem::testing::sample();
    subsystem.namespaces[1].formatting = Some(Arc::new(Progress::none()));
    subsystem.namespaces[0].health.set_down();
    let mut controller = nvm();
    controller.replace_subsystem(Arc::new(subsystem));
    let mut status =
        |nsid| ask(emit(get(0, 0, 1024)).with_nsid(nsid), &mut controller).unwrap_err();
    assert!(status(2).is(Status::FORMAT_IN_PROGRESS));
    assert!(status(1).is(Status::NAMESPACE_NOT_READY));
}

#[test]
fn unreadable_blocks_are_reported_as_allocated() {
    let subsystem = crate::subsystem::testing::sample();
    let marks = Arc::clone(&subsystem.namespaces[1].marks);
    let mut controller = nvm();
    controller.replace_subsystem(Arc::new(subsystem));
    let mut reports_all = |slba, rl| match ask(emit(get(slba, rl, 1024)), &mut controller) {
        Ok(Plan::LbaStatus(query)) => query.reports_all,
        other => panic!("{other:?}"),
    };
    assert!(!reports_all(0, 0));
    marks.change(&Change::Mark { at: 8 * 512, len: 512, most_bytes: 1 << 20 }).unwrap();
    assert!(reports_all(0, 0) && reports_all(8, 1));
    assert!(!reports_all(0, 8) && !reports_all(9, 0));
}

/// Number of descriptors, completion condition, and first block and number of blocks of each.
fn read(page: &[u8]) -> (u32, CompletionCondition, Vec<(u64, u64)>) {
    let header = LbaStatusHeader::parse(page.first_chunk().unwrap());
    let entries = LbaStatusDescriptor::parse_all(page).inspect(|it| assert_eq!(it.status, 2));
    (header.nlsd, header.cmpc, entries.map(|it| (it.dslba, it.blocks())).collect())
}

fn found(extents: &[(u64, u64)], has_more: bool) -> AllocatedExtents {
    let extents = extents.iter().map(|(at, end)| (at * 512, end * 512)).collect();
    AllocatedExtents { extents, has_more }
}

#[test]
fn the_completion_condition_reports_further_descriptors() {
    use CompletionCondition as Cmpc;
    let query = query(emit(get(0, 0, 2 + 4 * 2)));
    let list = |extents: &[(u64, u64)], has_more| read(&list(&found(extents, has_more), &query));
    assert_eq!(list(&[], false), (0, Cmpc::COMPLETE, vec![]));
    assert_eq!(list(&[(0, 8)], false), (1, Cmpc::COMPLETE, vec![(0, 8)]));
    let two = [(0, 8), (16, 17)];
    assert_eq!(list(&two, false), (2, Cmpc::COMPLETE, vec![(0, 8), (16, 1)]));
    assert_eq!(list(&two, true), (2, Cmpc::INCOMPLETE, vec![(0, 8), (16, 1)]));
    // A descriptor has at most 2^32 blocks.
    let huge = 3 << 32;
    let blocks = 1 << 32;
    let parts = vec![(5, blocks), (5 + blocks, blocks)];
    assert_eq!(list(&[(5, 5 + huge)], false), (2, Cmpc::INCOMPLETE, parts));
}

#[test]
fn all_blocks_are_reported_where_no_worker_has_searched() {
    let sqe = emit(get(16, 0, 1024));
    let mut controller = nvm();
    let Ok(Plan::LbaStatus(query)) = ask(sqe, &mut controller) else { panic!() };
    let page = given(respond(&sqe, &query, &controller));
    assert_eq!(page.len(), 4096, "followed by zeros");
    assert_eq!(read(&page).2, [(16, (1 << 20) - 16)]);
}

#[test]
fn blocks_of_another_namespace_are_not_reported_in_the_response() {
    let sqe = emit(get(0, 0, 1024));
    let mut controller = nvm();
    let Ok(Plan::LbaStatus(query)) = ask(sqe, &mut controller) else { panic!() };
    let mut subsystem = crate::subsystem::testing::sample();
    subsystem.namespaces[1].backing.0 += 77;
    controller.replace_subsystem(Arc::new(subsystem));
    let status = respond(&sqe, &query, &controller).unwrap_err();
    assert!(status.is(Status::COMMAND_INTERRUPTED) && !status.dnr());
}
