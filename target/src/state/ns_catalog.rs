//! Record of host-created namespaces, readable text:
//!
//! ```text
//! nvmfd namespaces 1
//! subsystem nqn.2026-11.io.nvmfd:disk1
//! namespace 3 6f1c5d1e-.. bytes 1073741824 block 4096 group 1
//! host 3 nqn.2014-08.org.nvmexpress:uuid:..
//! unsettled 0b7e..
//! image 6f1c5d1e-.. id 85d6e1e2b1a3 bytes 1073741824 cluster 4c1e.. pool rbd
//! image 0b7e.. client 192.0.2.1:0/1234 bytes 1048576 cluster 4c1e.. pool rbd
//! crc32 5f3a9c01
//! ```
//!
//! An `image` is that of the namespace, or of the unsettled one, with this UUID: others are files.
//! It has no id while it is being made.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

use nvme::Nqn;
use uuid::Uuid;

use crate::blockdev::ceph::{CreatedImage, ImageIdentity, ImageName, ImageOrigin};
use crate::blockdev::record;
use crate::core::subsystem::MAX_NSID;
use crate::core::subsystem::ana::ANA_GROUPS;
use crate::core::subsystem::ns_management::{Entry, HOSTS_MAX};

/// An image of Ceph RBD that a host has made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogImage {
    /// `pool` or `pool/namespace`.
    pub pool: String,
    /// Its cluster, its size, and what it is recognised by.
    pub origin: ImageOrigin,
}

impl CatalogImage {
    /// The name of the image with this UUID in a pool; none: the pool has no possible name.
    pub fn name_in(pool: &str, uuid: Uuid) -> Option<ImageName> {
        format!("{pool}/{uuid}").parse().ok()
    }

    /// Its name.
    pub fn name(&self, uuid: Uuid) -> Option<ImageName> {
        CatalogImage::name_in(&self.pool, uuid)
    }

    /// What is opened under its name has to be this; none while it is being made.
    pub fn made(&self, size_bytes: u64) -> Option<CreatedImage> {
        let ImageIdentity::Id(id) = &self.origin.identity else { return None };
        Some(CreatedImage { cluster: self.origin.cluster.clone(), id: id.clone(), size_bytes })
    }

    fn parse(text: &str) -> Option<CatalogImage> {
        let (what, rest) = text.split_once(' ')?;
        let (value, rest) = rest.split_once(' ')?;
        let (bytes, rest) = rest.strip_prefix("bytes ")?.split_once(" cluster ")?;
        let (cluster, pool) = rest.split_once(" pool ")?;
        let identity = match what {
            "id" => ImageIdentity::Id(value.to_owned()),
            "client" => ImageIdentity::Client(value.to_owned()),
            _ => return None,
        };
        let cluster = cluster.to_owned();
        let origin = ImageOrigin { cluster, size_bytes: bytes.parse().ok()?, identity };
        Some(CatalogImage { pool: pool.to_owned(), origin })
    }
}

/// As in the record, after the UUID.
impl fmt::Display for CatalogImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ImageOrigin { cluster, size_bytes, identity } = &self.origin;
        match identity {
            ImageIdentity::Id(id) => write!(f, "id {id}")?,
            ImageIdentity::Client(address) => write!(f, "client {address}")?,
        }
        write!(f, " bytes {size_bytes} cluster {cluster} pool {}", self.pool)
    }
}

/// Host-created namespaces of one subsystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceCatalogRecord {
    /// The subsystem.
    pub subsystem: Nqn,
    /// Its namespaces, by id.
    pub entries: BTreeMap<u32, Entry>,
    /// Files and images that are being created or removed, by UUID: not namespaces.
    pub unsettled: BTreeSet<Uuid>,
    /// Those of both that are images.
    pub images: BTreeMap<Uuid, CatalogImage>,
}

impl NamespaceCatalogRecord {
    /// An empty record of a subsystem.
    pub fn new(subsystem: Nqn) -> NamespaceCatalogRecord {
        NamespaceCatalogRecord {
            subsystem,
            entries: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            images: BTreeMap::new(),
        }
    }

