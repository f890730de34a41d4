//! Fuzzes parsers of NVMe structures: commands, completions and pages.

use std::fmt::{Debug, Display};

use nvme::fabrics::{Authentication, Connect, ConnectData, Disconnect, PropertyGet, PropertySet};
use nvme::feature::{GetFeatures, HostBehavior, SetFeatures, Timestamp};
use nvme::identify::{
    self, Identify, IdentifyController, IdentifyControllerNvm, IdentifyNamespace,
    IdentifyNamespaceIndependent, NamespaceIds,
};
use nvme::log::{
    self, AnaGroup, AnaHeader, DiscoveryEntry, DiscoveryHeader, Effects, ErrorEntry, FirmwareSlots,
    GetLogPage, Smart, SupportedPages,
};
use nvme::reservation::{
    AcquireKeys, NotificationPage, RegisterKeys, ReleaseKey, Report, ReservationStatus,
};
use nvme::sqe::DsmRange;
use nvme::{Cqe, Nqn, PAGE_BYTES, Sgl, Sqe, Status, cm};

use super::bytes::Bytes;

/// A command, a completion, and the private data of a connection.
pub fn command(data: &[u8]) -> bool {
    let bytes: [u8; Sqe::BYTES] = Bytes::new(data).array();
    let sqe = Sqe::parse(&bytes);
    assert_eq!(sqe.emit(), bytes);
    printable(&sqe);
    if let Ok(sgl) = sqe.sgl() {
        assert_eq!(Sgl::parse(&sgl.emit()), Ok(sgl));
        assert!(sgl.invalidate_key().is_none_or(|_| matches!(sgl, Sgl::Keyed { .. })));
    }
    // Every view of the command, applied to an empty one, gives the same view.
    let sgl = Sgl::NONE;
    let (connect, property) = (Connect::parse(&sqe), PropertyGet::parse(&sqe));
    assert_eq!(Connect::parse(&connect.emit(sgl)), connect);
    assert_eq!(PropertyGet::parse(&property.emit()), property);
    let (set, leave) = (PropertySet::parse(&sqe), Disconnect::parse(&sqe));
    assert_eq!(PropertySet::parse(&set.emit()), set);
    assert_eq!(Disconnect::parse(&leave.emit()), leave);
    let said = Authentication::parse(&sqe);
    assert_eq!(Authentication::parse(&said.emit(sqe.fabrics_type(), sgl)), said);
    let (get, set) = (GetFeatures::parse(&sqe), SetFeatures::parse(&sqe));
    assert_eq!(GetFeatures::parse(&get.emit(sgl)), get);
    assert_eq!(SetFeatures::parse(&set.emit(sgl)), set);
    let (identify, log) = (Identify::parse(&sqe), GetLogPage::parse(&sqe));
    assert_eq!(Identify::parse(&identify.emit(sgl)), identify);
    assert_eq!(GetLogPage::parse(&log.emit(sgl)), log);
    assert!((4..=1 << 34).contains(&log.len_bytes()));
    let report = Report::parse(&sqe);
    assert_eq!(Report::parse(&report.emit(sqe.nsid, sgl)), report);

    let answer = Cqe::parse(&Bytes::new(data).array());
    assert_eq!(Cqe::parse(&answer.emit()), answer);
    printable(&answer);
    let status = Status::from_field(answer.result as u16);
    assert_eq!(Status::from_field(status.field()), status);
    shown(&status);

    match cm::Request::from_private_data(data) {
        Ok(request) => assert_eq!(cm::Request::parse(&request.emit()), request),
        Err(_) => assert!(data.len() < cm::Request::BYTES),
    }
    let reject = cm::Reject::from_private_data(data);
    assert_eq!(reject.is_some(), data.len() >= cm::Reject::BYTES && data.starts_with(&[0, 0]));
    reject.iter().for_each(|reject| shown(&reject.status));
    data.len() >= Sqe::BYTES
}

