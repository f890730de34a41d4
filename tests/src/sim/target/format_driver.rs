//! Formats namespaces in the simulation. Requests, the state machine of a format, its persistence,
//! the drain barrier, the snapshots and the responses are the target's own
//! (`nvmfd::core::subsystem::lba_format`); the steps of its blocking task run between iterations of
//! the reactors, and the backing store is simulated.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel, sync_channel};

use nvme::Status;
use nvmfd::blockdev::{BlockSizes, DeviceId, IoCompletion};
use nvmfd::core::message::Message;
use nvmfd::core::sched::DrainBarrier;
use nvmfd::core::sched::offload::NamespaceJob;
use nvmfd::core::subsystem::format_job::FormatJob;
use nvmfd::core::subsystem::lba_format::Format;
use nvmfd::core::subsystem::ns_request::NamespaceRequest;
use nvmfd::state::block_size;
use rdma::Tag;
use tempfile::TempDir;

use super::{Target, subnqn};
use crate::sim::device::SimDevice;
use crate::sim::mutants::SeededBug;
use crate::sim::oracle::blocks::SECTOR_BYTES;
use crate::sim::scenario::Profile;

/// Steps of erasing a store; one more makes it durable.
const PIECES: u64 = 4;
/// Blocks that a seeded bug does not erase.
const LEFT: u64 = 4;

/// Formats completed and in progress.
#[derive(Default)]
pub(super) struct Formatter {
    /// Directory of the block sizes.
    kept: Option<TempDir>,
    /// The format of each namespace.
    formats: Vec<Arc<Format>>,
    /// Requests of hosts.
    orders: VecDeque<NamespaceJob>,
    under_way: Vec<Option<Running>>,
    /// Number of formats so far.
    number: u64,
}

/// A format in progress.
struct Running {
    /// Its number.
    number: u64,
    /// The reactor that waits for the response, and its tag.
    asker: (usize, Tag),
    backing: DeviceId,
    sectors: u32,
    block_bytes: u32,
    stage: Stage,
}

enum Stage {
    /// Earlier commands drain; the receiver is notified when the last one has ended.
    Draining(FormatJob, Receiver<()>),
    /// This number of steps is done.
    Erasing(FormatJob, u64),
    /// It has ended with this result; reactors have yet to see that.
    Telling(Result<(), Status>, Vec<Receiver<()>>),
}

/// Result of a step of all formats.
#[derive(Default)]
pub struct FormatProgress {
    /// Formats that are erasing, with a next step due: namespace and number.
    pub erasing: Vec<(usize, u64)>,
    /// Namespaces whose block size has changed.
    pub reshaped: Vec<usize>,
    /// Reactors have to check the shared state.
    pub told: bool,
}

