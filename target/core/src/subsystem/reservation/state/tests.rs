use nvme::Sgl;
use proptest::prelude::*;

use crate::subsystem::reservation::state::*;

const A: HostId = [0xA; 16];
const B: HostId = [0xB; 16];
const C: HostId = [0xC; 16];
const KEY_A: u64 = 0xA1;
const KEY_B: u64 = 0xB1;

const RELEASED: NotificationType = NotificationType::RESERVATION_RELEASED;
const PREEMPTED: NotificationType = NotificationType::RESERVATION_PREEMPTED;
const UNREGISTERED: NotificationType = NotificationType::REGISTRATION_PREEMPTED;

fn register(action: RegisterAction, current: u64, new: u64) -> Order {
    Order::Register(Register(0).with_action(action), RegisterKeys { current, new })
}

/// With a wrong current key, which is ignored.
fn blind(action: RegisterAction, new: u64) -> Order {
    let how = Register(0).with_action(action).with_ignore_key(true);
    Order::Register(how, RegisterKeys { current: 7, new })
}

fn acquire(action: AcquireAction, rtype: ReservationType, current: u64, preempt: u64) -> Order {
    let how = Acquire(0).with_action(action).with_rtype(rtype);
    Order::Acquire(how, AcquireKeys { current, preempt })
}

fn release(action: ReleaseAction, rtype: ReservationType, current: u64) -> Order {
    Order::Release(Release(0).with_action(action).with_rtype(rtype), ReleaseKey { current })
}

/// A and B are registered.
fn two() -> State {
    let mut state = State::default();
    state.apply(&A, &register(RegisterAction::REGISTER, 0, KEY_A), true).unwrap();
    state.apply(&B, &register(RegisterAction::REGISTER, 0, KEY_B), true).unwrap();
    state
}

/// A and B are registered, and A has acquired a reservation.
fn held(rtype: ReservationType) -> State {
    let mut state = two();
    state.apply(&A, &acquire(AcquireAction::ACQUIRE, rtype, KEY_A, 0), true).unwrap();
    state
}

/// The status code of a refused request, which changes nothing; all of ours have Do Not Retry.
#[track_caller]
fn refused(state: &State, host: &HostId, order: &Order) -> u16 {
    let mut after = state.clone();
    let status = after.apply(host, order, true).expect_err("refused");
    assert_eq!(after, *state, "a refused order changes nothing");
    assert!(status.dnr());
    status.code()
}

#[track_caller]
fn done(state: &mut State, host: &HostId, order: &Order) -> Effect {
    state.apply(host, order, true).expect("done")
}

#[test]
fn access_rights_match_the_reservation_table_of_the_specification() {
    // "Command Behavior in the Presence of a Reservation": read and write command group, of the
    // holder, of another registrant, of a host that is not registered.
    let table = [
        (ReservationType::NONE, ["rw", "rw", "rw"]),
        (ReservationType::WRITE_EXCLUSIVE, ["rw", "r-", "r-"]),
        (ReservationType::EXCLUSIVE_ACCESS, ["rw", "--", "--"]),
        (ReservationType::WRITE_EXCLUSIVE_REGISTRANTS, ["rw", "rw", "r-"]),
        (ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS, ["rw", "rw", "--"]),
        (ReservationType::WRITE_EXCLUSIVE_ALL, ["rw", "rw", "r-"]),
        (ReservationType::EXCLUSIVE_ACCESS_ALL, ["rw", "rw", "--"]),
    ];
    for (rtype, rights) in table {
        let state = if rtype == ReservationType::NONE { two() } else { held(rtype) };
        let found = [A, B, C].map(|host| {
            let barred = state.barred(&host);
            let sign = |group, sign| if barred.has(group) { "-" } else { sign };
            format!("{}{}", sign(Barred::READ, "r"), sign(Barred::WRITE, "w"))
        });
        assert_eq!(found, rights, "{rtype}");
    }
}

