//! Single commands, executed one after another.

use nvme::copy::{Copy, CopyRange};
use nvme::fabrics::{PropertyGet, PropertySet};
use nvme::feature::{GetFeatures, SetFeatures};
use nvme::identify::{
    Cns, Csi, Identify, IdentifyController, IdentifyNamespace, NAMESPACES_PER_PAGE, namespaces,
};
use nvme::log::GetLogPage;
use nvme::property::Property;
use nvme::sqe::{DsmAttributes, DsmRange, Flags};
use nvme::{IoOpcode, PAGE_BYTES, Sgl, Sqe};
use rdma::Buf;

use super::transfer::Range;
use super::{Error, Host};
use crate::session::{Data, Done, Refused, Request, Response};

/// A page of Identify, in a separate allocation.
pub type Page = Box<[u8; PAGE_BYTES]>;

/// Maximum number of namespaces that are listed, so that no controller can make the listing endless.
const MOST_NAMESPACES: usize = 1 << 20;

impl Host {
    /// Sends one command and waits for its completion; any status but success is an error. Returns
    /// the result, and the data.
    ///
    /// # Errors
    /// The status, or the end of the association.
    pub fn command(
        &mut self,
        queue: u16,
        what: &'static str,
        sqe: Sqe,
        data: Data,
    ) -> Result<(u64, Data), Error> {
        let tag = self.send(queue, sqe, data)?;
        let mut found = None;
        self.drive(None, |host| {
            host.keep_others_but(tag, &mut found);
            found.is_some()
        });
        let Some(done) = found else { return Err(self.why()) };
        self.take_answer(what, done)
    }

    /// Compare and Write as a fused operation: both commands are executed, or none. No other host
    /// changes the blocks between them. `with` and `from` have the same length.
    ///
    /// # Errors
    /// As [`Host::command`]; Compare Failure if the blocks differ. If both commands have failed,
    /// the status of the first one.
    pub fn compare_and_write(
        &mut self,
        queue: u16,
        range: Range,
        with: &[u8],
        from: &[u8],
        fua: bool,
    ) -> Result<(), Error> {
        let blocks = with.len().checked_div(range.block_bytes as usize).unwrap_or(0);
        let nlb_z = blocks.checked_sub(1).and_then(|z| u16::try_from(z).ok());
        let Some(nlb_z) = nlb_z.filter(|_| with.len() == from.len()) else {
            return Err(Error::Local("both halves are of as many whole blocks".into()));
        };
        if self.session.capacity(queue) < 2 {
            return Err(Error::Local("the queue has no room for two commands".into()));
        }
        let half = |opcode, fuse| {
            let flags = Flags::SGL.with_fuse(fuse);
            Sqe::io(opcode, range.nsid).with_range(range.slba, nlb_z).with_flags(flags)
        };
        let compare = half(IoOpcode::COMPARE, Flags::FUSED_FIRST);
        let write = half(IoOpcode::WRITE, Flags::FUSED_SECOND).with_fua(fua);
        let (with, from) = (Data::Buf(self.filled(with)?), Data::Buf(self.filled(from)?));
        let first = match self.send(queue, compare, with) {
            Ok(tag) => tag,
            Err(error) => {
                self.give_back(from);
                return Err(error);
            }
        };
        let second = self.send(queue, write, from)?;
        let (mut compared, mut written) = (None, None);
        self.drive(None, |host| {
            host.keep_others_but(first, &mut compared);
            host.take_other(second, &mut written);
            compared.is_some() && written.is_some()
        });
        let (Some(compared), Some(written)) = (compared, written) else { return Err(self.why()) };
        let compared = self.take_answer("Compare", compared);
        let written = self.take_answer("Write", written);
        for (_, data) in [compared?, written?] {
            self.give_back(data);
        }
        Ok(())
    }

