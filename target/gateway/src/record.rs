//! The group object: an object in RADOS whose omap says who the members are, and who owns each ANA
//! group.
//!
//! | key | value |
//! |---|---|
//! | `gw.SLOT` | [`MemberRecord`]: name, incarnation, address of the data client |
//! | `hb.SLOT` | incarnation and counter, written with each heartbeat |
//! | `ana.GROUP` | [`GroupRecord`]: owner, epoch |
//! | `move.GROUP` | [`MoveRequest`]: the gateway that its owner is asked to give the group to |
//! | `version` | [`SharedVersion`]: the shared configuration, whose text is in `config` |
//! | `applied.SLOT` | [`Applied`]: the version that a gateway has in force |
//! | `keyed.SLOT` | [`KeyedHosts`]: the hosts that have keys at a gateway |
//! | `front.SLOT` | [`Front`]: the hosts that reach a gateway |
//!
//! Values are text: fields with spaces between them, the first is the version of the format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// Version of the format of values.
const VERSION: &str = "1";
/// Stands for no value.
const NONE: &str = "-";

/// The text of records whose fields are numbers and words: these, in this order.
macro_rules! fields {
    ($($record:ident { $($field:ident),+ })+) => {$(
        impl fmt::Display for $record {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(VERSION)?;
                $(write!(f, " {}", self.$field)?;)+
                Ok(())
            }
        }

        impl FromStr for $record {
            type Err = ();

            fn from_str(text: &str) -> Result<$record, ()> {
                let fields: Vec<&str> = text.split(' ').collect();
                let [VERSION, $($field),+] = fields[..] else { return Err(()) };
                Ok($record { $($field: $field.parse().map_err(drop)?),+ })
            }
        }
    )+};
}

fields! {
    MoveRequest { epoch, to }
    SharedVersion { number, digest, gateway, at_unix_s }
    Front { incarnation, listeners, hosts, associations }
}

/// The declared number of a gateway in its group: 0 to 31.
pub type Slot = u8;

/// A key of the group object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Key {
    /// The member record of a slot.
    Member(Slot),
    /// The heartbeat of a slot.
    Heartbeat(Slot),
    /// The record of an ANA group.
    Group(u32),
    /// A request to the owner of an ANA group.
    Move(u32),
    /// The version of the shared configuration.
    Version,
    /// The version of the shared configuration that a slot has in force.
    Applied(Slot),
    /// The hosts that have keys at a slot.
    Keyed(Slot),
    /// The hosts that reach a slot.
    Front(Slot),
}

impl Key {
    /// What the keys of a group object begin with.
    pub const PREFIXES: [&str; 8] =
        ["gw.", "hb.", "ana.", "move.", "version", "applied.", "keyed.", "front."];
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Member(slot) => write!(f, "gw.{slot}"),
            Key::Heartbeat(slot) => write!(f, "hb.{slot}"),
            Key::Group(group) => write!(f, "ana.{group}"),
            Key::Move(group) => write!(f, "move.{group}"),
            Key::Version => f.write_str("version"),
            Key::Applied(slot) => write!(f, "applied.{slot}"),
            Key::Keyed(slot) => write!(f, "keyed.{slot}"),
            Key::Front(slot) => write!(f, "front.{slot}"),
        }
    }
}

impl FromStr for Key {
    type Err = ();

    fn from_str(text: &str) -> Result<Key, ()> {
        if text == "version" {
            return Ok(Key::Version);
        }
        let (kind, number) = text.split_once('.').ok_or(())?;
        match kind {
            "gw" => number.parse().map(Key::Member).map_err(drop),
            "hb" => number.parse().map(Key::Heartbeat).map_err(drop),
            "ana" => number.parse().map(Key::Group).map_err(drop),
            "move" => number.parse().map(Key::Move).map_err(drop),
            "applied" => number.parse().map(Key::Applied).map_err(drop),
            "keyed" => number.parse().map(Key::Keyed).map_err(drop),
            "front" => number.parse().map(Key::Front).map_err(drop),
            _ => Err(()),
        }
    }
}