#[test]
fn hosts_register_replace_and_unregister_keys() {
    let mut state = State::default();
    assert_eq!(refused(&state, &A, &register(RegisterAction::REGISTER, 0, 0)), 0x002);
    done(&mut state, &A, &register(RegisterAction::REGISTER, 99, KEY_A));
    assert_eq!((state.generation, state.registrants.get(&A)), (1, Some(&KEY_A)));
    done(&mut state, &A, &register(RegisterAction::REGISTER, 0, KEY_A));
    assert_eq!(state.generation, 2, "the same key again is a success");
    assert_eq!(refused(&state, &A, &register(RegisterAction::REGISTER, KEY_A, 7)), 0x083);
    for action in [RegisterAction::REPLACE, RegisterAction::UNREGISTER] {
        assert_eq!(refused(&state, &A, &register(action, 7, 8)), 0x083, "wrong key");
        assert_eq!(refused(&state, &B, &register(action, 0, 8)), 0x083, "not registered");
        done(&mut state.clone(), &A, &blind(action, 8));
    }
    let order = blind(RegisterAction::UNREGISTER, 0);
    assert_eq!(refused(&state, &B, &order), 0x083, "not registered, key ignored");
    done(&mut state, &A, &register(RegisterAction::REPLACE, KEY_A, 8));
    assert_eq!((state.generation, state.registrants.get(&A)), (3, Some(&8)));
    done(&mut state, &A, &register(RegisterAction::UNREGISTER, 8, 0));
    assert_eq!((state.generation, state.registrants.len()), (4, 0));
    for action in 3..8 {
        assert_eq!(refused(&state, &A, &register(RegisterAction(action), 0, 1)), 0x002);
    }
    let nameless = register(RegisterAction::REGISTER, 0, 1);
    assert_eq!(refused(&state, &[0; 16], &nameless), 0x015);
}

#[test]
fn replace_with_ignore_existing_key_needs_no_registration() {
    let mut state = two();
    done(&mut state, &C, &blind(RegisterAction::REPLACE, 0xC1));
    assert_eq!((state.generation, state.registrants.get(&C)), (3, Some(&0xC1)));
    done(&mut state, &C, &blind(RegisterAction::REPLACE, 0xC2));
    assert_eq!((state.generation, state.registrants.get(&C)), (4, Some(&0xC2)));
    let host = |n: u128| n.to_be_bytes();
    for n in 4..=REGISTRANTS_MAX as u128 {
        done(&mut state, &host(n), &blind(RegisterAction::REPLACE, 1));
    }
    assert_eq!(refused(&state, &host(9999), &blind(RegisterAction::REPLACE, 1)), 0x006);
}

#[test]
fn replacing_a_key_by_0_unregisters() {
    let mut state = held(ReservationType::WRITE_EXCLUSIVE_REGISTRANTS);
    let order = register(RegisterAction::REPLACE, KEY_A, 0);
    assert_eq!(refused(&state, &B, &order), 0x083, "wrong key");
    assert_eq!(refused(&state, &C, &blind(RegisterAction::REPLACE, 0)), 0x083, "not registered");
    let effect = done(&mut state, &A, &order);
    assert_eq!((state.rtype, state.registrants.len()), (ReservationType::NONE, 1));
    assert_eq!(effect.notices, [(B, RELEASED)]);
}

