//! The blocking host against a real target in the same process: soft fabric, real sockets, a file
//! as the namespace.

#[path = "loopback/target.rs"]
mod target;

use initiator::host::Range;
use target::TestTarget;

#[test]
fn what_was_written_is_read() {
    let target = TestTarget::start("written");
    let mut host = target.connect(2);
    let range = Range { nsid: 1, slba: 5, block_bytes: 4096 };
    let data: Vec<u8> = (0..3 << 20).map(|i: u32| (i / 3) as u8 ^ (i >> 12) as u8).collect();
    host.write(range, &data, false).unwrap();
    let mut back = vec![0; data.len()];
    host.read(range, &mut back).unwrap();
    assert!(back == data);
    host.disconnect();
}