/// Whether the incarnation of a member takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Membership {
    /// It does, as long as its heartbeat changes.
    Live,
    /// It was excluded, by itself or by another member.
    Excluded,
    /// It has left in order.
    Left,
}

/// A gateway of the group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberRecord {
    /// Its declared name.
    pub name: String,
    /// How many times the slot was registered. Every data client has its own.
    pub incarnation: u64,
    /// Whether this incarnation takes part.
    pub membership: Membership,
    /// Address of its data client.
    pub address: String,
    /// Digest of what all members must declare alike.
    pub digest: String,
    /// Where hosts reach it.
    pub listeners: Vec<String>,
}

impl fmt::Display for MemberRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemberRecord { name, incarnation, membership, address, digest, listeners } = self;
        let membership = match membership {
            Membership::Live => "live",
            Membership::Excluded => "excluded",
            Membership::Left => "left",
        };
        write!(f, "{VERSION} {name} {incarnation} {membership} {address} {digest} ")?;
        list(f, listeners)
    }
}

impl FromStr for MemberRecord {
    type Err = ();

    fn from_str(text: &str) -> Result<MemberRecord, ()> {
        let fields: Vec<&str> = text.split(' ').collect();
        let [VERSION, name, incarnation, membership, address, digest, listeners] = fields[..]
        else {
            return Err(());
        };
        let membership = match membership {
            "live" => Membership::Live,
            "excluded" => Membership::Excluded,
            "left" => Membership::Left,
            _ => return Err(()),
        };
        Ok(MemberRecord {
            name: name.to_owned(),
            incarnation: incarnation.parse().map_err(drop)?,
            membership,
            address: address.to_owned(),
            digest: digest.to_owned(),
            listeners: parse_list(listeners),
        })
    }
}

/// Whose data client may write to a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Its slot.
    pub slot: Slot,
    /// Its incarnation.
    pub incarnation: u64,
    /// Address of its data client: who replaces it excludes this one.
    pub address: String,
}

/// Who owns a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ownership {
    /// Nobody: nobody may write. It is meant for a slot, if it was moved.
    Free(Option<Slot>),
    /// This one, who has not yet written. Before it does it excludes the addresses.
    Taking(Owner, Vec<String>),
    /// This one.
    Serving(Owner),
}

/// An ANA group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupRecord {
    /// Counts the changes of the owner.
    pub epoch: u64,
    /// The owner.
    pub ownership: Ownership,
}

impl GroupRecord {
    /// The owner, if there is one.
    pub fn owner(&self) -> Option<&Owner> {
        match &self.ownership {
            Ownership::Free(_) => None,
            Ownership::Taking(owner, _) | Ownership::Serving(owner) => Some(owner),
        }
    }

    /// The addresses that a successor of the owner has to exclude before it writes.
    pub fn to_exclude(&self) -> Vec<String> {
        let mut addresses = match &self.ownership {
            Ownership::Taking(_, former) => former.clone(),
            _ => Vec::new(),
        };
        addresses.extend(self.owner().map(|owner| owner.address.clone()));
        addresses
    }
}

impl fmt::Display for GroupRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VERSION} {} ", self.epoch)?;
        let mut owned = |state: &str, owner: &Owner| {
            write!(f, "{state} {} {} {} ", owner.slot, owner.incarnation, owner.address)
        };
        match &self.ownership {
            Ownership::Free(None) => write!(f, "free {NONE}"),
            Ownership::Free(Some(slot)) => write!(f, "free {slot}"),
            Ownership::Taking(owner, former) => {
                owned("taking", owner)?;
                list(f, former)
            }
            Ownership::Serving(owner) => {
                owned("serving", owner)?;
                list(f, &[])
            }
        }
    }
}

impl FromStr for GroupRecord {
    type Err = ();

