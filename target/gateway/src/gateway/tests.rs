use std::collections::BTreeMap;
use std::time::Duration;

use crate::record::{Applied, Front, GroupObject, Key, KeyedHosts, MemberRecord, Membership};
use crate::{
    Access, Action, Declaration, EndReason, Event, Gateway, Member, Operation, Outcome, Stage,
    Timing,
};

/// Gateways of a cluster that does everything at once.
#[derive(Default)]
struct Group {
    omap: BTreeMap<Key, String>,
    now: Duration,
    clients: u32,
    excluded: Vec<String>,
    ends: Vec<(String, EndReason)>,
    /// The gateway of slot 0 beats once more just before another one excludes it.
    beats_late: bool,
    /// Updates are done, and reported as failed.
    forgets: bool,
    /// No image is released.
    hangs: bool,
}

fn declared(digest: &str, groups: &[u32]) -> Declaration {
    let groups = groups.iter().copied().collect();
    Declaration { digest: digest.into(), groups, ..Declaration::default() }
}

fn gateway(slot: u8, name: &str, digest: &str) -> Gateway {
    let declared = declared(digest, &[1, 2]);
    let member = Member { slot, name: name.into(), declared, applied: None };
    Gateway::new(member, Timing::default(), Duration::ZERO)
}

impl Group {
    fn object(&self) -> GroupObject {
        let entries: Vec<_> = self.omap.iter().map(|(key, text)| (key.to_string(), text)).collect();
        GroupObject::parse(entries.iter().map(|(key, text)| (key.as_str(), text.as_str()))).unwrap()
    }

    fn execute(&mut self, operation: Operation) -> Outcome {
        match operation {
            Operation::Connect => {
                self.clients += 1;
                return Outcome::Client(format!("client{}", self.clients));
            }
            Operation::Read => return Outcome::Object(self.object()),
            Operation::Update(update) => {
                let excludes = update.sets.iter().any(|(_, text)| text.contains(" excluded "));
                if excludes && self.beats_late {
                    self.omap.insert(Key::Heartbeat(0), "1 999".to_owned());
                }
                let holds =
                    |(key, text): &(Key, Option<String>)| self.omap.get(key) == text.as_ref();
                if !update.compares.iter().all(holds) {
                    return Outcome::Conflict;
                }
                self.omap.extend(update.sets);
                if self.forgets {
                    return Outcome::Failed;
                }
            }
            Operation::Exclude(addresses) => self.excluded.extend(addresses),
            Operation::Acquire(..) | Operation::Release(_) => {}
        }
        Outcome::Done
    }

    fn event(&mut self, gateway: &mut Gateway, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in gateway.handle(self.now, event) {
                match action {
                    Action::Start(_, Operation::Release(_)) if self.hangs => {}
                    Action::Start(id, operation) => {
                        events.push(Event::Completed(id, self.execute(operation)));
                    }
                    Action::End(reason) => self.ends.push((gateway.member.name.clone(), reason)),
                    Action::Publish(..) | Action::DropClient(_) => {}
                }
            }
        }
    }

    /// Time passes for these gateways.
    fn pass(&mut self, seconds: u64, gateways: &mut [&mut Gateway]) {
        for _ in 0..seconds * 10 {
            self.now += Duration::from_millis(100);
            gateways.iter_mut().for_each(|gateway| self.event(gateway, Event::Tick));
        }
    }
}

fn serves(gateway: &Gateway) -> Vec<u32> {
    let optimized = gateway.groups.iter().filter(|(_, group)| {
        group.stage == Stage::Serving && group.published == Some(Access::Optimized)
    });
    optimized.map(|(id, _)| *id).collect()
}

#[test]
fn a_later_process_of_the_same_name_ends_the_earlier_one() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(0, "a", "d"));
    group.pass(1, &mut [&mut first]);
    assert_eq!(serves(&first), [1, 2]);
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(group.ends, [("a".to_owned(), EndReason::Superseded)]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]));
    assert!(group.excluded.contains(&"client1".to_owned()), "{:?}", group.excluded);
    assert_eq!(group.object().member(0).map(|member| member.incarnation), Some(2));
}

