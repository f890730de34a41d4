//! Tests of the search for allocated blocks in real files.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};

use crate::extents::*;
use crate::testing::directory;
use crate::{BackingConfig, BackingKind};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

fn open(kind: BackingKind) -> Arc<BackingDevice> {
    let config = BackingConfig { kind, block_size_bytes: 512, read_only: false, shared: false };
    Arc::new(BackingDevice::open(&config).unwrap())
}

fn sparse(path: &Path, size: u64) -> Arc<BackingDevice> {
    open(BackingKind::File { path: path.to_owned(), size: Some(size) })
}

fn search(device: &Arc<BackingDevice>, search: &ExtentSearch) -> AllocatedExtents {
    search.run(&Arc::downgrade(device), LONG).unwrap()
}

fn whole(size: u64) -> ExtentSearch {
    ExtentSearch { at: 0, end: size, block_size_bytes: BLOCK, most: 64 }
}

/// More than any search takes.
const LONG: Duration = Duration::from_secs(600);

/// A page that direct I/O accepts.
fn with_page<T>(act: impl FnOnce(&[u8]) -> T) -> T {
    let buffer = vec![0xA5u8; 2 * BLOCK as usize];
    let start = buffer.as_ptr().align_offset(BLOCK as usize);
    act(&buffer[start..start + BLOCK as usize])
}

fn write(device: &BackingDevice, at: u64) {
    with_page(|page| device.file.as_ref().unwrap().write_all_at(page, at).unwrap());
}

fn punch(device: &BackingDevice, at: u64, len: u64) {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(device.file.as_ref().unwrap(), flags, at as i64, len as i64).unwrap();
}

#[test]
fn written_blocks_of_files_and_memory_are_allocated_and_holes_are_not() {
    let dir = directory();
    let ram = open(BackingKind::Ram { size: 64 * MIB });
    for device in [sparse(&dir.path().join("disk.img"), 64 * MIB), ram] {
        let found = |range: ExtentSearch| search(&device, &range);
        assert_eq!(found(whole(64 * MIB)), AllocatedExtents::default());
        for at in [0, BLOCK, 8 * MIB, 64 * MIB - BLOCK] {
            write(&device, at);
        }
        let all = vec![(0, 2 * BLOCK), (8 * MIB, 8 * MIB + BLOCK), (64 * MIB - BLOCK, 64 * MIB)];
        assert_eq!(found(whole(64 * MIB)).extents, all);
        let part = ExtentSearch { at: BLOCK, end: 8 * MIB, ..whole(0) };
        assert_eq!(found(part).extents, [(BLOCK, 2 * BLOCK)], "of a range");
        let two = ExtentSearch { most: 2, ..whole(64 * MIB) };
        assert_eq!(found(two), AllocatedExtents { extents: all[..2].to_vec(), has_more: true });
        let three = ExtentSearch { most: 3, ..two };
        assert_eq!(found(three), AllocatedExtents { extents: all, has_more: false });
        punch(&device, 8 * MIB, BLOCK);
        assert_eq!(found(whole(64 * MIB)).extents.len(), 2, "deallocated");
    }
}

#[test]
fn extents_are_whole_logical_blocks() {
    let dir = directory();
    let device = sparse(&dir.path().join("disk.img"), MIB);
    for at in [BLOCK, 3 * BLOCK, 9 * BLOCK] {
        write(&device, at);
    }
    let range = ExtentSearch { block_size_bytes: 4 * BLOCK, ..whole(MIB) };
    let found = search(&device, &range).extents;
    assert_eq!(found, [(0, 4 * BLOCK), (8 * BLOCK, 12 * BLOCK)]);
}

#[test]
fn unsearched_blocks_are_reported_as_allocated() {
    let dir = directory();
    let device = sparse(&dir.path().join("disk.img"), MIB);
    for at in [BLOCK, 9 * BLOCK] {
        write(&device, at);
    }
    let found = whole(MIB).run(&Arc::downgrade(&device), Duration::ZERO).unwrap();
    assert_eq!(found, AllocatedExtents { extents: vec![(BLOCK, MIB)], has_more: false });
    let pause = crate::lock(&device.unsearched_until).replace(Instant::now() + LONG);
    assert!(pause.is_some(), "it has taken too long");
    assert_eq!(search(&device, &whole(MIB)).extents, [(0, MIB)], "it pauses");
    let over = Some(Instant::now());
    *crate::lock(&device.unsearched_until) = over;
    assert_eq!(search(&device, &whole(MIB)).extents.len(), 2);
    assert_eq!(*crate::lock(&device.unsearched_until), over, "in time");
}