    /// Sends one command, as soon as there is a free slot.
    fn send(&mut self, queue: u16, sqe: Sqe, data: Data) -> Result<u64, Error> {
        let tag = self.next_tag;
        self.next_tag = self.next_tag.wrapping_add(1) | super::OWN_TAGS;
        let mut request = Request { sqe, data, tag };
        while let Err((back, why)) = self.submit(queue, request) {
            if why != Refused::Full {
                self.give_back(back.data);
                return Err(self.refused(why));
            }
            // The caller's own requests fill the queue.
            request = back;
            self.drive(None, |host| {
                host.keep_others();
                host.has_room(queue) || host.session.ended().is_some()
            });
        }
        Ok(tag)
    }

    fn take_answer(&mut self, what: &'static str, done: Done) -> Result<(u64, Data), Error> {
        match done.outcome {
            Ok(Response { status, result }) if status.is_success() => Ok((result, done.data)),
            Ok(Response { status, .. }) => {
                self.give_back(done.data);
                Err(Error::Status { what, status })
            }
            Err(_) => {
                self.give_back(done.data);
                Err(self.why())
            }
        }
    }

    /// As [`Host::command`], with data that the controller writes.
    ///
    /// # Errors
    /// As [`Host::command`].
    pub fn command_in(
        &mut self,
        queue: u16,
        what: &'static str,
        sqe: Sqe,
        into: &mut [u8],
    ) -> Result<u64, Error> {
        let buf = self.take(length(into)?)?;
        let (result, data) = self.command(queue, what, sqe, Data::Buf(buf))?;
        if let Data::Buf(buf) = data {
            into.copy_from_slice(self.pool.bytes(&buf));
            self.pool.give(buf);
        }
        Ok(result)
    }

    /// As [`Host::command`], with data that the controller reads.
    ///
    /// # Errors
    /// As [`Host::command`].
    pub fn command_out(
        &mut self,
        queue: u16,
        what: &'static str,
        sqe: Sqe,
        from: &[u8],
    ) -> Result<u64, Error> {
        let mut buf = self.take(length(from)?)?;
        self.pool.bytes_mut(&mut buf).copy_from_slice(from);
        let (result, data) = self.command(queue, what, sqe, Data::Buf(buf))?;
        self.give_back(data);
        Ok(result)
    }

    /// Returns any page of Identify.
    ///
    /// # Errors
    /// The status, or the end of the association.
    pub fn identify(&mut self, identify: Identify) -> Result<Page, Error> {
        let mut page = Box::new([0; PAGE_BYTES]);
        self.command_in(0, "Identify", identify.emit(Sgl::NONE), page.as_mut_slice())?;
        Ok(page)
    }

    /// Sends Identify Controller again.
    ///
    /// # Errors
    /// As for all of these methods: the status, or the end of the association.
    pub fn identify_controller(&mut self) -> Result<IdentifyController, Error> {
        Ok(IdentifyController::parse(&*self.identify(Identify::new(Cns::CONTROLLER, 0))?))
    }

    /// Sends Identify Namespace.
    ///
    /// # Errors
    /// As above.
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace, Error> {
        Ok(IdentifyNamespace::parse(&*self.identify(Identify::new(Cns::NAMESPACE, nsid))?))
    }

    /// Returns an error for the user if another host has formatted a namespace that had blocks of
    /// `block_bytes`: the reason why commands were rejected, or why data were not found. `refused`:
    /// commands were completed with Format In Progress.
    pub(crate) fn was_formatted(
        &mut self,
        nsid: u32,
        block_bytes: u32,
        refused: bool,
    ) -> Option<Error> {
        let now = self.identify_namespace(nsid).ok().and_then(|found| found.block_bytes());
        let what = match now {
            Some(now) if now != block_bytes => {
                format!("its blocks have {now} bytes now and had {block_bytes}, and ")
            }
            _ if refused => String::new(),
            _ => return None,
        };
        Some(Error::Local(format!(
            "another host has formatted namespace {nsid}: {what}its data are lost"
        )))
    }