#[test]
fn a_slot_belongs_to_one_name() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(0, "b", "d"));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(group.ends, [("b".to_owned(), EndReason::SlotInUse("a".to_owned()))]);
    group.event(&mut first, Event::Leave);
    group.pass(1, &mut [&mut first]);
    let mut third = gateway(0, "b", "d");
    group.pass(1, &mut [&mut third]);
    assert_eq!(serves(&third), [1, 2], "it was left");
    assert_eq!(group.excluded, [""; 0], "in order");
}

#[test]
fn a_gateway_with_a_different_configuration_joins_no_live_member() {
    let (mut group, mut first, mut other) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "e"));
    group.pass(20, &mut [&mut first, &mut other]);
    assert_eq!(group.object().member(1), None);
    assert_eq!(other.differing().map(|member| member.name.as_str()), Some("a"));
    group.pass(20, &mut [&mut other]);
    assert_eq!(serves(&other), [1, 2], "the first one is dead");
    assert_eq!(group.excluded, ["client1", "client1"]);
}

#[test]
fn an_administrator_can_exclude_a_gateway_with_a_live_heartbeat() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(2, &mut [&mut first, &mut second]);
    group.event(&mut second, Event::Exclude(0));
    group.pass(2, &mut [&mut second]);
    assert_eq!(serves(&second), [1, 2]);
    assert!(group.excluded.contains(&"client1".to_owned()));
    let record = |object: &GroupObject| object.member(0).map(|it| (it.incarnation, it.membership));
    assert_eq!(record(&group.object()), Some((1, Membership::Excluded)));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(record(&group.object()), Some((2, Membership::Live)), "with another data client");
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]), "no hand-back");
}

#[test]
fn a_gateway_excluded_without_an_ana_group_may_own_one_later() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    group.event(&mut first, Event::Exclude(1));
    group.pass(2, &mut [&mut first, &mut second]);
    let incarnation = group.object().member(1).map(|member| member.incarnation);
    assert_eq!(incarnation, Some(2), "it was excluded, and has another data client");
    group.event(&mut first, Event::Move(1, 1));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![2], vec![1]));
    assert_eq!(group.excluded, [""; 0]);
}

#[test]
fn an_exclusion_does_not_hold_for_the_next_incarnation() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    group.event(&mut second, Event::Exclude(0));
    // Before the other one reads again.
    group.event(&mut first, Event::Changed);
    let member = group.object().member(0).map(|it| (it.incarnation, it.membership));
    assert_eq!(member, Some((2, Membership::Live)));
    group.pass(2, &mut [&mut first, &mut second]);
    group.event(&mut second, Event::Move(1, 0));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1], vec![2]));
    assert!(!group.excluded.contains(&"client3".to_owned()), "{:?}", group.excluded);
}

#[test]
fn a_leaving_gateway_releases_its_groups_without_a_timeout() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2]);
    group.event(&mut first, Event::Leave);
    assert_eq!(group.ends, [("a".to_owned(), EndReason::Left)]);
    group.event(&mut second, Event::Changed);
    assert_eq!(serves(&second), [1, 2]);
    assert_eq!(group.excluded, [""; 0]);
}

/// An operation of one of its images does not end.
#[test]
fn a_group_whose_images_are_not_released_in_time_is_taken_by_exclusion() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2]);
    group.hangs = true;
    group.event(&mut first, Event::Move(1, 1));
    group.pass(9, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![2], vec![]));
    group.pass(4, &mut [&mut first, &mut second]);
    let mut all = [serves(&first), serves(&second)].concat();
    all.sort_unstable();
    assert_eq!(all, [1, 2]);
    assert!(group.excluded.contains(&"client1".to_owned()), "{:?}", group.excluded);
    assert_eq!(group.ends, []);
}