    fn from_str(text: &str) -> Result<GroupRecord, ()> {
        let fields: Vec<&str> = text.split(' ').collect();
        let (epoch, ownership) = match fields[..] {
            [VERSION, epoch, "free", NONE] => (epoch, Ownership::Free(None)),
            [VERSION, epoch, "free", slot] => {
                (epoch, Ownership::Free(Some(slot.parse().map_err(drop)?)))
            }
            [VERSION, epoch, state, slot, incarnation, address, former] => {
                let owner = Owner {
                    slot: slot.parse().map_err(drop)?,
                    incarnation: incarnation.parse().map_err(drop)?,
                    address: address.to_owned(),
                };
                let ownership = match state {
                    "taking" => Ownership::Taking(owner, parse_list(former)),
                    "serving" => Ownership::Serving(owner),
                    _ => return Err(()),
                };
                (epoch, ownership)
            }
            _ => return Err(()),
        };
        Ok(GroupRecord { epoch: epoch.parse().map_err(drop)?, ownership })
    }
}

/// A request to the owner of an ANA group, of any gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveRequest {
    /// The epoch of the ANA group; the request ends with it.
    pub epoch: u64,
    /// The slot that is to serve the group.
    pub to: Slot,
}

/// A version of the shared configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedVersion {
    /// Its number: 1 is the first.
    pub number: u64,
    /// Digest of its text.
    pub digest: String,
    /// The name of the gateway where it was applied first.
    pub gateway: String,
    /// When, in seconds since 1970.
    pub at_unix_s: u64,
}

/// What a gateway has in force of the shared configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// The version; 0: none yet.
    pub version: u64,
    /// A later version that it could not apply, and why.
    pub refused: Option<(u64, String)>,
}

impl Applied {
    /// The longest reason in a record, in characters.
    const MOST_CHARS: usize = 400;

    /// The last version that it has applied or refused.
    pub fn settled(&self) -> u64 {
        self.refused.as_ref().map_or(self.version, |(version, _)| self.version.max(*version))
    }
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VERSION} {}", self.version)?;
        let Some((version, why)) = &self.refused else { return Ok(()) };
        let plain = |c: char| if c.is_control() { ' ' } else { c };
        let why: String = why.chars().map(plain).take(Applied::MOST_CHARS).collect();
        write!(f, " {version} {why}")
    }
}

impl FromStr for Applied {
    type Err = ();

    fn from_str(text: &str) -> Result<Applied, ()> {
        let fields: Vec<&str> = text.splitn(4, ' ').collect();
        let (version, refused) = match fields[..] {
            [VERSION, version] => (version, None),
            [VERSION, version, refused, why] => {
                (version, Some((refused.parse().map_err(drop)?, why.to_owned())))
            }
            _ => return Err(()),
        };
        Ok(Applied { version: version.parse().map_err(drop)?, refused })
    }
}

/// NQNs of the hosts that have keys at a gateway, a line each: the other gateways refuse them without
/// a key of their own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KeyedHosts(pub BTreeSet<String>);

impl fmt::Display for KeyedHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(VERSION)?;
        self.0.iter().try_for_each(|nqn| write!(f, "\n{nqn}"))
    }
}

impl FromStr for KeyedHosts {
    type Err = ();

    fn from_str(text: &str) -> Result<KeyedHosts, ()> {
        let mut lines = text.split('\n');
        let is_known = lines.next() == Some(VERSION);
        is_known.then(|| KeyedHosts(lines.map(str::to_owned).collect())).ok_or(())
    }
}

/// How hosts reach a gateway. Versions without it neither read nor write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Front {
    /// The incarnation that this is of: that of another one says nothing.
    pub incarnation: u64,
    /// Listeners that are open.
    pub listeners: usize,
    /// Hosts that are connected to a subsystem.
    pub hosts: usize,
    /// Their associations.
    pub associations: usize,
}

fn list(f: &mut fmt::Formatter<'_>, entries: &[String]) -> fmt::Result {
    match entries {
        [] => f.write_str(NONE),
        entries => f.write_str(&entries.join(";")),
    }
}

fn parse_list(text: &str) -> Vec<String> {
    match text {
        NONE => Vec::new(),
        text => text.split(';').map(str::to_owned).collect(),
    }
}

