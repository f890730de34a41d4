//! Tests on images of a real cluster: `make test-cluster`.

use std::time::{Duration, Instant};

use super::*;
use crate::blocking::BlockingPool;
use crate::ceph::{ClusterConfig, ImageName};
use crate::ceph_client::tests::{cluster, tool};
use crate::monitor::Rings;
use crate::rbd::{DataClient, examine};
use crate::{BackingConfig, BackingDevice, BackingKind, DeviceId};

/// No reactor.
#[derive(Debug)]
struct NoRings;

impl Rings for NoRings {
    fn count(&self) -> usize {
        0
    }

    fn attach(
        &self,
        _: usize,
        _: DeviceId,
        _: &Arc<BackingDevice>,
    ) -> mpsc::Receiver<std::io::Result<()>> {
        mpsc::channel().1
    }

    fn wake(&self) {}
}

/// A gateway with images in standby.
struct Gateway {
    monitor: DeviceMonitor,
    devices: Vec<Arc<MonitoredDevice>>,
    cluster: ClusterConfig,
}

impl Gateway {
    fn new(client: &str, images: &[ImageName]) -> Gateway {
        let cluster = ClusterConfig { standby: true, ..cluster(client) };
        let monitor = DeviceMonitor::start(NoRings, Arc::new(BlockingPool::default())).unwrap();
        let open = |image: &ImageName| {
            let kind = BackingKind::Rbd { image: image.clone(), cluster: cluster.clone() };
            let config =
                BackingConfig { kind, block_size_bytes: 4096, read_only: false, shared: false };
            let backing = BackingDevice::open(&config).unwrap();
            let device = MonitoredDevice::new(DeviceId(1), image.to_string(), config, backing);
            let device = Arc::new(device);
            monitor.add(Arc::clone(&device));
            device
        };
        let devices = images.iter().map(open).collect();
        Gateway { monitor, devices, cluster }
    }

    fn address(&self) -> String {
        DataClient::connect(&self.cluster).unwrap().address().to_owned()
    }

    fn acquire(&self, former: &[String]) -> Result<(), String> {
        self.monitor.acquire(&self.devices, former)
    }
}

fn owners(images: &[ImageName]) -> Vec<Option<String>> {
    let owner = |image| examine(&cluster("admin"), image, false).unwrap().owner;
    images.iter().map(owner).collect()
}

/// More images than are acquired at once.
#[test]
#[ignore = "needs a cluster"]
fn images_of_a_group_are_acquired_released_and_reopened_after_fencing() {
    let name = |number| format!("rbd/group-{}-{number}", std::process::id());
    let images: Vec<ImageName> = (0..20)
        .map(|number| {
            tool(&format!("rbd create --size 1M {}", name(number)));
            name(number).parse().unwrap()
        })
        .collect();
    let [one, other] = ["nvmfd", "admin"].map(|client| Gateway::new(client, &images));
    one.acquire(&[]).unwrap();
    let (first, second) = (one.address(), other.address());
    assert_eq!(owners(&images), vec![Some(first.clone()); 20]);
    assert!(one.devices.iter().all(|it| !it.health().is_standby()));
    let why = other.acquire(&[]).unwrap_err();
    assert!(why.contains("in use") && why.contains(&first), "{why}");
    other.acquire(std::slice::from_ref(&first)).unwrap();
    assert_eq!(owners(&images), vec![Some(second); 20]);
    // The monitor finds out by itself and opens them again.
    let deadline = Instant::now() + Duration::from_secs(60);
    while one.devices.iter().any(|it| it.backing().is_fenced_standby() || !it.health().is_standby())
    {
        assert!(Instant::now() < deadline, "the images are opened again");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(one.devices.iter().all(|it| !it.health().is_down()));
    assert_ne!(one.address(), first);
    one.acquire(std::slice::from_ref(&first)).unwrap_err();
    other.monitor.release(&other.devices).unwrap();
    assert_eq!(owners(&images), vec![None; 20]);
    one.acquire(&[]).unwrap();
    // A client that is abandoned, before the monitor has looked.
    DataClient::connect(&one.cluster).unwrap().abandon();
    let third = DataClient::connect(&one.cluster).unwrap();
    let former = owners(&images[..1]).pop().flatten().unwrap();
    one.acquire(&[former]).unwrap();
    assert_eq!(owners(&images), vec![Some(third.address().to_owned()); 20]);
}