/// The gateway learns that it has given the group when another one has taken it already.
#[test]
fn a_gateway_takes_a_group_back_after_a_lost_reply_to_its_release() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    group.forgets = true;
    group.event(&mut first, Event::Move(1, 1));
    group.forgets = false;
    group.event(&mut second, Event::Changed);
    assert_eq!((serves(&first), serves(&second)), (vec![2], vec![1]));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!(first.stages().next(), Some((1, Stage::Standby)));
    // The other one is killed.
    group.pass(8, &mut [&mut first]);
    assert_eq!((serves(&first), group.excluded.as_slice()), (vec![1, 2], &["client2".into()][..]));
}

fn front(listeners: usize, hosts: usize) -> Event {
    Event::Front(Front { listeners, hosts, associations: hosts, ..Front::default() })
}

#[test]
fn a_gateway_without_an_open_listener_gives_its_groups_and_takes_none() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.event(&mut first, front(0, 0));
    group.pass(2, &mut [&mut first]);
    assert_eq!(serves(&first), [0; 0], "no host could use them");
    group.event(&mut first, front(1, 0));
    group.pass(1, &mut [&mut first]);
    assert_eq!(serves(&first), [1, 2]);
    group.event(&mut first, front(0, 0));
    group.pass(10, &mut [&mut first]);
    assert_eq!(serves(&first), [1, 2], "there is no other gateway");
    group.event(&mut first, front(1, 0));
    // One of a version that does not note what hosts reach is a candidate.
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(group.object().front(1), None);
    group.event(&mut first, front(0, 0));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2], "a listener that is replaced is not missed");
    group.event(&mut second, Event::Move(1, 0));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]));
    assert_eq!(group.object().front(0).map(|front| front.listeners), Some(0));
    group.event(&mut second, Event::Move(1, 0));
    group.pass(11, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]), "nor is one moved to it");
    assert!(second.balance().is_empty() && group.excluded.is_empty());
    // The other one is killed.
    group.pass(10, &mut [&mut first]);
    assert_eq!(serves(&first), [0; 0]);
    group.event(&mut first, front(1, 0));
    group.pass(3, &mut [&mut first]);
    assert_eq!(serves(&first), [1, 2]);
}

#[test]
fn a_gateway_without_hosts_gives_its_groups_to_one_with_hosts() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.event(&mut first, front(1, 0));
    group.event(&mut second, front(1, 0));
    group.pass(60, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2], "no host is connected to any gateway");
    group.event(&mut second, front(1, 3));
    group.pass(25, &mut [&mut first, &mut second]);
    group.event(&mut first, front(1, 1));
    group.pass(25, &mut [&mut first, &mut second]);
    group.event(&mut first, front(1, 0));
    group.pass(29, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2], "the time begins again");
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]));
    group.event(&mut first, front(1, 1));
    group.pass(60, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]), "they stay");
    assert_eq!(second.balance(), [(2, 0)]);
    group.event(&mut first, front(1, 0));
    group.pass(50, &mut [&mut first, &mut second]);
    group.event(&mut second, Event::Move(1, 0));
    group.pass(25, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1], "a move counts from its end");
    group.pass(10, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), []);
}

#[test]
fn a_gateway_rejoins_after_an_edit_of_a_group_record() {
    let (mut group, mut only) = (Group::default(), gateway(0, "a", "d"));
    group.pass(2, &mut [&mut only]);
    group.omap.remove(&Key::Group(1));
    group.pass(1, &mut [&mut only]);
    let member = group.object().member(0).cloned();
    assert!(matches!(member, Some(MemberRecord { incarnation: 2, .. })), "{member:?}");
}

#[test]
fn gateways_that_start_together_share_the_groups() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1], vec![2]));
    group.event(&mut first, Event::Move(1, 1));
    group.event(&mut second, Event::Changed);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]));
}