#[test]
fn persistence_is_changed_by_register_and_by_the_feature() {
    let with = |change| {
        let how = Register(0).with_persistence(ChangePersistence(change));
        Order::Register(how, RegisterKeys { current: 0, new: KEY_A })
    };
    let mut state = State::default();
    assert_eq!(refused(&state, &A, &with(1)), 0x002);
    for (change, persists) in [(0, false), (3, true), (0, true), (2, false)] {
        done(&mut state, &A, &with(change));
        assert_eq!(state.persists, persists, "CPTPL {change}");
    }
    let before = state.clone();
    assert!(state.apply(&A, &with(3), false).unwrap_err().is(Status::INVALID_FIELD));
    let feature = state.apply(&A, &Order::Persist(true), false).unwrap_err();
    assert!(feature.is(Status::FEATURE_NOT_CHANGEABLE));
    assert_eq!(state, before, "without a place to keep it nothing persists");
    done(&mut state, &C, &Order::Persist(true));
    assert!(state.persists);
    done(&mut state, &C, &Order::Persist(false));
    assert!(!state.persists);
}

#[test]
fn registrants_can_acquire_every_reservation_type() {
    for rtype in ReservationType::ALL {
        let ask = |current| acquire(AcquireAction::ACQUIRE, rtype, current, 0);
        let mut state = two();
        assert_eq!(refused(&state, &C, &ask(KEY_A)), 0x083, "not registered");
        assert_eq!(refused(&state, &A, &ask(KEY_B)), 0x083, "wrong key");
        assert_eq!(done(&mut state, &A, &ask(KEY_A)), Effect::default());
        assert_eq!((state.rtype, state.generation), (rtype, 2));
        let again = state.clone();
        done(&mut state, &A, &ask(KEY_A));
        assert_eq!(state, again, "the same type again is a success");
        for other in ReservationType::ALL.into_iter().filter(|other| *other != rtype) {
            let order = acquire(AcquireAction::ACQUIRE, other, KEY_A, 0);
            assert_eq!(refused(&state, &A, &order), 0x083, "another type");
        }
        // All registrants hold it: also for B it is the same again.
        match rtype.is_held_by_all() {
            true => drop(done(&mut state, &B, &ask(KEY_B))),
            false => assert_eq!(refused(&state, &B, &ask(KEY_B)), 0x083),
        }
    }
    let wrong =
        [0, 7, 255].map(|code| acquire(AcquireAction::ACQUIRE, ReservationType(code), KEY_A, 0));
    for order in wrong {
        assert_eq!(refused(&two(), &A, &order), 0x002, "{order:?}");
    }
    let blind = Acquire(0x0100).with_ignore_key(true);
    let blind = Order::Acquire(blind, AcquireKeys { current: KEY_A, preempt: 0 });
    assert_eq!(refused(&two(), &A, &blind), 0x002, "the key is never ignored");
    for action in 3..8 {
        let order = acquire(AcquireAction(action), ReservationType::WRITE_EXCLUSIVE, KEY_A, 0);
        assert_eq!(refused(&two(), &A, &order), 0x002);
    }
}

#[test]
fn preempting_a_holder_takes_the_reservation_over() {
    for (old, new) in
        ReservationType::ALL.iter().flat_map(|o| ReservationType::ALL.map(|n| (*o, n)))
    {
        let mut state = held(old);
        done(&mut state, &C, &register(RegisterAction::REGISTER, 0, 0xC1));
        // From one holder by its key, from all registrants by the key 0.
        let key = if old.is_held_by_all() { 0 } else { KEY_A };
        let order = acquire(AcquireAction::PREEMPT, new, KEY_B, key);
        let generation = state.generation;
        let effect = done(&mut state, &B, &order);
        assert_eq!((state.rtype, state.generation), (new, generation + 1));
        assert!(state.holds(&B) && !state.registrants.contains_key(&A));
        let mut expected = vec![(A, UNREGISTERED)];
        match old.is_held_by_all() {
            true => expected.push((C, UNREGISTERED)),
            false if old != new => expected.push((C, RELEASED)),
            false => {}
        }
        assert_eq!(effect.notices, expected, "{old} to {new}");
        assert!(effect.aborted.is_empty(), "only Preempt and Abort aborts");
    }
}

