//! Thin provisioning: what hosts are told of the space that a namespace in a file takes.

use std::time::{Duration, Instant};

use initiator::Host;
use initiator::host::Range;

use crate::target::{BLOCKS, TestTarget};

const FILE: Range = Range { nsid: 1, slba: 0, block_bytes: 4096 };
/// Blocks written.
const WRITTEN: u64 = 2048;

/// Waits until the utilization of a namespace in blocks is in a range.
fn until_used(host: &mut Host, nsid: u32, range: std::ops::RangeInclusive<u64>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let page = host.identify_namespace(nsid).expect("the page");
        assert!(page.nuse <= page.ncap && page.ncap == page.nsze, "{} of {}", page.nuse, page.ncap);
        if range.contains(&page.nuse) {
            return;
        }
        assert!(Instant::now() < deadline, "{} is not in {range:?}", page.nuse);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_utilization_follows_writes_and_deallocations() {
    let target = TestTarget::start();
    let mut host = target.connect(1);
    let page = host.identify_namespace(1).expect("the page");
    assert!(page.nuse < WRITTEN && page.nsfeat.thin(), "{} blocks of a sparse file", page.nuse);
    let bytes = vec![0x5A; (WRITTEN * 4096) as usize];
    host.write(FILE, &bytes, false).expect("written");
    // Metadata of the file system may count.
    until_used(&mut host, 1, WRITTEN..=WRITTEN + 64);
    host.deallocate(1, 0, (WRITTEN / 2) as u32).expect("deallocated");
    until_used(&mut host, 1, WRITTEN / 2..=WRITTEN / 2 + 64);
    host.deallocate(1, 0, BLOCKS as u32).expect("deallocated");
    until_used(&mut host, 1, 0..=64);
    let [memory] = [2].map(|nsid| host.identify_namespace(nsid).expect("the page"));
    assert_eq!((memory.nuse, memory.nsfeat.thin()), (memory.nsze, false), "it is no file");
    host.disconnect();
}