impl Target {
    /// The target starts: loads the block sizes.
    ///
    /// # Errors
    /// There is no directory, or a file is invalid.
    pub(super) fn start_formats(&mut self, profile: &Profile) -> Result<(), String> {
        let spaces = profile.shapes.len();
        if profile.formats == 0 {
            let fixed = |space| Format::fixed(subnqn(), space as u32 + 1);
            self.formatter.formats = (0..spaces).map(fixed).collect();
            return Ok(());
        }
        if self.formatter.kept.is_none() || self.plant == Some(SeededBug::LostFormat) {
            let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
            self.formatter.kept = Some(directory);
        }
        self.formatter.under_way = (0..spaces).map(|_| None).collect();
        let formats = (0..spaces).map(|space| self.kept_format(profile, space));
        self.formatter.formats = formats.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Loads the block size of a namespace that is opened again.
    pub(super) fn renew_format(&mut self, profile: &Profile, space: usize) -> Result<(), String> {
        if profile.formats > 0 {
            self.formatter.formats[space] = self.kept_format(profile, space)?;
        }
        Ok(())
    }

    fn kept_format(&self, profile: &Profile, space: usize) -> Result<Arc<Format>, String> {
        let directory = self.formatter.kept.as_ref().ok_or("nothing is kept")?.path();
        let nsid = space as u32 + 1;
        let (store, generation) = self.stores[space];
        let store = format!("/store/{store}/{generation}");
        let configured = profile.shapes[space].1;
        block_size::open(
            (subnqn(), nsid),
            directory,
            self.name(space),
            Path::new(&store),
            configured,
        )
    }

    /// The format of a namespace.
    pub(super) fn format(&self, space: usize) -> &Arc<Format> {
        &self.formatter.formats[space]
    }

    /// Block size of a namespace.
    pub(super) fn block_bytes(&self, profile: &Profile, space: usize) -> u32 {
        self.format(space).block_size_bytes().unwrap_or(profile.shapes[space].1)
    }

    /// LBA formats of a namespace.
    pub(super) fn formats_of(&self, profile: &Profile, space: usize) -> BlockSizes {
        let shift = self.block_bytes(profile, space).trailing_zeros() as u8;
        BlockSizes::those(|each| profile.reshapes || each == shift)
    }

    /// A namespace is removed: stops its format.
    pub(super) fn interrupt_format(&mut self, space: usize, disk: &mut SimDevice) {
        if let Some(progress) = self.format(space).under_way() {
            progress.stop();
        }
        disk.end_erasing(self.stores[space].0);
    }

    /// A host has requested a format, which is independent of other requests.
    pub(super) fn order_format(&mut self, order: NamespaceJob) {
        self.formatter.orders.push_back(order);
    }

    /// The target has crashed: formats in progress are lost.
    pub(super) fn drop_formats(&mut self) {
        self.formatter.orders.clear();
        self.formatter.under_way.fill_with(|| None);
    }

    /// Continues all formats, and begins requested ones.
    ///
    /// # Errors
    /// Blocks are in use that must not be.
    pub fn go_on(
        &mut self,
        profile: &Profile,
        disk: &mut SimDevice,
    ) -> Result<FormatProgress, String> {
        let mut news = FormatProgress::default();
        while let Some(order) = self.formatter.orders.pop_front() {
            news.told = true;
            if let Err(status) = self.begin(&order, profile) {
                self.answer((order.reactor, order.tag), Err(status));
            }
        }
        for space in 0..self.formatter.under_way.len() {
            let Some(mut format) = self.formatter.under_way[space].take() else { continue };
            match format.stage {
                Stage::Draining(mut course, waiting) => {
                    if waiting.try_recv() != Err(TryRecvError::Disconnected) {
                        format.stage = Stage::Draining(course, waiting);
                    } else if let Err(status) = course.hold() {
                        format.stage = Stage::Erasing(course, 0);
                        self.finish(space, format, Err(status), profile, disk, &mut news);
                        continue;
                    } else {
                        if self.served[space] == Some(format.backing) {
                            disk.begin_erasing(self.stores[space].0)?;
                        }
                        format.stage = Stage::Erasing(course, 0);
                        news.erasing.push((space, format.number));
                    }
                }
                Stage::Telling(outcome, mut reactors) => {
                    reactors.retain(|answer| answer.try_recv() == Err(TryRecvError::Empty));
                    if reactors.is_empty() {
                        self.answer(format.asker, outcome);
                        news.told = true;
                        continue;
                    }
                    format.stage = Stage::Telling(outcome, reactors);
                }
                erasing @ Stage::Erasing(..) => format.stage = erasing,
            }
            self.formatter.under_way[space] = Some(format);
        }
        Ok(news)
    }

    fn begin(&mut self, order: &NamespaceJob, profile: &Profile) -> Result<(), Status> {
        let NamespaceRequest::Format(wish) = &order.what else {
            return Err(Status::INTERNAL_ERROR);
        };
        let (space, gone) = (wish.nsid as usize - 1, Status::INVALID_NAMESPACE.with_dnr());
        let subsystem = self.registry.subsystem(&subnqn()).ok_or(gone)?;
        let namespace = subsystem.namespace(wish.nsid).map_err(|_| gone)?;
        let backing = self.served[space].ok_or(gone)?;
        if self.formatter.under_way[space].is_some() {
            // Of a namespace that was removed and added again meanwhile.
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let course = FormatJob::begin(*wish, namespace, self.format(space))?;
        let (fence, waiting) = channel();
        self.formatter.number += 1;
        self.formatter.under_way[space] = Some(Running {
            number: self.formatter.number,
            asker: (order.reactor, order.tag),
            backing,
            sectors: self.sizes[space],
            block_bytes: self.block_bytes(profile, space),
            stage: Stage::Draining(course, waiting),
        });
        self.publish(profile);
        // After the notification: later commands are rejected.
        self.registry.fence(&Arc::new(DrainBarrier::around(subnqn(), wish.nsid, fence)));
        Ok(())
    }

    /// The next step of a format that is erasing.
    pub fn erase(
        &mut self,
        space: usize,
        number: u64,
        profile: &Profile,
        disk: &mut SimDevice,
    ) -> FormatProgress {
        let mut news = FormatProgress::default();
        let is_it = |format: &mut Running| {
            format.number == number && matches!(format.stage, Stage::Erasing(..))
        };
        let slot = self.formatter.under_way.get_mut(space);
        let Some(mut format) = slot.and_then(|slot| slot.take_if(is_it)) else { return news };
        let Stage::Erasing(course, done) = &mut format.stage else { return news };
        let block = u64::from(format.block_bytes);
        let blocks = u64::from(format.sectors) * u64::from(SECTOR_BYTES) / block;
        let last = match self.plant {
            Some(SeededBug::HalfFormat) => blocks.saturating_sub(LEFT),
            _ => blocks,
        };
        let at = |piece: u64| (blocks * piece / PIECES).min(last) * block;
        let store = self.stores[space].0;
        let outcome = match *done {
            _ if course.progress().is_stopped() => Err(Status::COMMAND_INTERRUPTED),
            PIECES => disk.make_durable(store),
            piece => disk.erase(store, at(piece), at(piece + 1)),
        };
        if outcome.is_ok() && *done < PIECES {
            *done += 1;
            course.progress().set(*done, PIECES);
            news.erasing.push((space, number));
            self.formatter.under_way[space] = Some(format);
        } else {
            self.finish(space, format, outcome, profile, disk, &mut news);
        }
        news
    }

    /// A format has ended; the response is not sent yet.
    fn finish(
        &mut self,
        space: usize,
        format: Running,
        erased: Result<(), Status>,
        profile: &Profile,
        disk: &mut SimDevice,
        news: &mut FormatProgress,
    ) {
        let Running { stage: Stage::Erasing(course, _), .. } = format else { return };
        let Running { number, asker, backing, sectors, block_bytes, .. } = format;
        let is_there = self.served[space] == Some(backing);
        let erased = if is_there { erased } else { Err(Status::INVALID_NAMESPACE.with_dnr()) };
        let (same, store) = (sectors == self.sizes[space], self.stores[space].0);
        if is_there {
            disk.end_erasing(store);
        }
        let outcome = course.finish(erased, |block_bytes| {
            if !same {
                return Err(Status::NAMESPACE_NOT_READY);
            }
            disk.reformat(store, block_bytes);
            Ok(())
        });
        if self.block_bytes(profile, space) != block_bytes && is_there {
            news.reshaped.push(space);
        }
        self.publish_again(profile);
        // After the notification, so that all queues agree once the host has its response.
        let ask = |reactor: usize| {
            let (answer, answered) = sync_channel(1);
            self.registry.reactor(reactor).send(Message::Caught(answer));
            answered
        };
        let waiting = (0..self.reactors.len()).map(ask).collect();
        news.told = true;
        let stage = Stage::Telling(outcome, waiting);
        self.formatter.under_way[space] =
            Some(Running { number, asker, backing, sectors, block_bytes, stage });
    }

    fn answer(&self, (reactor, tag): (usize, Tag), outcome: Result<(), Status>) {
        let done = IoCompletion { tag, buf: None, outcome };
        let _ = self.registry.reactor(reactor).send(Message::Answer(done));
    }
}
