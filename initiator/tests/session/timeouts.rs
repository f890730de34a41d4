//! Timeouts: commands, keep alive, bring-up and shutdown end in time.

use super::*;

#[test]
fn commands_that_hang_end_the_association() {
    let mut lab = Lab::ready();
    lab.pass(Duration::from_secs(7));
    lab.request(2, read(1), 4096, 1);
    lab.pass(Duration::from_secs(29));
    assert_eq!(lab.session.phase(), Phase::Ready);
    lab.pass(Duration::from_secs(1));
    let ended = lab.session.ended().expect("ended").to_string();
    assert_eq!(ended, "no answer to Read on I/O queue 2 within 30s");
    assert_eq!(lab.done().expect("done").outcome, Err(Lost));
    lab.expect_whole();
}

#[test]
fn short_command_timeouts_are_checked_in_time() {
    let limit = Duration::from_millis(300);
    let mut lab = Lab::new(Options { command_timeout: limit, ..options() }, controller());
    lab.start();
    let next = |lab: &mut Lab| lab.with(|session, io| session.tick(io)).expect("a deadline");
    lab.request(1, read(1), 4096, 1);
    assert_eq!(next(&mut lab), lab.now + limit);
    // The first is answered; the second hangs.
    lab.now += Duration::from_millis(200);
    lab.request(1, read(1), 4096, 2);
    let late = lab.now + limit;
    let cid = lab.capsule(1).0.cid;
    lab.wire.answer(1, cid, Status::SUCCESS, 0);
    lab.deliver();
    lab.now += Duration::from_millis(100);
    assert_eq!(next(&mut lab), late);
    lab.now = late;
    lab.deliver();
    assert!(matches!(lab.session.ended(), Some(EndReason::Timeout { queue: 1, .. })));
    lab.wire.capsules.clear();
    lab.expect_whole();
}

#[test]
fn keep_alive_is_sent_and_must_be_answered() {
    let mut lab = Lab::ready();
    for _ in 0..10 {
        lab.pass(Duration::from_secs(5));
    }
    assert_eq!(lab.target.kept_alive, 10);
    // From now on the target sends nothing.
    lab.now += Duration::from_secs(5);
    lab.deliver();
    lab.now += Duration::from_secs(5);
    lab.deliver();
    assert_eq!(lab.session.phase(), Phase::Ready);
    assert_eq!(lab.wire.capsules.len(), 1, "it is not asked again before it has answered");
    lab.now += Duration::from_secs(5);
    lab.deliver();
    let ended = lab.session.ended().expect("ended").to_string();
    assert_eq!(ended, "no answer to Keep Alive on the admin queue within 10s");
    lab.wire.capsules.clear();
    lab.expect_whole();
}

#[test]
fn traffic_replaces_keep_alive_if_the_controller_supports_it() {
    let mut target = controller();
    target.page.ctratt = Ctratt(0).with_tbkas(true);
    let mut lab = Lab::new(options(), target);
    lab.start();
    for round in 0..40 {
        lab.request(1, read(1), 4096, round);
        let cid = lab.capsule(1).0.cid;
        lab.wire.answer(1, cid, Status::SUCCESS, 0);
        lab.pass(Duration::from_millis(2500));
        lab.done().expect("done");
    }
    assert_eq!(lab.target.kept_alive, 0);
    // Without traffic the gap stays below the timeout of 10 s.
    lab.pass(Duration::from_millis(2500));
    assert_eq!(lab.target.kept_alive, 1);
    lab.with(|session, io| session.abort(io));
    lab.expect_whole();
}

#[test]
fn connects_to_a_silent_target_time_out() {
    let mut lab = Lab::new(options(), controller());
    lab.wire.silent = true;
    lab.start();
    lab.pass(Duration::from_secs(29));
    assert_eq!(lab.session.phase(), Phase::Starting);
    lab.pass(Duration::from_secs(1));
    assert!(matches!(lab.session.ended(), Some(EndReason::Unreachable { .. })));
    lab.expect_whole();

    // Or in the middle: commands are not answered.
    let mut lab = Lab::new(options(), controller());
    lab.with(|session, io| session.start(io));
    lab.deliver();
    lab.now += Duration::from_secs(30);
    lab.deliver();
    let ended = lab.session.ended().expect("ended").to_string();
    assert_eq!(ended, "no answer to Connect on the admin queue within 30s");
    lab.wire.capsules.clear();
    lab.expect_whole();
}

#[test]
fn an_unanswered_shutdown_times_out() {
    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    lab.with(|session, io| session.close(io));
    lab.deliver();
    assert_eq!(lab.session.phase(), Phase::Closing);
    // A late answer to a command that was given up is no lie.
    lab.wire.answer(0, 0x1003, Status::SUCCESS, 0);
    lab.deliver();
    assert_eq!(lab.session.phase(), Phase::Closing);
    lab.now += Duration::from_secs(5);
    lab.deliver();
    lab.deliver();
    assert_eq!(lab.session.phase(), Phase::Ended);
    assert_eq!(lab.session.ended(), Some(&EndReason::Closed));
    lab.wire.capsules.clear();
    lab.expect_whole();
}