/// Parses, emits and parses a structure of this size, which must be equal.
macro_rules! survives {
    ($name:ident, $page:expr) => {{
        let read = $name::parse($page.first_chunk().expect("a page is longer"));
        assert_eq!($name::parse(&read.emit()), read);
        printable(&read);
        read
    }};
}

/// The same for structures that fill a page.
macro_rules! page_survives {
    ($name:ident, $page:expr) => {{
        let read = $name::parse($page);
        let mut again = [0xA5; PAGE_BYTES];
        read.emit(&mut again);
        assert_eq!($name::parse(&again), read);
        printable(&read);
        read
    }};
}

/// A page of data, as every structure that it could be.
pub fn page(data: &[u8]) -> bool {
    let page: &[u8; PAGE_BYTES] = &Bytes::new(data).array();
    let id = page_survives!(IdentifyController, page);
    named(id.subnqn.nqn().ok());
    shown(&id.sn);
    shown(&id.mn);
    shown(&id.fr);
    let namespace = page_survives!(IdentifyNamespace, page);
    assert!(namespace.block_bytes().is_none_or(|bytes| bytes.is_power_of_two() && bytes >= 512));
    page_survives!(IdentifyNamespaceIndependent, page);
    page_survives!(IdentifyControllerNvm, page);
    page_survives!(NamespaceIds, page);
    page_survives!(Effects, page);
    survives!(SupportedPages, page);
    survives!(ErrorEntry, page);
    survives!(Smart, page);
    survives!(FirmwareSlots, page);
    survives!(AnaHeader, page);
    survives!(AnaGroup, page);
    survives!(DiscoveryHeader, page);
    survives!(Timestamp, page);
    survives!(HostBehavior, page);
    survives!(DsmRange, page);
    survives!(RegisterKeys, page);
    survives!(AcquireKeys, page);
    survives!(ReleaseKey, page);
    survives!(ReservationStatus, page);
    survives!(NotificationPage, page);
    let entry = survives!(DiscoveryEntry, page);
    named(entry.subnqn.nqn().ok());
    shown(&entry.trsvcid);
    shown(&entry.traddr);
    let connect = survives!(ConnectData, page);
    named(connect.subnqn().ok());
    named(connect.hostnqn().ok());
    lists(page);
    assert_eq!(DsmRange::parse_all(data).count(), data.len() / DsmRange::BYTES);
    data.len() >= 512
}

fn lists(page: &[u8; PAGE_BYTES]) {
    let ids: Vec<u32> = identify::namespaces(page).collect();
    assert!(ids.len() <= identify::NAMESPACES_PER_PAGE && !ids.contains(&0));
    assert!(log::changed_namespaces(page).eq(ids.iter().copied()));
    let mut again = [0xA5; PAGE_BYTES];
    identify::emit_namespaces(&mut again, 0, ids.iter().copied());
    assert!(identify::namespaces(&again).eq(ids));
    let ids: Vec<u16> = identify::controllers(page).collect();
    identify::emit_controllers(&mut again, 0, ids.iter().copied());
    assert!(ids.len() <= identify::CONTROLLERS_PER_PAGE);
    assert!(identify::controllers(&again).eq(ids));
    assert!(identify::command_sets(page).count() <= PAGE_BYTES / 8);
}

/// A valid name is valid in every form.
fn named(name: Option<Nqn>) {
    if let Some(name) = name {
        assert_eq!(Nqn::new(name.as_str()), Ok(name));
        assert_eq!(Nqn::parse_field(&name.emit()), Ok(name));
        assert!(name.as_bytes().len() < Nqn::FIELD_BYTES);
        shown(&name);
        name.form();
    }
}

/// Printed text contains no control character for a terminal.
fn shown(what: &impl Display) {
    let text = what.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

fn printable(what: &impl Debug) {
    let text = format!("{what:?}");
    assert!(!text.is_empty() && !text.chars().any(char::is_control), "{text:?}");
}