/// A text that can be a field or an entry of a list.
pub fn is_field(text: &str) -> bool {
    let is_refused = |c: char| c.is_whitespace() || c.is_control() || c == ';';
    !text.is_empty() && text != NONE && !text.contains(is_refused)
}

/// The group object as it was read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupObject {
    /// The values as they are: what an update compares.
    texts: BTreeMap<Key, String>,
    members: BTreeMap<Slot, MemberRecord>,
    groups: BTreeMap<u32, GroupRecord>,
    version: Option<SharedVersion>,
    applied: BTreeMap<Slot, Applied>,
    keyed: BTreeMap<Slot, KeyedHosts>,
    moves: BTreeMap<u32, MoveRequest>,
    fronts: BTreeMap<Slot, Front>,
}

impl GroupObject {
    /// From keys and values. Other keys are ignored, and so are requests and versions that cannot be
    /// read.
    ///
    /// # Errors
    /// The key whose value cannot be read: nothing may be decided from the rest.
    pub fn parse<'a>(
        entries: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<GroupObject, String> {
        let mut object = GroupObject::default();
        for (name, text) in entries {
            let Ok(key) = name.parse::<Key>() else { continue };
            let damaged = |()| format!("the value of {name} is damaged: {text:?}");
            match key {
                Key::Member(slot) => {
                    object.members.insert(slot, text.parse().map_err(damaged)?);
                }
                Key::Group(group) => {
                    object.groups.insert(group, text.parse().map_err(damaged)?);
                }
                Key::Keyed(slot) => {
                    object.keyed.insert(slot, text.parse().map_err(damaged)?);
                }
                Key::Heartbeat(_) => {}
                // Nobody decides by these who owns a group: damage of them obstructs no takeover.
                Key::Move(group) => {
                    object.moves.extend(text.parse().ok().map(|request| (group, request)));
                }
                Key::Front(slot) => {
                    object.fronts.extend(text.parse().ok().map(|front| (slot, front)));
                }
                Key::Version => object.version = text.parse().ok(),
                Key::Applied(slot) => {
                    object.applied.extend(text.parse().ok().map(|applied| (slot, applied)));
                }
            }
            object.texts.insert(key, text.to_owned());
        }
        Ok(object)
    }

    /// The value of a key.
    pub fn text(&self, key: Key) -> Option<&str> {
        self.texts.get(&key).map(String::as_str)
    }

    /// The member of a slot.
    pub fn member(&self, slot: Slot) -> Option<&MemberRecord> {
        self.members.get(&slot)
    }

    /// All members, by slot.
    pub fn members(&self) -> impl Iterator<Item = (Slot, &MemberRecord)> {
        self.members.iter().map(|(slot, member)| (*slot, member))
    }

    /// The record of a group.
    pub fn group(&self, group: u32) -> Option<&GroupRecord> {
        self.groups.get(&group)
    }

    /// The slot that the owner of a group is asked to give it to.
    pub fn move_request(&self, group: u32) -> Option<Slot> {
        let request = self.moves.get(&group)?;
        let is_current = |record: &&GroupRecord| record.epoch == request.epoch;
        self.group(group).filter(is_current).map(|_| request.to)
    }

    /// The version of the shared configuration, if there is one.
    pub fn version(&self) -> Option<&SharedVersion> {
        self.version.as_ref()
    }

    /// What the gateway of a slot has in force of the shared configuration, if it uses it.
    pub fn applied(&self, slot: Slot) -> Option<&Applied> {
        self.applied.get(&slot)
    }

    /// How hosts reach the gateway of a slot, if its present incarnation has noted it.
    pub fn front(&self, slot: Slot) -> Option<Front> {
        let member = self.member(slot)?;
        let front = self.fronts.get(&slot).filter(|it| it.incarnation == member.incarnation);
        front.copied()
    }

