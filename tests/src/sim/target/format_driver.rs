//! Drives the formats of the product (`nvmfd::provision::format_task`) between iterations of
//! reactors: the erase takes simulated time, on a simulated device, and the record of the block size
//! is in a simulated directory.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use nvme::{Nqn, Status};
use nvmfd::blockdev::{BlockSizes, DeviceId};
use nvmfd::core::registry::Registry;
use nvmfd::core::subsystem::lba_format::Format;
use nvmfd::core::subsystem::ns_request::FormatRequest;
use nvmfd::provision::format_task::{FormatCompletion, FormatDevices, FormatTask};
use nvmfd::state::block_size;
use nvmfd::worker::answer;
use rdma::Tag;

use super::{Target, subnqn};
use crate::sim::device::SimDevice;
use crate::sim::mutants::SeededBug;
use crate::sim::oracle::blocks::SECTOR_BYTES;
use crate::sim::scenario::Profile;

/// Steps of erasing a store; one more makes it durable.
const PIECES: u64 = 4;
/// Blocks that a seeded bug does not erase.
const LEFT: u64 = 4;
/// Of a thousand formats, those at whose end the process is killed.
const KILLS: u16 = 200;

/// Formats completed and in progress.
#[derive(Debug, Default)]
pub(super) struct Formatter {
    /// Of each namespace.
    formats: Vec<Arc<Format>>,
    /// Requests of hosts, each with the reactor that waits for the response, and its tag.
    orders: VecDeque<(FormatRequest, (usize, Tag))>,
    under_way: Vec<Running>,
    /// Number of formats so far.
    number: u64,
}

/// A format in progress.
#[derive(Debug)]
struct Running {
    number: u64,
    /// The reactor that waits for the response, and its tag.
    asker: (usize, Tag),
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Earlier commands complete.
    Draining(FormatTask<FormattedSpace>),
    /// Number of completed steps.
    Erasing(FormatTask<FormattedSpace>, u64),
    /// It has ended; reactors do not have the new state yet.
    Ended(FormatCompletion),
}

/// A namespace and its device at the beginning of a format.
#[derive(Debug)]
struct FormattedSpace {
    space: usize,
    backing: DeviceId,
    sectors: u32,
    block_bytes: u32,
}

/// Result of a step of all formats.
#[derive(Default)]
pub struct FormatProgress {
    /// Formats that have a next step.
    pub erasing: Vec<u64>,
    /// Namespaces whose block size has changed.
    pub reshaped: Vec<usize>,
    /// Reactors have to check the shared state.
    pub told: bool,
    /// The process hangs in an operation on files, and will be killed in it.
    pub killed: bool,
}

/// The target and its devices, for a format.
struct Devices<'a> {
    target: &'a mut Target,
    profile: &'a Profile,
    disk: &'a mut SimDevice,
}

/// A process that hangs in an operation on files publishes nothing.
impl FormatDevices for Devices<'_> {
    type Device = FormattedSpace;

    fn registry(&self) -> &Registry {
        &self.target.registry
    }

    fn device(&self, _: Nqn, nsid: u32) -> Option<(FormattedSpace, Arc<Format>)> {
        let target = &self.target;
        let space = nsid as usize - 1;
        let backing = (*target.served.get(space)?)?;
        let (sectors, block_bytes) = (target.sizes[space], target.block_sizes[space]);
        let device = FormattedSpace { space, backing, sectors, block_bytes };
        Some((device, Arc::clone(&target.formatter.formats[space])))
    }

    fn is_served(&self, _: Nqn, _: u32, device: &FormattedSpace) -> bool {
        self.target.served[device.space] == Some(device.backing)
    }

    fn reformat(&mut self, device: &FormattedSpace, block_bytes: u32) -> bool {
        let same = self.target.sizes[device.space] == device.sectors;
        if same && !self.target.is_dead() {
            self.disk.reformat(self.target.stores[device.space].0, block_bytes);
            self.target.block_sizes[device.space] = block_bytes;
            if self.target.plant == Some(SeededBug::EarlyFormat) {
                self.target.publish_again(self.profile);
            }
        }
        same
    }

    fn republish(&mut self, _: &Nqn) {
        self.target.publish_again(self.profile);
    }
}