#[test]
fn a_heartbeat_between_the_read_and_the_update_prevents_the_exclusion() {
    let (mut group, mut first, mut second) = (
        Group { beats_late: true, ..Group::default() },
        gateway(0, "a", "d"),
        gateway(1, "b", "d"),
    );
    group.pass(1, &mut [&mut first]);
    group.pass(7, &mut [&mut second]);
    assert_eq!(group.omap[&Key::Heartbeat(0)], "1 999", "it was suspected");
    assert_eq!(group.object().member(0).map(|member| member.membership), Some(Membership::Live));
    group.beats_late = false;
    group.pass(5, &mut [&mut second]);
    assert_eq!(serves(&second), [1, 2], "it does not beat any more");
}

#[test]
fn no_gateway_is_suspected_after_a_cluster_outage() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    group.now += Duration::from_secs(60);
    group.pass(2, &mut [&mut second]);
    group.pass(8, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1, 2], vec![]));
    assert_eq!(group.object().member(0).map(|member| member.incarnation), Some(1));
}

#[test]
fn peers_are_known_only_with_current_heartbeats_of_both_sides() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    let names = |gateway: &Gateway| {
        let peers = gateway.peers()?;
        Some(peers.iter().map(|it| it.name.clone()).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(names(&first), None, "it has read nothing");
    group.pass(1, &mut [&mut first]);
    assert_eq!(names(&first).as_deref(), Some(""));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!((names(&first).as_deref(), names(&second).as_deref()), (Some("b"), Some("a")));
    group.pass(4, &mut [&mut first]);
    assert_eq!(names(&first).as_deref(), Some("b"), "less than the time of suspicion");
    group.pass(2, &mut [&mut first]);
    assert_eq!(names(&first).as_deref(), Some(""));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(names(&first).as_deref(), Some("b"), "it beats again");
    group.now += Duration::from_secs(60);
    assert!(first.handle(group.now, Event::Tick).len() > 1, "operations that do not end");
    assert_eq!(names(&first), None, "the cluster does not answer");
    group.event(&mut second, Event::Leave);
    group.pass(1, &mut [&mut second]);
    assert_eq!(names(&second), None, "it has left");
}

#[test]
fn groups_added_by_a_reload_are_served_and_removed_ones_released() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1], vec![2]));
    group.event(&mut first, Event::Declared(declared("e", &[1, 2, 3])));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1, 3], vec![2]));
    let digests = [0, 1].map(|slot| group.object().member(slot).unwrap().digest.clone());
    assert_eq!(digests, ["e", "d"], "the other one has not reloaded");
    group.event(&mut first, Event::Declared(declared("f", &[2, 3])));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(
        (serves(&first), serves(&second)),
        (vec![3], vec![1, 2]),
        "who has namespaces in it"
    );
    assert_eq!(first.stages().map(|(id, _)| id).collect::<Vec<_>>(), [2, 3]);
    group.event(&mut first, Event::Declared(declared("g", &[])));
    group.event(&mut first, Event::Declared(declared("d", &[1, 2, 3])));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![3], vec![1, 2]), "it has come back");
    let member = |slot| group.object().member(slot).map(|it| (it.incarnation, it.digest.clone()));
    assert_eq!([member(0), member(1)], [Some((1, "d".into())), Some((1, "d".into()))]);
    assert_eq!(group.excluded, [""; 0]);
}

#[test]
fn a_gateway_recognizes_its_own_member_record_after_a_failed_update() {
    let (mut group, mut only) = (Group::default(), gateway(0, "a", "d"));
    group.pass(1, &mut [&mut only]);
    group.forgets = true;
    group.event(&mut only, Event::Declared(declared("e", &[1, 2])));
    group.pass(1, &mut [&mut only]);
    group.event(&mut only, Event::Declared(declared("f", &[1, 2])));
    group.pass(1, &mut [&mut only]);
    assert_eq!(group.object().member(0).unwrap().digest, "f");
    group.forgets = false;
    group.pass(2, &mut [&mut only]);
    let member = group.object().member(0).cloned().unwrap();
    assert_eq!((member.incarnation, member.digest.as_str()), (1, "f"));
    assert_eq!((serves(&only), group.clients), (vec![1, 2], 1));
}