    /// NQNs of the hosts that have keys at any gateway, also at one that is gone.
    pub fn keyed_hosts(&self) -> impl Iterator<Item = &str> {
        self.keyed.values().flat_map(|hosts| hosts.0.iter().map(String::as_str))
    }

    /// Whether any gateway, also one that is gone, has had a later version of the shared
    /// configuration in force. What would be served by this one may be other namespaces, or to other
    /// hosts, than what hosts have written to.
    pub fn is_outdated(&self, applied: &Applied) -> bool {
        self.applied.values().any(|other| other.version > applied.version)
    }

    /// The member that owns something as this owner still is one.
    pub fn live_owner(&self, owner: &Owner) -> Option<&MemberRecord> {
        let member = self.member(owner.slot)?;
        let is_live = member.membership == Membership::Live;
        (is_live && member.incarnation == owner.incarnation).then_some(member)
    }
}

/// An atomic update of the group object: all values are set if all comparisons hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Update {
    /// Values that must be as they were read; none: the key must not exist.
    pub compares: Vec<(Key, Option<String>)>,
    /// New values.
    pub sets: Vec<(Key, String)>,
}

impl Update {
    /// The value of the key must be this one.
    #[must_use]
    pub(crate) fn compare(mut self, key: Key, text: Option<&str>) -> Update {
        self.compares.push((key, text.map(str::to_owned)));
        self
    }

    /// Sets a value that may be none, if it is another than in an object.
    #[must_use]
    pub(crate) fn note(
        self,
        key: Key,
        new: Option<&impl fmt::Display>,
        object: &GroupObject,
    ) -> Update {
        let (old, new) = (object.text(key), new.map(ToString::to_string));
        match (old, &new) {
            (None, None) | (Some(NONE), None) => self,
            (old, new) if old == new.as_deref() => self,
            _ => self.set(key, &new.as_deref().unwrap_or(NONE)),
        }
    }

    /// Sets a value.
    #[must_use]
    pub(crate) fn set(mut self, key: Key, value: &impl fmt::Display) -> Update {
        self.sets.push((key, value.to_string()));
        self
    }
}

#[cfg(test)]
mod tests {
    use crate::record::*;

    #[test]
    fn records_round_trip() {
        let member = MemberRecord {
            name: "a".to_owned(),
            incarnation: 7,
            membership: Membership::Excluded,
            address: "10.0.0.1:0/508297172".to_owned(),
            digest: "0f".to_owned(),
            listeners: vec!["10.0.0.1:4420".to_owned(), "[::1]:4420".to_owned()],
        };
        for membership in [Membership::Live, Membership::Excluded, Membership::Left] {
            let member = MemberRecord { membership, ..member.clone() };
            assert_eq!(member.to_string().parse(), Ok(member));
        }
        let none = MemberRecord { listeners: Vec::new(), ..member };
        assert_eq!(none.to_string().parse(), Ok(none.clone()));
        let owner = Owner { slot: 3, incarnation: 7, address: none.address };
        let former = vec!["10.0.0.2:0/1".to_owned(), "10.0.0.3:0/2".to_owned()];
        for ownership in [
            Ownership::Free(None),
            Ownership::Free(Some(31)),
            Ownership::Taking(owner.clone(), former),
            Ownership::Taking(owner.clone(), Vec::new()),
            Ownership::Serving(owner),
        ] {
            let record = GroupRecord { epoch: 12, ownership };
            assert_eq!(record.to_string().parse(), Ok(record));
        }
        let keys = [Key::Member(31), Key::Heartbeat(0), Key::Group(64), Key::Version, Key::Move(2)];
        for key in keys.into_iter().chain([Key::Applied(3), Key::Keyed(4), Key::Front(5)]) {
            let text = key.to_string();
            assert_eq!(text.parse(), Ok(key));
            assert!(Key::PREFIXES.iter().any(|prefix| text.starts_with(prefix)), "{text} is read");
        }
        let front = Front { incarnation: 7, listeners: 2, hosts: 3, associations: 5 };
        assert_eq!(front.to_string().parse(), Ok(front));
        let request = MoveRequest { epoch: 7, to: 31 };
        assert_eq!(request.to_string().parse(), Ok(request));
        let (digest, gateway) = ("0f".to_owned(), "a".to_owned());
        let version = SharedVersion { number: 7, digest, gateway, at_unix_s: 1_795_000_000 };
        assert_eq!(version.to_string().parse(), Ok(version));
    }