impl Target {
    /// The target starts: loads the block sizes.
    ///
    /// # Errors
    /// It is invalid.
    pub(super) fn start_formats(&mut self, profile: &Profile) -> Result<(), String> {
        let formats = (0..profile.shapes.len()).map(|space| self.kept_format(profile, space));
        self.formatter.formats = formats.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Loads the block size of a namespace that is opened again.
    pub(super) fn renew_format(&mut self, profile: &Profile, space: usize) -> Result<(), String> {
        let format = self.kept_format(profile, space)?;
        self.block_sizes[space] = format.block_size_bytes().unwrap_or(profile.shapes[space].1);
        self.formatter.formats[space] = format;
        Ok(())
    }

    fn kept_format(&self, profile: &Profile, space: usize) -> Result<Arc<Format>, String> {
        let nsid = space as u32 + 1;
        if profile.formats == 0 {
            return Ok(Format::fixed(subnqn(), nsid));
        }
        let (store, generation) = self.stores[space];
        let store = format!("/store/{store}/{generation}");
        block_size::open(
            (subnqn(), nsid),
            self.state_unless(SeededBug::LostFormat),
            self.name(space),
            Path::new(&store),
            profile.shapes[space].1,
        )
    }

    /// The format of a namespace.
    pub(super) fn format(&self, space: usize) -> &Arc<Format> {
        &self.formatter.formats[space]
    }

    /// How a namespace may be formatted.
    pub(super) fn formats_of(&self, profile: &Profile, space: usize) -> BlockSizes {
        let shift = self.block_sizes[space].trailing_zeros() as u8;
        BlockSizes::those(|each| profile.reshapes || each == shift)
    }

    /// A namespace is removed: stops its format.
    pub(super) fn interrupt_format(&mut self, space: usize, disk: &mut SimDevice) {
        if let Some(progress) = self.format(space).under_way() {
            progress.stop();
        }
        disk.end_erasing(self.stores[space].0);
    }

    /// Queues the format of a host, which does not wait for other requests.
    pub(super) fn order_format(&mut self, request: FormatRequest, asker: (usize, Tag)) {
        self.formatter.orders.push_back((request, asker));
    }

    /// The target has crashed: formats in progress are lost.
    pub(super) fn drop_formats(&mut self) {
        self.formatter.orders.clear();
        self.formatter.under_way.clear();
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
        if self.is_dead() {
            return Ok(news);
        }
        while let Some((request, asker)) = self.formatter.orders.pop_front() {
            news.told = true;
            let mut devices = Devices { target: self, profile, disk };
            match FormatTask::begin(subnqn(), request, &mut devices) {
                Ok(task) => {
                    self.formatter.number += 1;
                    let (number, stage) = (self.formatter.number, Stage::Draining(task));
                    self.formatter.under_way.push(Running { number, asker, stage });
                }
                Err(status) => answer(&self.registry, asker.0, asker.1, Err(status)),
            }
        }
        for mut format in std::mem::take(&mut self.formatter.under_way) {
            format.stage = match format.stage {
                Stage::Draining(mut task) if task.is_drained() => match task.hold() {
                    Ok(()) => {
                        if task.is_served(&Devices { target: self, profile, disk }) {
                            disk.begin_erasing(self.stores[task.device().space].0)?;
                        }
                        news.erasing.push(format.number);
                        Stage::Erasing(task, 0)
                    }
                    refused => self.finish(task, refused, profile, disk, &mut news),
                },
                Stage::Ended(ended) => match ended.outcome() {
                    Some(outcome) => {
                        let (reactor, tag) = format.asker;
                        answer(&self.registry, reactor, tag, outcome);
                        news.told = true;
                        continue;
                    }
                    None => Stage::Ended(ended),
                },
                stage => stage,
            };
            self.formatter.under_way.push(format);
        }
        Ok(news)
    }

    /// The next step of a format that erases.
    pub fn erase(
        &mut self,
        number: u64,
        profile: &Profile,
        disk: &mut SimDevice,
    ) -> FormatProgress {
        let mut news = FormatProgress::default();
        let is_it = |format: &Running| {
            format.number == number && matches!(format.stage, Stage::Erasing(..))
        };
        let place = self.formatter.under_way.iter().position(is_it).filter(|_| !self.is_dead());
        let Some(format) = place.map(|place| self.formatter.under_way.remove(place)) else {
            return news;
        };
        let Running { number, asker, stage: Stage::Erasing(task, done) } = format else {
            return news;
        };
        let FormattedSpace { space, sectors, block_bytes, .. } = *task.device();
        let block = u64::from(block_bytes);
        let blocks = u64::from(sectors) * u64::from(SECTOR_BYTES) / block;
        let last = match self.plant {
            Some(SeededBug::HalfFormat) => blocks.saturating_sub(LEFT),
            _ => blocks,
        };
        let at = |piece: u64| (blocks * piece / PIECES).min(last) * block;
        let store = self.stores[space].0;
        let outcome = match done {
            _ if task.progress().is_stopped() => Err(Status::COMMAND_INTERRUPTED),
            PIECES => disk.make_durable(store),
            piece => disk.erase(store, at(piece), at(piece + 1)),
        };
        let stage = if outcome.is_ok() && done < PIECES {
            task.progress().set(done + 1, PIECES);
            news.erasing.push(number);
            Stage::Erasing(task, done + 1)
        } else {
            self.finish(task, outcome, profile, disk, &mut news)
        };
        self.formatter.under_way.push(Running { number, asker, stage });
        news
    }

    /// A format has ended; the response is not sent yet.
    fn finish(
        &mut self,
        task: FormatTask<FormattedSpace>,
        erased: Result<(), Status>,
        profile: &Profile,
        disk: &mut SimDevice,
        news: &mut FormatProgress,
    ) -> Stage {
        let FormattedSpace { space, block_bytes, .. } = *task.device();
        if task.is_served(&Devices { target: self, profile, disk }) {
            disk.end_erasing(self.stores[space].0);
        }
        let (state, fault) = (Arc::clone(&self.state), self.next_kill(KILLS));
        let mut devices = Devices { target: self, profile, disk };
        let ended = state.run(fault, || task.finish(erased, &mut devices));
        news.killed = state.is_dead();
        if self.block_sizes[space] != block_bytes && !news.killed {
            news.reshaped.push(space);
        }
        news.told = true;
        Stage::Ended(ended)
    }
}