    /// The total size of all namespaces, and of images that are not removed yet, in bytes.
    pub fn used_bytes(&self) -> u64 {
        let unsettled = self.unsettled_images().map(|(_, image)| image.origin.size_bytes);
        let all = self.entries.values().map(|entry| entry.bytes).chain(unsettled);
        all.fold(0, u64::saturating_add)
    }

    /// Files that are being created or removed.
    pub fn unsettled_files(&self) -> BTreeSet<Uuid> {
        let mut files = self.unsettled.clone();
        files.retain(|uuid| !self.images.contains_key(uuid));
        files
    }

    /// Images that are being made or removed.
    pub fn unsettled_images(&self) -> impl Iterator<Item = (Uuid, &CatalogImage)> {
        self.unsettled.iter().filter_map(|uuid| Some((*uuid, self.images.get(uuid)?)))
    }

    /// Names of the images of namespaces.
    pub fn image_names(&self) -> BTreeMap<u32, String> {
        let name = |(nsid, entry): (&u32, &Entry)| {
            let name = self.images.get(&entry.uuid)?.name(entry.uuid)?;
            Some((*nsid, name.to_string()))
        };
        self.entries.iter().filter_map(name).collect()
    }

    /// Removes a file or image that is being created or removed.
    pub fn settle(&mut self, uuid: Uuid) {
        if self.unsettled.remove(&uuid) {
            self.images.remove(&uuid);
        }
    }

    fn take(&mut self, line: &str) -> Option<()> {
        let (word, rest) = line.split_once(' ')?;
        match word {
            "namespace" => {
                let mut words = rest.split(' ');
                let nsid = words.next()?.parse().ok()?;
                let uuid = words.next()?.parse().ok()?;
                let mut number = || words.nth(1)?.parse::<u64>().ok();
                let (bytes, block, group) = (number()?, number()?, number()?);
                let block_size_bytes = block.try_into().ok()?;
                let ana_group = group.try_into().ok()?;
                let hosts = BTreeSet::new();
                let private = false;
                let entry = Entry { uuid, bytes, block_size_bytes, ana_group, private, hosts };
                self.entries.insert(nsid, entry);
            }
            "host" => {
                let (nsid, host) = rest.split_once(' ')?;
                let entry = self.entries.get_mut(&nsid.parse().ok()?)?;
                entry.hosts.insert(host.parse().ok()?);
            }
            "private" => self.entries.get_mut(&rest.parse().ok()?)?.private = true,
            "unsettled" => drop(self.unsettled.insert(rest.parse().ok()?)),
            "image" => {
                let (uuid, rest) = rest.split_once(' ')?;
                self.images.insert(uuid.parse().ok()?, CatalogImage::parse(rest)?);
            }
            _ => return None,
        }
        Some(())
    }

    /// Whether the state can be reached by requests; any other is rejected.
    fn is_possible(&self) -> bool {
        let sound = |(nsid, entry): (&u32, &Entry)| {
            (1..=MAX_NSID).contains(nsid)
                && matches!(entry.block_size_bytes, 512 | 4096)
                && entry.bytes > 0
                && entry.bytes.is_multiple_of(entry.block_size_bytes.into())
                && i64::try_from(entry.bytes).is_ok()
                && (1..=ANA_GROUPS).contains(&entry.ana_group)
                && entry.hosts.len() <= if entry.private { 1 } else { HOSTS_MAX }
                && !self.unsettled.contains(&entry.uuid)
        };
        let uuids: BTreeSet<Uuid> = self.entries.values().map(|entry| entry.uuid).collect();
        // What is served has an id.
        let is_known = |(uuid, image): (&Uuid, &CatalogImage)| {
            let has_id = matches!(image.origin.identity, ImageIdentity::Id(_));
            let is_made = uuids.contains(uuid) && has_id;
            image.name(*uuid).is_some() && (is_made || self.unsettled.contains(uuid))
        };
        uuids.len() == self.entries.len()
            && self.entries.iter().all(sound)
            && self.images.iter().all(is_known)
    }
}

