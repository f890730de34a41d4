//! The group object: an object in RADOS whose omap says who the members are, and who owns each ANA
//! group.
//!
//! | key | value |
//! |---|---|
//! | `gw.SLOT` | [`MemberRecord`]: name, incarnation, address of the data client |
//! | `hb.SLOT` | incarnation and counter, written with each heartbeat |
//! | `ana.GROUP` | [`GroupRecord`]: owner, epoch |
//!
//! Values are text: fields with spaces between them, the first is the version of the format.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Version of the format of values.
const VERSION: &str = "1";
/// Stands for no value.
const NONE: &str = "-";

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
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Member(slot) => write!(f, "gw.{slot}"),
            Key::Heartbeat(slot) => write!(f, "hb.{slot}"),
            Key::Group(group) => write!(f, "ana.{group}"),
        }
    }
}

impl FromStr for Key {
    type Err = ();

    fn from_str(text: &str) -> Result<Key, ()> {
        let (kind, number) = text.split_once('.').ok_or(())?;
        match kind {
            "gw" => number.parse().map(Key::Member).map_err(drop),
            "hb" => number.parse().map(Key::Heartbeat).map_err(drop),
            "ana" => number.parse().map(Key::Group).map_err(drop),
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
    #[must_use]
    pub fn owner(&self) -> Option<&Owner> {
        match &self.ownership {
            Ownership::Free(_) => None,
            Ownership::Taking(owner, _) | Ownership::Serving(owner) => Some(owner),
        }
    }

    /// The addresses that a successor of the owner has to exclude before it writes.
    #[must_use]
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
#[must_use]
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
}

impl GroupObject {
    /// From keys and values. Other keys are ignored.
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
                Key::Heartbeat(_) => {}
            }
            object.texts.insert(key, text.to_owned());
        }
        Ok(object)
    }

    /// The value of a key.
    #[must_use]
    pub fn text(&self, key: Key) -> Option<&str> {
        self.texts.get(&key).map(String::as_str)
    }

    /// The member of a slot.
    #[must_use]
    pub fn member(&self, slot: Slot) -> Option<&MemberRecord> {
        self.members.get(&slot)
    }

    /// All members, by slot.
    pub fn members(&self) -> impl Iterator<Item = (Slot, &MemberRecord)> {
        self.members.iter().map(|(slot, member)| (*slot, member))
    }

    /// The record of a group.
    #[must_use]
    pub fn group(&self, group: u32) -> Option<&GroupRecord> {
        self.groups.get(&group)
    }

    /// The member that owns something as this owner still is one.
    #[must_use]
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
    fn records_are_read_as_they_were_written() {
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
        for key in [Key::Member(31), Key::Heartbeat(0), Key::Group(64)] {
            assert_eq!(key.to_string().parse(), Ok(key));
        }
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
        ] {
            let said = GroupObject::parse([(key, text)]).unwrap_err();
            assert!(said.contains(key), "{said}");
        }
    }

    #[test]
    fn a_successor_excludes_also_what_its_predecessor_had_to_exclude() {
        let owner = Owner { slot: 0, incarnation: 1, address: "a".to_owned() };
        let record = |ownership| GroupRecord { epoch: 1, ownership };
        let former = vec!["b".to_owned()];
        assert_eq!(record(Ownership::Taking(owner.clone(), former)).to_exclude(), ["b", "a"]);
        assert_eq!(record(Ownership::Serving(owner)).to_exclude(), ["a"]);
        assert!(record(Ownership::Free(Some(1))).to_exclude().is_empty());
    }
}