    #[test]
    fn the_applied_version_round_trips_with_a_bounded_reason() {
        let why = "no image rbd/x: create it".to_owned();
        for refused in [None, Some((6, why))] {
            let applied = Applied { version: 5, refused };
            assert_eq!(applied.to_string().parse(), Ok(applied));
        }
        let long = Applied { version: 5, refused: Some((6, "x\ny".repeat(1000))) };
        let text = long.to_string();
        assert!(text.len() < 500 && !text.contains('\n'), "{text}");
        assert_eq!(text.parse::<Applied>().unwrap().settled(), 6);
        assert_eq!("1 5 x".parse::<Applied>(), Err(()));
    }

    #[test]
    fn names_of_hosts_may_have_every_printable_character() {
        for names in [vec![], vec!["nqn.2026-11.host:a; b", "nqn.2026-11.host:-"]] {
            let hosts = KeyedHosts(names.into_iter().map(str::to_owned).collect());
            assert_eq!(hosts.to_string().parse(), Ok(hosts));
        }
        assert_eq!("2\nx".parse::<KeyedHosts>(), Err(()));
    }

    #[test]
    fn a_value_that_cannot_be_read_is_reported_and_other_keys_are_ignored() {
        let good = [("gw.1", "1 a 1 live x:0/1 d -"), ("hb.1", "1 2"), ("config", "?")];
        let object = GroupObject::parse(good).unwrap();
        assert_eq!(object.member(1).unwrap().address, "x:0/1");
        assert_eq!(object.text(Key::Heartbeat(1)), Some("1 2"));
        for (key, text) in [
            ("gw.1", "2 a 1 live x d -"),
            ("gw.1", "1 a 1 gone x d -"),
            ("ana.1", "1 1 serving 0 1 x"),
            ("ana.1", "1 1 lost 0 1 x -"),
            ("ana.1", ""),
            // Whom to refuse is not known then.
            ("keyed.1", "2"),
            ("keyed.1", ""),
        ] {
            let said = GroupObject::parse([(key, text)]).unwrap_err();
            assert!(said.contains(key), "{said}");
        }
        let others = [("version", "2 x"), ("applied.1", "?"), ("applied.2", "-"), ("move.1", "")];
        let others = others.into_iter().chain([("front.1", "2 1 1 1 1")]);
        let object = GroupObject::parse(others).unwrap();
        assert_eq!((object.version(), object.applied(1)), (None, None));
        assert_eq!((object.applied(2), object.move_request(1)), (None, None));
    }

    #[test]
    fn a_front_record_of_another_incarnation_is_ignored() {
        let front = |text| {
            let member = ("gw.1", "1 a 7 live x:0/1 d -");
            GroupObject::parse([member, ("front.1", text)]).unwrap().front(1).map(|it| it.hosts)
        };
        assert_eq!(front("1 7 1 3 4"), Some(3));
        // Left by a later version in this slot, before the gateway was replaced by an earlier one.
        assert_eq!(front("1 6 0 0 0"), None);
        assert_eq!(front("2 7 1 3 4"), None);
    }

    #[test]
    fn a_successor_excludes_pending_clients_of_its_predecessor() {
        let owner = Owner { slot: 0, incarnation: 1, address: "a".to_owned() };
        let record = |ownership| GroupRecord { epoch: 1, ownership };
        let former = vec!["b".to_owned()];
        assert_eq!(record(Ownership::Taking(owner.clone(), former)).to_exclude(), ["b", "a"]);
        assert_eq!(record(Ownership::Serving(owner)).to_exclude(), ["a"]);
        assert!(record(Ownership::Free(Some(1))).to_exclude().is_empty());
    }
}
