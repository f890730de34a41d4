//! Tests on images of a real cluster: `make test-cluster`.

use std::time::{Duration, Instant};

use super::*;
use crate::blocking::BlockingPool;
use crate::ceph::{ClusterConfig, ImageName};
use crate::ceph_client::tests::{cluster, resume, signal, tool};
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
            let kind =
                BackingKind::Rbd { image: image.clone(), cluster: cluster.clone(), made: None };
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
        self.monitor.acquire(&self.devices, former, Arc::new(|| true))
    }

    fn release(&self) {
        self.monitor.release(&self.devices, Arc::new(|| true)).unwrap();
    }
}

/// New images.
fn images(name: &str, count: u32) -> Vec<ImageName> {
    let create = |number| {
        let name = format!("rbd/{name}-{}-{number}", std::process::id());
        tool(&format!("rbd create --size 1M {name}"));
        name.parse().unwrap()
    };
    (0..count).map(create).collect()
}

fn owners(images: &[ImageName]) -> Vec<Option<String>> {
    let owner = |image| examine(&cluster("admin"), image, false).unwrap().owner;
    images.iter().map(owner).collect()
}

/// More images than are acquired at once.
#[test]
#[ignore = "needs a cluster"]
fn images_of_a_group_are_acquired_released_and_reopened_after_fencing() {
    let images = images("group", 20);
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
    other.release();
    assert_eq!(owners(&images), vec![None; 20]);
    one.acquire(&[]).unwrap();
    // A client that is abandoned, before the monitor has looked.
    DataClient::connect(&one.cluster).unwrap().abandon();
    let third = DataClient::connect(&one.cluster).unwrap();
    let former = owners(&images[..1]).pop().flatten().unwrap();
    one.acquire(&[former]).unwrap();
    assert_eq!(owners(&images), vec![Some(third.address().to_owned()); 20]);
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_in_use_by_another_client_obstructs_no_other_image() {
    let images = images("apart", 3);
    let (one, other) = (Gateway::new("nvmfd", &images), Gateway::new("admin", &images[1..2]));
    other.acquire(&[]).unwrap();
    one.acquire(&[]).unwrap();
    let standby = |it: &Gateway| -> Vec<bool> {
        it.devices.iter().map(|device| device.health().is_only_standby()).collect()
    };
    assert_eq!(standby(&one), [false, true, false]);
    let (own, foreign) = (one.address(), other.address());
    let expected = [&own, &foreign, &own].map(|address| Some(address.clone()));
    assert_eq!(owners(&images), expected);
    // Nothing changes for those that are served when it is tried again.
    let served = one.devices[0].backing();
    let left = |it: &Gateway| it.monitor.acquire(&it.devices[1..2], &[], Arc::new(|| true));
    assert!(left(&one).unwrap_err().contains("in use"));
    other.release();
    left(&one).unwrap();
    assert_eq!((standby(&one), owners(&images)), (vec![false; 3], vec![Some(own); 3]));
    assert!(Arc::ptr_eq(&served, &one.devices[0].backing()));
    // Those of another client are not for this one.
    let outcome = one.monitor.acquire(&one.devices, &[], Arc::new(|| false));
    assert_eq!(outcome.unwrap_err(), "the RADOS client has changed");
    one.release();
    assert_eq!(owners(&images), vec![None; 3]);
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_that_the_cluster_gives_late_is_served_then_and_released_after_it() {
    let images = images("late", 1);
    let one = Arc::new(Gateway::new("nvmfd", &images));
    signal("osd.0", "STOP");
    let why = [one.acquire(&[]), one.acquire(&[])].map(Result::unwrap_err);
    // A release waits for the task that is late.
    let (sender, released) = mpsc::channel();
    let other = Arc::clone(&one);
    std::thread::spawn(move || {
        other.release();
        let _ = sender.send(());
    });
    let early = released.recv_timeout(Duration::from_millis(300));
    resume("osd.0");
    assert_eq!((why, early.is_err()), ([NO_ANSWER.to_owned(), NO_ANSWER.to_owned()], true));
    released.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!((one.devices[0].health().is_standby(), owners(&images)), (true, vec![None]));
    one.acquire(&[]).unwrap();
    assert_eq!(owners(&images), vec![Some(one.address())]);
}