#[test]
fn preempting_a_registrant_leaves_the_reservation() {
    for rtype in ReservationType::ALL {
        let mut state = held(rtype);
        let order = acquire(
            AcquireAction::PREEMPT_AND_ABORT,
            ReservationType::EXCLUSIVE_ACCESS,
            KEY_A,
            KEY_B,
        );
        let effect = done(&mut state, &A, &order);
        assert_eq!((state.rtype, state.holds(&A), state.registrants.len()), (rtype, true, 1));
        assert_eq!(effect, Effect { notices: vec![(B, UNREGISTERED)], aborted: vec![B] });
        let order = acquire(AcquireAction::PREEMPT, rtype, KEY_A, 0x77);
        assert_eq!(refused(&state, &A, &order), 0x083, "nobody has that key");
    }
}

#[test]
fn preempting_without_a_reservation_unregisters() {
    let mut state = two();
    let preempt =
        |key| acquire(AcquireAction::PREEMPT, ReservationType::WRITE_EXCLUSIVE, KEY_A, key);
    assert_eq!(refused(&state, &A, &preempt(0)), 0x083);
    assert_eq!(done(&mut state, &A, &preempt(KEY_B)).notices, [(B, UNREGISTERED)]);
    assert_eq!((state.rtype, state.registrants.len()), (ReservationType::NONE, 1));
    // One's own key: no notification.
    assert_eq!(done(&mut state, &A, &preempt(KEY_A)), Effect::default());
    assert!(state.registrants.is_empty());
}

#[test]
fn preemption_handles_zero_own_and_shared_keys() {
    let shared = ReservationType::WRITE_EXCLUSIVE;
    let preempt = |rtype, key| acquire(AcquireAction::PREEMPT, rtype, KEY_A, key);
    assert_eq!(refused(&held(shared), &A, &preempt(shared, 0)), 0x002, "0 is for all registrants");
    // The holder preempts itself: the type changes, all registrants stay.
    let mut state = held(shared);
    let effect = done(&mut state, &A, &preempt(ReservationType::EXCLUSIVE_ACCESS, KEY_A));
    assert_eq!((state.rtype, state.registrants.len()), (ReservationType::EXCLUSIVE_ACCESS, 2));
    assert_eq!(effect.notices, [(B, RELEASED)]);
    // Several hosts with one key are unregistered together, except the preempting one.
    let mut state = held(shared);
    done(&mut state, &C, &register(RegisterAction::REGISTER, 0, KEY_A));
    let order = acquire(AcquireAction::PREEMPT, shared, KEY_A, KEY_A);
    assert_eq!(done(&mut state, &C, &order).notices, [(A, UNREGISTERED)]);
    assert!(state.holds(&C) && state.registrants.len() == 2);
    // All registrants, and the last one unregisters itself: no registrant is left to hold it.
    let mut state = held(ReservationType::WRITE_EXCLUSIVE_ALL);
    done(&mut state, &B, &register(RegisterAction::UNREGISTER, KEY_B, 0));
    done(&mut state, &A, &preempt(shared, KEY_A));
    assert_eq!(state.rtype, ReservationType::NONE);
}