fn applied(version: u64, refused: Option<u64>) -> Event {
    let refused = refused.map(|version| (version, "no image".to_owned()));
    Event::Applied(Applied { version, refused })
}

#[test]
fn a_gateway_joins_after_applying_or_refusing_the_shared_version() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "e"));
    group.event(&mut first, applied(0, None));
    group.pass(1, &mut [&mut first]);
    assert_eq!(serves(&first), [1, 2], "there is no version yet");
    group.omap.insert(Key::Version, "1 5 digest a 7".to_owned());
    group.event(&mut second, applied(4, None));
    group.pass(10, &mut [&mut first, &mut second]);
    assert_eq!(group.object().member(1), None, "it is behind");
    assert_eq!(serves(&first), [1, 2], "a member that is behind serves");
    group.event(&mut first, applied(5, None));
    group.event(&mut second, applied(4, Some(5)));
    group.pass(1, &mut [&mut first, &mut second]);
    assert!(group.object().member(1).is_some(), "it serves what it had");
    assert_eq!(group.omap[&Key::Applied(0)], "1 5");
    assert_eq!(group.omap[&Key::Applied(1)], "1 4 5 no image");
    group.event(&mut second, applied(5, None));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(group.omap[&Key::Applied(1)], "1 5");
}

/// Two gateways, of which the first serves all groups.
fn with_shared_configuration() -> (Group, Gateway, Gateway) {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.event(&mut first, applied(0, None));
    group.pass(1, &mut [&mut first]);
    group.event(&mut second, applied(0, None));
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![1, 2], vec![]));
    (group, first, second)
}

/// By its own version it may serve namespaces that were replaced, to hosts that were removed.
#[test]
fn a_gateway_lacking_the_shared_version_takes_over_no_groups() {
    let (mut group, mut first, mut second) = with_shared_configuration();
    group.omap.insert(Key::Version, "1 5 digest a 7".to_owned());
    group.event(&mut second, applied(0, Some(5)));
    group.pass(1, &mut [&mut first, &mut second]);
    assert!(!second.is_outdated(), "nor is it in force at another one: it may be damaged");
    group.event(&mut first, applied(5, None));
    group.pass(1, &mut [&mut first, &mut second]);
    assert!(first.balance().is_empty() && second.balance().is_empty() && second.is_outdated());
    group.event(&mut first, Event::Move(2, 1));
    group.pass(11, &mut [&mut first, &mut second]);
    assert_eq!((first.next_move(), serves(&first)), (None, vec![1, 2]), "nor is one given to it");
    // The other one is killed.
    group.pass(20, &mut [&mut second]);
    assert_eq!((serves(&second), group.excluded.len()), (vec![], 0));
    group.event(&mut second, applied(5, None));
    group.pass(2, &mut [&mut second]);
    assert_eq!(serves(&second), [1, 2]);
}

/// The version and its note are written by one operation, before the gateway commits it.
#[test]
fn heartbeats_keep_the_note_of_a_version_that_is_being_committed() {
    let (mut group, mut first, mut second) = with_shared_configuration();
    group.omap.insert(Key::Version, "1 5 digest a 7".to_owned());
    group.omap.insert(Key::Applied(0), "1 5".to_owned());
    group.event(&mut second, applied(0, Some(5)));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(group.omap[&Key::Applied(0)], "1 5");
    // The first one is killed after it has committed the version.
    group.pass(20, &mut [&mut second]);
    assert_eq!(serves(&second), [0; 0], "it lacks the version");
    let mut later = gateway(0, "a", "d");
    group.event(&mut later, applied(0, Some(5)));
    group.pass(3, &mut [&mut later]);
    assert_eq!(group.omap[&Key::Applied(0)], "1 0 5 no image", "it was not committed after all");
    assert_eq!(serves(&later), [1, 2]);
}

