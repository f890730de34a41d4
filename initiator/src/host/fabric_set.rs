//! The fabrics of the paths: one for each address to connect from.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use rdma::{Event, FabricError, Initiator, Region, Wake};

use crate::fabric::{Provider, Wire};
use crate::multipath::Fabrics;
use crate::path_address::PathAddress;

/// Maximum number of events taken from a fabric at once.
const BATCH: usize = 256;

/// The fabrics, and a batch of events.
pub(super) struct FabricSet {
    wires: Vec<Wire>,
    batch: Vec<Event>,
}

impl Fabrics for FabricSet {
    fn fabric(&mut self, number: usize) -> &mut dyn Initiator {
        self.wires[number].fabric()
    }
}

impl FabricSet {
    /// Creates the fabrics; returns the number of the fabric of each path.
    pub(super) fn new(
        provider: Provider,
        paths: &[PathAddress],
        region: &Arc<Region>,
    ) -> Result<(FabricSet, Vec<usize>), FabricError> {
        let mut sources: Vec<Option<IpAddr>> = Vec::new();
        let (mut wires, mut numbers) = (Vec::new(), Vec::new());
        for path in paths {
            let number = match sources.iter().position(|source| *source == path.source) {
                Some(number) => number,
                None => {
                    wires.push(Wire::new(provider, path.source, path.to, region)?);
                    sources.push(path.source);
                    sources.len() - 1
                }
            };
            numbers.push(number);
        }
        Ok((FabricSet { wires, batch: Vec::with_capacity(BATCH) }, numbers))
    }

    /// Returns the provider of the first path.
    pub(super) fn provider(&self) -> Provider {
        self.wires.first().map_or(Provider::Auto, Wire::provider)
    }

    /// Takes events of a fabric. Returns them, and whether more will probably come.
    pub(super) fn poll(&mut self, number: usize, now: Instant) -> (Vec<Event>, bool) {
        let mut batch = std::mem::take(&mut self.batch);
        let fabric = self.wires[number].fabric();
        fabric.poll(now, &mut batch);
        (batch, fabric.hints().receiving)
    }

    /// Takes the empty batch back.
    pub(super) fn recycle(&mut self, batch: Vec<Event>) {
        self.batch = batch;
    }

    pub(super) fn len(&self) -> usize {
        self.wires.len()
    }

    pub(super) fn flush(&mut self) {
        self.wires.iter_mut().for_each(|wire| wire.fabric().flush());
    }

    pub(super) fn arm(&mut self, wake: Wake) {
        for wire in &mut self.wires {
            // The deadline is asked for just before the sleep.
            let _ = wire.fabric().arm(wake);
        }
    }

    pub(super) fn deadline(&mut self) -> Option<Instant> {
        self.wires.iter_mut().filter_map(|wire| wire.fabric().deadline()).min()
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.wires.iter().map(Wire::fd)
    }
}