#[test]
fn all_blocks_are_allocated_where_nothing_is_known() {
    let null = open(BackingKind::Null { size: MIB });
    assert_eq!(search(&null, &whole(MIB)).extents, [(0, MIB)]);
    // Of procfs, which is not among the file systems.
    let dir = directory();
    let mut device = sparse(&dir.path().join("disk.img"), MIB);
    Arc::get_mut(&mut device).unwrap().file = Some(File::open("/proc/version").unwrap().into());
    assert_eq!(search(&device, &whole(MIB)).extents, [(0, MIB)]);
}

/// What is behind the end of a file looks like a hole, and cannot be read.
#[test]
fn a_file_that_was_shortened_has_no_holes() {
    let dir = directory();
    let device = sparse(&dir.path().join("disk.img"), MIB);
    write(&device, 9 * BLOCK);
    device.file.as_ref().unwrap().set_len(4 * BLOCK).unwrap();
    assert_eq!(search(&device, &whole(MIB)).extents, [(0, MIB)]);
}

/// Reactors that write to it would wait for a search of all its pages.
#[test]
fn memory_with_many_pages_and_full_files_are_not_searched() {
    let size = IN_MEMORY_BYTES_MAX + MIB;
    let ram = open(BackingKind::Ram { size });
    fallocate(ram.file.as_ref().unwrap(), FallocateFlags::empty(), 0, IN_MEMORY_BYTES_MAX as i64)
        .unwrap();
    assert_eq!(search(&ram, &whole(size)).extents, [(0, size)]);
    let dir = directory();
    let file = sparse(&dir.path().join("disk.img"), MIB);
    fallocate(file.file.as_ref().unwrap(), FallocateFlags::empty(), 0, MIB as i64).unwrap();
    assert_eq!(search(&file, &whole(MIB)).extents, [(0, MIB)], "preallocated");
}

#[test]
fn a_store_that_was_closed_is_not_searched() {
    let device = open(BackingKind::Ram { size: MIB });
    let store = Arc::downgrade(&device);
    drop(device);
    assert_eq!(whole(MIB).run(&store, LONG), None);
}

/// Writers punch, preallocate and write beside the search.
#[test]
fn a_block_that_was_written_before_the_search_is_allocated() {
    const WRITERS: u64 = 3;
    let dir = directory();
    let device = sparse(&dir.path().join("disk.img"), 16 * MIB);
    let part = 16 * MIB / BLOCK / WRITERS;
    let written = Mutex::new(BTreeSet::new());
    let write_part = |writer: u64| {
        for step in 0..part {
            // Scattered, so that extents are neither merged nor in order.
            let at = (writer * part + step * 577 % part) * BLOCK;
            match step % 3 {
                0 => punch(&device, at, BLOCK),
                1 => fallocate(
                    device.file.as_ref().unwrap(),
                    FallocateFlags::FALLOC_FL_KEEP_SIZE,
                    at as i64,
                    BLOCK as i64,
                )
                .unwrap(),
                _ => {}
            }
            write(&device, at);
            crate::lock(&written).insert(at);
        }
    };
    let range = ExtentSearch { most: usize::MAX, ..whole(16 * MIB) };
    std::thread::scope(|scope| {
        let write_part = &write_part;
        let writers: Vec<_> = (0..WRITERS).map(|w| scope.spawn(move || write_part(w))).collect();
        loop {
            let is_over = writers.iter().all(|writer| writer.is_finished());
            let before = crate::lock(&written).clone();
            let found = search(&device, &range).extents;
            for at in before {
                let index = found.partition_point(|(_, end)| *end <= at);
                assert!(found.get(index).is_some_and(|(from, _)| *from <= at), "{at} was written");
            }
            if is_over {
                return;
            }
        }
    });
}
