use crate::sim::oracle::blocks::Value;
use crate::sim::oracle::ns_management::*;

const CREATE: NsCommand = NsCommand::Create { blocks: 4, shift: 12, private: false };
const PLACE: Place = Place { nsid: 3, birth: 1, lba: 0, block_bytes: 4096 };

fn made() -> NsManagementOracle {
    let mut profile = Profile::new(1, 100);
    (profile.hosts, profile.managing, profile.twins) = (2, 100, false);
    (profile.disk.error, profile.disk.sync_error) = (0, 0);
    NsManagementOracle::new(&profile)
}

fn outcome(status: Status, result: u32) -> Outcome<'static> {
    Outcome { status, result, data: &[], excused: false }
}

/// A command is sent and answered immediately.
fn answer(
    made: &mut NsManagementOracle,
    op: u32,
    deed: NsCommand,
    status: Status,
    result: u32,
) -> bool {
    let now = Moment::from(op) * 10;
    made.leaves(op, deed, 0, now);
    made.answered(op, deed, outcome(status, result), now + 1).is_ok()
}

fn done(made: &mut NsManagementOracle, op: u32, deed: NsCommand, result: u32) -> bool {
    answer(made, op, deed, Status::SUCCESS, result)
}

fn found(made: &mut NsManagementOracle, op: u32, value: Value) -> bool {
    let now = Moment::from(op) * 10;
    let mut data = [0; 4096];
    if let Value::Write(write) = value {
        block_stamp::fill(write, 3, 0, &mut data);
    }
    made.leaves(op, NsCommand::Get(PLACE), 0, now);
    let outcome = Outcome { data: &data, ..outcome(Status::SUCCESS, 0) };
    made.answered(op, NsCommand::Get(PLACE), outcome, now + 1).is_ok()
}

fn listed(made: &mut NsManagementOracle, op: u32, nsids: &[u32]) -> bool {
    let mut page = [0; 4096];
    let all: BTreeSet<u32> = DECLARED.iter().chain(nsids).copied().collect();
    nvme::identify::emit_namespaces(&mut page, 0, all);
    made.leaves(op, NsCommand::List, 0, op.into());
    let outcome = Outcome { data: &page, ..outcome(Status::SUCCESS, 0) };
    made.answered(op, NsCommand::List, outcome, op.into()).is_ok()
}

const ATTACH: NsCommand = NsCommand::Attach { nsid: 3, cntlid: 1 };

#[test]
fn created_namespaces_survive_restarts_and_ids_are_unique() {
    let mut made = made();
    assert!(done(&mut made, 1, CREATE, 3));
    assert!(listed(&mut made, 2, &[3]) && !listed(&mut made, 3, &[]));
    made.crash(4);
    assert!(listed(&mut made, 5, &[3]), "also after a restart");
    assert!(!done(&mut made, 6, CREATE, 3));
}

#[test]
fn a_lost_command_is_undecided_until_the_list_is_read() {
    for there in [true, false] {
        let mut made = made();
        made.leaves(1, CREATE, 0, 10);
        made.crash(11);
        made.lost(1, CREATE);
        let seen: &[u32] = if there { &[3] } else { &[] };
        assert!(listed(&mut made, 2, seen));
        assert!(listed(&mut made, 3, seen));
        assert!(!listed(&mut made, 4, if there { &[] } else { &[3] }), "and it stays so");
    }
}

#[test]
fn error_statuses_must_match_quota_and_attachments() {
    let mut made = made();
    let large = NsCommand::Create { blocks: 20, shift: 12, private: true };
    assert!(done(&mut made, 1, large, 3));
    assert!(answer(&mut made, 2, CREATE, Status::SUCCESS, 4));
    assert!(answer(&mut made, 3, CREATE, Status::NAMESPACE_INSUFFICIENT_CAPACITY, 0));
    assert!(done(&mut made, 4, ATTACH, 0));
    assert!(answer(&mut made, 5, ATTACH, Status::NAMESPACE_ALREADY_ATTACHED, 0));
    made.leaves(6, ATTACH, 1, 60);
    assert!(made.answered(6, ATTACH, outcome(Status::NAMESPACE_IS_PRIVATE, 0), 61).is_ok());
    assert!(done(&mut made, 7, NsCommand::Delete { nsid: 3 }, 0));
    assert!(!answer(&mut made, 8, CREATE, Status::NAMESPACE_INSUFFICIENT_CAPACITY, 0), "free");
}

#[test]
fn new_namespaces_read_zeros_and_never_earlier_data() {
    let mut made = made();
    assert!(done(&mut made, 1, CREATE, 3));
    assert!(!done(&mut made, 2, NsCommand::Put(PLACE), 0), "it is attached to nobody");
    assert!(done(&mut made, 3, ATTACH, 0));
    assert!(found(&mut made, 4, Value::Zeros));
    assert!(done(&mut made, 5, NsCommand::Put(PLACE), 0));
    assert!(found(&mut made, 6, Value::Write(5)) && !found(&mut made, 7, Value::Zeros));
    assert!(done(&mut made, 8, NsCommand::Delete { nsid: 3 }, 0));
    assert!(!found(&mut made, 9, Value::Write(5)));
    assert!(done(&mut made, 10, CREATE, 3) && done(&mut made, 11, ATTACH, 0));
    assert!(found(&mut made, 12, Value::Zeros) && !found(&mut made, 13, Value::Write(5)));
}