#[test]
fn a_release_requires_the_key_and_type_of_the_reservation() {
    for rtype in ReservationType::ALL {
        let mut state = held(rtype);
        let ask = |current| release(ReleaseAction::RELEASE, rtype, current);
        assert_eq!(refused(&state, &C, &ask(0)), 0x083, "not registered");
        assert_eq!(refused(&state, &A, &ask(KEY_B)), 0x083, "wrong key");
        let another = ReservationType(rtype.0 % 6 + 1);
        let order = release(ReleaseAction::RELEASE, another, KEY_A);
        assert_eq!(refused(&state, &A, &order), 0x002, "another type");
        if !rtype.is_held_by_all() {
            let before = state.clone();
            assert_eq!(done(&mut state, &B, &ask(KEY_B)), Effect::default());
            assert_eq!(state, before, "who holds nothing releases nothing");
        }
        let generation = state.generation;
        let effect = done(&mut state, &A, &ask(KEY_A));
        assert_eq!((state.rtype, state.holder), (ReservationType::NONE, None));
        assert_eq!((state.registrants.len(), state.generation), (2, generation));
        let told = if rtype.admits_registrants() { vec![(B, RELEASED)] } else { vec![] };
        assert_eq!(effect.notices, told, "{rtype}");
        assert_eq!(done(&mut state, &A, &ask(KEY_A)), Effect::default(), "nothing to release");
    }
    let blind =
        Order::Release(Release(0x0100).with_ignore_key(true), ReleaseKey { current: KEY_A });
    assert_eq!(refused(&two(), &A, &blind), 0x002);
    for action in 2..8 {
        let order = release(ReleaseAction(action), ReservationType::WRITE_EXCLUSIVE, KEY_A);
        assert_eq!(refused(&two(), &A, &order), 0x002);
    }
}

#[test]
fn unregistering_a_holder_releases() {
    for rtype in ReservationType::ALL {
        let mut state = held(rtype);
        let effect = done(&mut state, &A, &register(RegisterAction::UNREGISTER, KEY_A, 0));
        let (left, told) = match rtype {
            ReservationType::WRITE_EXCLUSIVE_ALL | ReservationType::EXCLUSIVE_ACCESS_ALL => {
                (rtype, vec![])
            }
            ReservationType::WRITE_EXCLUSIVE | ReservationType::EXCLUSIVE_ACCESS => {
                (ReservationType::NONE, vec![])
            }
            _ => (ReservationType::NONE, vec![(B, RELEASED)]),
        };
        assert_eq!((state.rtype, effect.notices), (left, told), "{rtype}");
        let mut state = held(rtype);
        done(&mut state, &B, &register(RegisterAction::UNREGISTER, KEY_B, 0));
        assert_eq!(state.rtype, rtype, "A still holds it");
        done(&mut state, &A, &register(RegisterAction::UNREGISTER, KEY_A, 0));
        assert_eq!(state.rtype, ReservationType::NONE);
    }
}

#[test]
fn clear_removes_the_reservation_and_all_registrations() {
    for mut state in ReservationType::ALL.map(held).into_iter().chain([two()]) {
        let generation = state.generation;
        let order = release(ReleaseAction::CLEAR, ReservationType::NONE, KEY_B);
        assert_eq!(refused(&state, &C, &order), 0x083);
        assert_eq!(done(&mut state, &B, &order).notices, [(A, PREEMPTED)]);
        assert_eq!(state, State { generation: generation + 1, ..State::default() });
    }
}

#[test]
fn the_report_lists_the_maximum_number_of_registrants() {
    let mut state = State::default();
    let host = |n: u128| n.to_be_bytes();
    for n in 1..=REGISTRANTS_MAX as u128 {
        done(&mut state, &host(n), &register(RegisterAction::REGISTER, 0, n as u64));
    }
    let order = register(RegisterAction::REGISTER, 0, 1);
    assert_eq!(refused(&state, &host(9999), &order), 0x006, "there is an end");
    let take = acquire(AcquireAction::ACQUIRE, ReservationType::EXCLUSIVE_ACCESS, 2, 0);
    done(&mut state, &host(2), &take);
    let report = state.report();
    assert_eq!(report.len(), 64 + 64 * REGISTRANTS_MAX);
    let begin = ReservationStatus::parse(report.first_chunk().unwrap());
    assert_eq!((begin.generation, begin.registrants), (1024, 1024));
    assert_eq!((begin.rtype, begin.ptpls), (ReservationType::EXCLUSIVE_ACCESS, 0));
    let (entries, _) = report[EXTENDED_STATUS_BYTES..].as_chunks();
    for (n, entry) in (1..).zip(entries.iter().map(ExtendedRegistrant::parse)) {
        assert_eq!((entry.hostid, entry.key, entry.cntlid), (host(n), n as u64, 0xFFFF));
        assert_eq!(entry.rcsts, u8::from(n == 2));
    }
    let all = held(ReservationType::WRITE_EXCLUSIVE_ALL).report();
    assert_eq!((all[64 + 2], all[128 + 2]), (1, 1), "everybody holds it");
}

