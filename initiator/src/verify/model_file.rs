//! A model stored as a file, so that another process can check the target after a restart: a line
//! with the version and a CRC-32 of what follows it, then JSON.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::block_history::Record;
use super::model::{BLOCKS_LIMIT, Model, Shape};
use crate::verify::block_stamp;

/// Begins the first line, and changes with the format.
const VERSION: &str = "nvmf verify 2";

/// Reason why a saved model cannot be used, displayed as a sentence.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unusable {
    /// Not a file of `nvmf verify`, or of a version with another format.
    #[error("it is no saved state of this version of nvmf verify")]
    Alien,
    /// The checksum is wrong, or the content is inconsistent.
    #[error("it is damaged or incomplete")]
    Damaged,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    /// Describes the verified range.
    about: String,
    shape: Shape,
    clock: u64,
    /// By their position in the range. Blocks that were neither written nor read have none.
    records: Vec<(usize, Record)>,
}

/// Encodes the model, with a description of the verified range. Outstanding operations are lost
/// and [settled](Model::settle) in the copy.
#[must_use]
pub fn encode(model: &mut Model, about: &str) -> Vec<u8> {
    let (about, shape, clock) = (about.to_owned(), model.shape(), model.clock());
    let untouched = Record::default();
    let records = (0..shape.blocks as usize).map(|i| (i, model.record(i)));
    let records = records.filter(|(_, record)| *record != untouched).collect();
    let json = serde_json::to_vec(&Saved { about, shape, clock, records }).unwrap_or_default();
    let line = format!("{VERSION} {:08x}\n", crc32fast::hash(&json));
    [line.into_bytes(), json].concat()
}

/// Decodes a saved model and its description.
///
/// # Errors
/// The bytes were not created by [`encode`].
pub fn decode(bytes: &[u8]) -> Result<(Model, String), Unusable> {
    let rest = bytes.strip_prefix(VERSION.as_bytes()).ok_or(Unusable::Alien)?;
    let (crc, json) = rest.split_at_checked(" 01234567\n".len()).ok_or(Unusable::Damaged)?;
    if crc != format!(" {:08x}\n", crc32fast::hash(json)).as_bytes() {
        return Err(Unusable::Damaged);
    }
    let Saved { about, shape, clock, records } =
        serde_json::from_slice(json).map_err(|_| Unusable::Damaged)?;
    let Shape { first_lba, blocks, block_bytes, .. } = shape;
    let block_good =
        block_bytes as usize > block_stamp::HEADER_BYTES && block_bytes.is_multiple_of(8);
    let end = first_lba.checked_add(blocks).ok_or(Unusable::Damaged)?;
    let in_range = records.iter().all(|(i, _)| (*i as u64) < blocks);
    if !block_good
        || !(1..=BLOCKS_LIMIT).contains(&blocks)
        || end > block_stamp::LBA_LIMIT
        || !in_range
    {
        return Err(Unusable::Damaged);
    }
    let mut model = Model::new(shape);
    model.restore(clock, records.into_iter());
    Ok((model, about))
}

/// Replaces a file as a whole: a reader finds the old content or the new one, also after a
/// crash.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let fresh = path.with_file_name(name);
    let mut file = File::create(&fresh)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    sync_name(path)
}

/// Makes the name of a file durable, by syncing its directory.
pub(crate) fn sync_name(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::rng::Random;
    use crate::verify::Change;
    use crate::verify::model_file::*;

    const SHAPE: Shape = Shape { first_lba: 50, blocks: 40, block_bytes: 512, run: 77 };

    /// A model with every kind of value.
    fn some_model(seed: u64) -> Model {
        let mut random = Random::new(seed);
        let mut model = Model::new(SHAPE);
        for n in 0..200 {
            let lba = 50 + random.below(30);
            let change = match random.below(4) {
                0 => Change::Zeros,
                1 => Change::Deallocate { sure: false },
                _ => Change::Data,
            };
            let durable = random.percent(20);
            let op = model.write(random.below(3) as u16, lba..lba + 2, change, durable);
            match random.below(3) {
                0 => model.done(op),
                1 => model.failed(op),
                _ => model.lost(op),
            }
            if n == 100 {
                model.crash();
            }
        }
        let op = model.read(85..90);
        assert_eq!(model.check(op, &[0x55; 5 * 512]), []);
        model
    }

    #[test]
    fn a_saved_model_is_restored_and_continues() {
        for seed in 0..50 {
            let mut model = some_model(seed);
            let bytes = encode(&mut model, "a namespace");
            model.settle();
            let (mut copy, about) = decode(&bytes).expect("it was saved");
            assert_eq!((about.as_str(), copy.shape()), ("a namespace", SHAPE));
            for lba in 50..90 {
                assert_eq!(copy.expected(lba), model.expected(lba), "seed {seed}, LBA {lba}");
            }
            assert_eq!(encode(&mut copy, "a namespace"), bytes);
            // The known content of a block that was never written is retained.
            let op = copy.read(85..86);
            assert_eq!(copy.check(op, &[0x54; 512]).len(), 1);
            // New writes have new sequence numbers.
            let op = copy.write(0, 50..51, Change::Data, false);
            let mut data = [0; 512];
            copy.fill(&op, &mut data);
            copy.done(op);
            let op = copy.read(50..51);
            assert_eq!(copy.check(op, &data), []);
        }
    }

    #[test]
    fn a_replaced_file_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        write_file(&path, b"old").expect("written");
        write_file(&path, b"new").expect("written");
        assert_eq!(fs::read(&path).expect("there"), b"new");
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 1, "nothing else");
    }

    #[test]
    fn invalid_state_files_are_refused() {
        let bytes = encode(&mut some_model(1), "");
        assert_eq!(decode(b"").err(), Some(Unusable::Alien));
        assert_eq!(decode(b"nvmfmodl").err(), Some(Unusable::Alien), "version 1");
        for cut in VERSION.len()..bytes.len() {
            assert_eq!(decode(&bytes[..cut]).err(), Some(Unusable::Damaged), "{cut} bytes");
        }
        let other = bytes.iter().map(|byte| if *byte == b'2' { b'3' } else { *byte });
        assert_eq!(decode(&other.collect::<Vec<_>>()).err(), Some(Unusable::Alien));
    }

    proptest! {
        #[test]
        fn altered_state_files_cause_no_panic(at in 0usize..400, value in any::<u8>()) {
            let saved = encode(&mut some_model(2), "x");
            let mut json = saved[VERSION.len() + " 01234567\n".len()..].to_vec();
            let blocks = json.windows(8).position(|it| it == b"\"blocks\"").expect("a field");
            let at = at % json.len();
            json[at] = value;
            // A state of 2^30 blocks is possible, but too large for this test.
            prop_assume!(!(blocks..blocks + 13).contains(&at));
            let mut bytes = format!("{VERSION} {:08x}\n", crc32fast::hash(&json)).into_bytes();
            bytes.extend_from_slice(&json);
            let _ = decode(&bytes);
        }
    }
}