    /// Returns the ids of all active namespaces above `after`.
    ///
    /// # Errors
    /// As above.
    pub fn namespaces(&mut self, after: u32, csi: Option<Csi>) -> Result<Vec<u32>, Error> {
        let mut all: Vec<u32> = Vec::new();
        let mut after = after;
        loop {
            let identify = match csi {
                None => Identify::new(Cns::ACTIVE_NAMESPACES, after),
                Some(csi) => Identify { csi, ..Identify::new(Cns::CSI_ACTIVE_NAMESPACES, after) },
            };
            let page = self.identify(identify)?;
            let before = all.len();
            // A list that does not ascend would make this loop endless.
            let ascending = namespaces(&page).filter(|&id| id > after);
            all.extend(ascending);
            match all.last() {
                Some(&last) if all.len() - before == NAMESPACES_PER_PAGE => after = last,
                _ => return Ok(all),
            }
            if all.len() >= MOST_NAMESPACES {
                return Err(Error::Local("the controller lists namespaces without end".into()));
            }
        }
    }

    /// Reads `len` bytes of a log page (rounded up to whole dwords on the wire) from the offset in
    /// `page`, in as many commands as necessary. Only the last of them acknowledges an event, if
    /// `page.rae` permits it.
    ///
    /// # Errors
    /// As above.
    pub fn log(&mut self, page: GetLogPage, len: usize) -> Result<Vec<u8>, Error> {
        let most = self.session.max_transfer_bytes().min(self.largest_bytes) as usize;
        // Controllers without extended data do not support offsets.
        let most = if self.session.controller().lpa.extended_data() { most } else { len.max(4) };
        let mut bytes = vec![0; len.next_multiple_of(4)];
        let mut at = 0;
        while at < bytes.len() {
            let end = bytes.len().min(at + most);
            let piece = GetLogPage {
                lpo: page.lpo.saturating_add(at as u64),
                numd_z: ((end - at) / 4 - 1) as u32,
                rae: page.rae || end < bytes.len(),
                ..page
            };
            self.command_in(0, "Get Log Page", piece.emit(Sgl::NONE), &mut bytes[at..end])?;
            at = end;
        }
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Gets a feature: returns its dword, and reads its data into `into`, which must have their length.
    ///
    /// # Errors
    /// As above.
    pub fn feature(&mut self, get: GetFeatures, into: &mut [u8]) -> Result<u32, Error> {
        let (sqe, what) = (get.emit(Sgl::NONE), "Get Features");
        let result = match into.is_empty() {
            true => self.command(0, what, sqe, Data::None)?.0,
            false => self.command_in(0, what, sqe, into)?,
        };
        Ok(result as u32)
    }

    /// Sets a feature, with `data` if it has any. `cdw12` is for the few features that use it.
    ///
    /// # Errors
    /// As above.
    pub fn set_feature(&mut self, set: SetFeatures, cdw12: u32, data: &[u8]) -> Result<u32, Error> {
        let (sqe, what) = (Sqe { cdw12, ..set.emit(Sgl::NONE) }, "Set Features");
        let result = match data.is_empty() {
            true => self.command(0, what, sqe, Data::None)?.0,
            false => self.command_out(0, what, sqe, data)?,
        };
        Ok(result as u32)
    }

    /// Gets a property.
    ///
    /// # Errors
    /// As above.
    pub fn property(&mut self, get: PropertyGet) -> Result<u64, Error> {
        let (value, _) = self.command(0, "Property Get", get.emit(), Data::None)?;
        let short = get.size_bytes() != Some(8);
        Ok(if short { value & 0xFFFF_FFFF } else { value })
    }

    /// Sets a property.
    ///
    /// # Errors
    /// As above.
    pub fn set_property(&mut self, property: Property, value: u64) -> Result<(), Error> {
        let sqe = PropertySet::new(property, value).emit();
        self.command(0, "Property Set", sqe, Data::None).map(|_| ())
    }

    /// Flushes a namespace (or all, [`nvme::NSID_ALL`]).
    ///
    /// # Errors
    /// As above.
    pub fn flush(&mut self, nsid: u32) -> Result<(), Error> {
        self.command(1, "Flush", Sqe::io(IoOpcode::FLUSH, nsid), Data::None).map(|_| ())
    }

    /// Dataset Management for 1 to 256 ranges.
    ///
    /// # Errors
    /// As above, or the number of ranges.
    pub fn dataset_management(
        &mut self,
        nsid: u32,
        attributes: DsmAttributes,
        ranges: &[DsmRange],
    ) -> Result<(), Error> {
        let Some(nr_z) = ranges.len().checked_sub(1).and_then(|z| u8::try_from(z).ok()) else {
            return Err(Error::Local("Dataset Management takes 1 to 256 ranges".into()));
        };
        let data: Vec<u8> = ranges.iter().flat_map(DsmRange::emit).collect();
        let sqe = Sqe { cdw11: attributes.0, ..Sqe::deallocation(nsid, nr_z) };
        self.command_out(1, "Dataset Management", sqe, &data).map(|_| ())
    }

    /// Copy of 1 to 256 ranges; the number of ranges in `copy` itself is ignored.
    ///
    /// # Errors
    /// As above, the number of ranges, or an unsupported format.
    pub fn copy(&mut self, nsid: u32, copy: Copy, ranges: &[CopyRange]) -> Result<(), Error> {
        let Some(nr_z) = ranges.len().checked_sub(1).and_then(|z| u8::try_from(z).ok()) else {
            return Err(Error::Local("Copy takes 1 to 256 ranges".into()));
        };
        let Some(range_bytes) = copy.range_bytes() else {
            return Err(Error::Local("Copy has formats 0 and 1".into()));
        };
        let descriptor = |range: &CopyRange| {
            let mut bytes = range.emit().to_vec();
            bytes.resize(range_bytes as usize, 0);
            bytes
        };
        let data: Vec<u8> = ranges.iter().flat_map(descriptor).collect();
        let sqe = Copy { flags: copy.flags.with_nr_z(nr_z), ..copy }.emit(nsid, Sgl::NONE);
        self.command_out(1, "Copy", sqe, &data).map(|_| ())
    }

    /// Deallocates `blocks` from `slba` on.
    ///
    /// # Errors
    /// As above.
    pub fn deallocate(&mut self, nsid: u32, slba: u64, blocks: u32) -> Result<(), Error> {
        let attributes = DsmAttributes(0).with_deallocate(true);
        self.dataset_management(nsid, attributes, &[DsmRange { attributes: 0, blocks, slba }])
    }

    fn has_room(&self, queue: u16) -> bool {
        let session = &self.session;
        session.outstanding(queue) < session.capacity(queue) && !session.waits_for_sends()
    }

    /// Stores the requests of the caller that are done.
    fn keep_others(&mut self) {
        while let Some(done) = self.session.next_done() {
            self.others.push_back(done);
        }
    }

    /// As `keep_others`, except for one of the host's own requests.
    fn keep_others_but(&mut self, tag: u64, found: &mut Option<Done>) {
        while let Some(done) = self.session.next_done() {
            match done.tag == tag {
                true => *found = Some(done),
                false => self.others.push_back(done),
            }
        }
    }

    /// Takes one of the host's own requests that was stored.
    fn take_other(&mut self, tag: u64, found: &mut Option<Done>) {
        if let Some(at) = self.others.iter().position(|done| done.tag == tag) {
            *found = self.others.remove(at);
        }
    }

    pub(super) fn give_back(&mut self, data: Data) {
        match data {
            Data::None => {}
            Data::Buf(buf) => self.pool.give(buf),
            Data::Exposed { memory, .. } => self.revoke(memory),
        }
    }

    pub(super) fn refused(&mut self, why: Refused) -> Error {
        match (why, self.session.ended()) {
            (Refused::NotReady, Some(_)) => self.why(),
            _ => Error::Local(why.to_string()),
        }
    }

    /// Returns a buffer with these bytes.
    pub(super) fn filled(&mut self, from: &[u8]) -> Result<Buf, Error> {
        let mut buf = self.take(length(from)?)?;
        self.pool.bytes_mut(&mut buf).copy_from_slice(from);
        Ok(buf)
    }
}

fn length(bytes: &[u8]) -> Result<u32, Error> {
    u32::try_from(bytes.len())
        .map_err(|_| Error::Local("more data than one command can move".into()))
}