#[test]
fn reservation_commands_are_parsed_with_their_data() {
    let data: Vec<u8> = (0..16).collect();
    let new = u64::from_le_bytes([8, 9, 10, 11, 12, 13, 14, 15]);
    let current = u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7]);
    let how = Register(2);
    let order = Order::Register(how, RegisterKeys { current, new });
    assert_eq!(Order::parse(&how.emit(1, Sgl::NONE), &data), Ok(order));
    let how = Acquire(0x0301);
    let order = Order::Acquire(how, AcquireKeys { current, preempt: new });
    assert_eq!(Order::parse(&how.emit(1, Sgl::NONE), &data), Ok(order));
    let how = Release(0x0300);
    let order = Order::Release(how, ReleaseKey { current });
    assert_eq!(Order::parse(&how.emit(1, Sgl::NONE), &data), Ok(order));
    for sqe in [Register(0).emit(1, Sgl::NONE), Acquire(0).emit(1, Sgl::NONE)] {
        assert!(Order::parse(&sqe, &data[..15]).unwrap_err().is(Status::DATA_SGL_LENGTH_INVALID));
    }
    assert!(Order::parse(&Sqe::io(IoOpcode::READ, 1), &data).is_err());
}

fn any_order() -> impl Strategy<Value = Order> {
    // Few keys, types and actions, so that they meet.
    let (key, bits) = (0u64..4, 0u32..16);
    let cdw10 = (bits, 0u32..8, 0u32..4).prop_map(|(low, rtype, top)| low | rtype << 8 | top << 30);
    (0..4, cdw10, key.clone(), key).prop_map(|(which, cdw10, current, other)| match which {
        0 => Order::Register(Register(cdw10), RegisterKeys { current, new: other }),
        1 => Order::Acquire(Acquire(cdw10), AcquireKeys { current, preempt: other }),
        2 => Order::Release(Release(cdw10), ReleaseKey { current }),
        _ => Order::Persist(cdw10 & 1 == 1),
    })
}

proptest! {
    #[test]
    fn no_command_sequence_leaves_an_invalid_reservation_state(
        orders in proptest::collection::vec((0u8..5, any_order()), 0..60),
    ) {
        let mut state = State::default();
        for (host, order) in orders {
            let before = state.clone();
            match state.apply(&[host; 16], &order, true) {
                Ok(effect) => {
                    let own = |(id, _): &(HostId, NotificationType)| *id == [host; 16];
                    prop_assert!(!effect.notices.iter().any(own), "nobody is told what it did");
                    let was = |id: &HostId| before.registrants.contains_key(id);
                    prop_assert!(effect.notices.iter().all(|(id, _)| was(id)));
                    let gone = |id: &HostId| was(id) && !state.registrants.contains_key(id);
                    prop_assert!(effect.aborted.iter().all(gone));
                }
                Err(_) => prop_assert_eq!(&state, &before),
            }
            prop_assert!(state.registrants.values().all(|key| *key != 0));
            match state.holder {
                Some(holder) => {
                    prop_assert!(state.registrants.contains_key(&holder));
                    prop_assert!(state.rtype.is_known() && !state.rtype.is_held_by_all());
                }
                None if state.rtype == ReservationType::NONE => {}
                None => {
                    prop_assert!(state.rtype.is_held_by_all() && !state.registrants.is_empty());
                }
            }
            // A host that may not read may not write.
            let barred = state.barred(&[9; 16]);
            prop_assert!(!barred.has(Barred::READ) || barred.has(Barred::WRITE));
        }
    }
}