#[test]
fn a_leaving_gateway_passes_no_groups_to_an_outdated_gateway() {
    let (mut group, mut first, mut second) = with_shared_configuration();
    group.omap.insert(Key::Version, "1 5 digest a 7".to_owned());
    group.event(&mut first, applied(5, None));
    group.pass(1, &mut [&mut first, &mut second]);
    group.event(&mut first, Event::Leave);
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![]));
    group.event(&mut second, applied(5, None));
    group.pass(1, &mut [&mut second]);
    assert_eq!(serves(&second), [1, 2]);
}

#[test]
fn a_gateway_without_shared_configuration_is_not_outdated() {
    let (mut group, mut first, mut other) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "e"));
    group.event(&mut first, applied(3, None));
    group.pass(10, &mut [&mut first, &mut other]);
    assert_eq!(other.differing().map(|member| member.name.as_str()), Some("a"));
    group.event(&mut first, Event::Leave);
    let mut later = gateway(0, "a", "e");
    group.pass(2, &mut [&mut later, &mut other]);
    assert_eq!(group.omap[&Key::Applied(0)], "-", "of the former process");
    assert!(group.object().member(1).is_some());
}

#[test]
fn any_gateway_moves_groups_one_after_the_other() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    assert_eq!(serves(&first), [1, 2]);
    assert_eq!(second.balance(), [(2, 1)]);
    assert_eq!(first.balance(), second.balance());
    for (group_id, to) in [(2, 1), (1, 1)] {
        group.event(&mut second, Event::Move(group_id, to));
    }
    assert_eq!(group.omap.get(&Key::Move(2)).map(String::as_str), Some("1 1 1"));
    assert_eq!(group.omap.get(&Key::Move(1)), None, "the first one is not done");
    assert_eq!(second.next_move(), Some((2, 1)));
    group.pass(3, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![], vec![1, 2]));
    assert_eq!((second.next_move(), group.excluded.len()), (None, 0));
    // The request ends with its epoch.
    group.event(&mut second, Event::Move(2, 0));
    group.pass(5, &mut [&mut first, &mut second]);
    assert_eq!((serves(&first), serves(&second)), (vec![2], vec![1]));
    assert!(first.balance().is_empty());
}

#[test]
fn an_impossible_move_is_cancelled_with_later_moves() {
    let (mut group, mut first, mut second) =
        (Group::default(), gateway(0, "a", "d"), gateway(1, "b", "d"));
    group.pass(1, &mut [&mut first]);
    group.pass(1, &mut [&mut first, &mut second]);
    group.event(&mut first, Event::Move(7, 1));
    group.event(&mut first, Event::Move(2, 9));
    assert_eq!(first.next_move(), Some((7, 1)), "nobody has such a group");
    group.pass(11, &mut [&mut first, &mut second]);
    assert_eq!((first.next_move(), serves(&first)), (None, vec![1, 2]));
    group.event(&mut first, Event::Move(1, 9));
    assert_eq!((first.next_move(), serves(&first)), (None, vec![1, 2]));
}

#[test]
fn each_gateway_publishes_its_hosts_with_keys_also_after_a_reload() {
    let (mut group, mut first) = (Group::default(), gateway(0, "a", "d"));
    let with = |names: &[&str]| Declaration {
        keyed: KeyedHosts(names.iter().map(|name| (*name).to_owned()).collect()),
        ..declared("d", &[1, 2])
    };
    first.member.declared = with(&["nqn.x"]);
    let mut second = gateway(1, "b", "d");
    group.pass(2, &mut [&mut first, &mut second]);
    let keyed = |gateway: &Gateway| -> Vec<String> {
        gateway.object().keyed_hosts().map(str::to_owned).collect()
    };
    assert_eq!(keyed(&second), ["nqn.x"]);
    assert_eq!(group.omap[&Key::Keyed(1)], "1", "none");
    group.event(&mut second, Event::Declared(with(&["nqn.y"])));
    group.event(&mut first, Event::Declared(with(&[])));
    group.pass(2, &mut [&mut first, &mut second]);
    assert_eq!(keyed(&first), ["nqn.y"]);
}