impl record::Record for NamespaceCatalogRecord {
    const KIND: &'static str = "namespaces";
    const REMEDY: &'static str =
        "take it, and the files and images of these namespaces, away if none of them is needed";

    fn emit(&self) -> String {
        let mut text = format!("subsystem {}\n", self.subsystem);
        for (nsid, entry) in &self.entries {
            let Entry { uuid, bytes, block_size_bytes, ana_group, private, hosts } = entry;
            let _ = writeln!(
                text,
                "namespace {nsid} {uuid} bytes {bytes} block {block_size_bytes} group {ana_group}"
            );
            if *private {
                let _ = writeln!(text, "private {nsid}");
            }
            for host in hosts {
                let _ = writeln!(text, "host {nsid} {host}");
            }
        }
        for uuid in &self.unsettled {
            let _ = writeln!(text, "unsettled {uuid}");
        }
        for (uuid, image) in &self.images {
            let _ = writeln!(text, "image {uuid} {image}");
        }
        text
    }

    fn parse(body: &str) -> Option<NamespaceCatalogRecord> {
        let mut lines = body.lines();
        let subsystem = lines.next()?.strip_prefix("subsystem ")?.parse().ok()?;
        let mut record = NamespaceCatalogRecord::new(subsystem);
        for line in lines {
            record.take(line)?;
        }
        record.is_possible().then_some(record)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use crate::state::ns_catalog::*;

    pub(crate) fn sample() -> NamespaceCatalogRecord {
        let host = |n: u8| format!("nqn.2026-11.io.nvmfd:host{n}").parse().unwrap();
        let entry = |n: u8, hosts: &[u8]| Entry {
            uuid: Uuid::from_bytes([n; 16]),
            bytes: 1 << 20,
            block_size_bytes: 512,
            ana_group: 1,
            private: n == 3,
            hosts: hosts.iter().map(|n| host(*n)).collect(),
        };
        NamespaceCatalogRecord {
            subsystem: "nqn.2026-11.io.nvmfd:a".parse().unwrap(),
            entries: [(3, entry(3, &[])), (7, entry(7, &[1, 2]))].into(),
            unsettled: [Uuid::from_bytes([9; 16])].into(),
            images: BTreeMap::new(),
        }
    }

    pub(crate) fn being_made(pool: &str) -> CatalogImage {
        image(pool, ImageIdentity::Client("192.0.2.1:0/1234".to_owned()))
    }

    fn image(pool: &str, identity: ImageIdentity) -> CatalogImage {
        let cluster = "4c1e0d2a-7f1b-4a58-9a3c-0d2f5b6e7a81".to_owned();
        let origin = ImageOrigin { cluster, size_bytes: 1 << 20, identity };
        CatalogImage { pool: pool.to_owned(), origin }
    }

    /// As [`sample`], in images: namespace 7, and the unsettled one.
    pub(crate) fn sample_of_images() -> NamespaceCatalogRecord {
        let made = image("rbd", ImageIdentity::Id("85d6e1e2b1a3".to_owned()));
        let [seven, nine] = [7, 9].map(|n| Uuid::from_bytes([n; 16]));
        let images = [(seven, made), (nine, being_made("a pool/space"))].into();
        NamespaceCatalogRecord { images, ..sample() }
    }

    #[test]
    fn the_format_of_images_in_a_catalog_is_as_documented() {
        let text = record::seal(&sample_of_images());
        let lines: Vec<&str> = text.lines().collect();
        let uuid = |n: u8| Uuid::from_bytes([n; 16]);
        assert_eq!(lines.len(), 11);
        let cluster = "cluster 4c1e0d2a-7f1b-4a58-9a3c-0d2f5b6e7a81";
        let seven = format!("image {} id 85d6e1e2b1a3 bytes 1048576 {cluster} pool rbd", uuid(7));
        assert_eq!(lines[8], seven);
        let last = format!("client 192.0.2.1:0/1234 bytes 1048576 {cluster} pool a pool/space");
        assert_eq!(lines[9], format!("image {} {last}", uuid(9)));
        let read = record::unseal::<NamespaceCatalogRecord>(text.as_bytes()).unwrap();
        assert_eq!(read, sample_of_images());
        let name = read.images[&uuid(9)].name(uuid(9)).unwrap();
        assert_eq!(name.to_string(), format!("a pool/space/{}", uuid(9)));
        assert_eq!((read.unsettled_files().len(), read.unsettled_images().count()), (0, 1));
        assert_eq!(read.image_names(), [(7, format!("rbd/{}", uuid(7)))].into());
    }

    #[test]
    fn a_settled_image_is_no_longer_in_the_catalog() {
        let mut record = sample_of_images();
        let [seven, nine] = [7, 9].map(|n| Uuid::from_bytes([n; 16]));
        record.settle(nine);
        assert!(record.unsettled.is_empty() && !record.images.contains_key(&nine));
        record.settle(seven);
        assert!(record.images.contains_key(&seven), "that of a namespace stays");
    }

    #[test]
    fn the_catalog_format_is_as_documented() {
        let text = record::seal(&sample());
        let lines: Vec<&str> = text.lines().collect();
        let uuid = "03030303-0303-0303-0303-030303030303";
        assert_eq!(lines[..2], ["nvmfd namespaces 1", "subsystem nqn.2026-11.io.nvmfd:a"]);
        assert_eq!(lines[2], format!("namespace 3 {uuid} bytes 1048576 block 512 group 1"));
        assert_eq!(lines[3], "private 3");
        assert_eq!(lines[5], "host 7 nqn.2026-11.io.nvmfd:host1");
        assert_eq!(lines.len(), 9);
        assert_eq!(record::unseal::<NamespaceCatalogRecord>(text.as_bytes()), Ok(sample()));
    }

    #[test]
    fn a_damaged_catalog_record_is_rejected() {
        let good = record::seal(&sample()).into_bytes();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(record::unseal::<NamespaceCatalogRecord>(&bad).is_err(), "byte {at}");
            assert!(record::unseal::<NamespaceCatalogRecord>(&good[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn inconsistent_catalog_records_are_rejected() {
        let change = |change: fn(&mut NamespaceCatalogRecord)| {
            let mut record = sample();
            change(&mut record);
            record::unseal::<NamespaceCatalogRecord>(record::seal(&record).as_bytes())
        };
        let changes: [fn(&mut NamespaceCatalogRecord); 8] = [
            |r| r.entries.get_mut(&7).unwrap().private = true,
            |r| r.entries.get_mut(&3).unwrap().bytes = 0,
            |r| r.entries.get_mut(&3).unwrap().bytes = 513,
            |r| r.entries.get_mut(&3).unwrap().bytes = 1 << 63,
            |r| r.entries.get_mut(&3).unwrap().block_size_bytes = 1024,
            |r| r.entries.get_mut(&3).unwrap().ana_group = 0,
            |r| r.entries.get_mut(&3).unwrap().uuid = Uuid::from_bytes([7; 16]),
            |r| r.unsettled = [Uuid::from_bytes([3; 16])].into(),
        ];
        let seven = Uuid::from_bytes([7; 16]);
        for image in [being_made("rbd"), being_made("a/b/c"), being_made("")] {
            let mut record = sample();
            record.images.insert(seven, image);
            let bad = record::unseal::<NamespaceCatalogRecord>(record::seal(&record).as_bytes());
            assert!(bad.is_err(), "no id, or no pool");
        }
        let mut stray = sample_of_images();
        stray.unsettled.clear();
        assert!(record::unseal::<NamespaceCatalogRecord>(record::seal(&stray).as_bytes()).is_err());
        for (n, bad) in changes.into_iter().enumerate() {
            assert!(change(bad).is_err(), "change {n}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_cause_no_panic(bytes: Vec<u8>) {
            let _ = record::unseal::<NamespaceCatalogRecord>(&bytes);
        }

        #[test]
        fn arbitrary_catalog_text_causes_no_panic(
            lines in "((namespace|host|private|unsettled|image) [0-9a-z -]{0,60}\n){0,5}"
        ) {
            let _ = <NamespaceCatalogRecord as record::Record>::parse(&format!("subsystem nqn.2026-11.io.nvmfd:a\n{lines}"));
        }
    }
}
