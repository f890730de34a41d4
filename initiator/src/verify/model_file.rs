//! A model stored as a file, so that another process can check the target after a restart.
//!
//! ```text
//! magic 8 | version u32 | block_bytes u32 | first_lba u64 | blocks u64 | run u64 | clock u64
//! about: length u32, UTF-8 | records: number u64, then each | CRC-32 u32 of all before it
//! record: index u64 | generation u32 | floor u64 | zeroed u64 | values: number u32, then each
//! value:  kind u8 | number u64 | client u16 | generation u32 | end u64
//! ```
//!
//! Little-endian. Blocks that were neither written nor read have no record.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::block_history::{Record, Value};
use super::model::{BLOCKS_LIMIT, Model, Shape};
use crate::verify::block_stamp;

const MAGIC: [u8; 8] = *b"nvmfmodl";
const VERSION: u32 = 1;

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

/// Encodes the model, with a description of the verified range. Outstanding operations are lost
/// and [settled](Model::settle) in the copy.
#[must_use]
pub fn encode(model: &mut Model, about: &str) -> Vec<u8> {
    let Shape { first_lba, blocks, block_bytes, run } = model.shape();
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&block_bytes.to_le_bytes());
    for number in [first_lba, blocks, run, model.clock()] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.extend_from_slice(&(about.len() as u32).to_le_bytes());
    out.extend_from_slice(about.as_bytes());
    let count_at = out.len();
    out.extend_from_slice(&[0; 8]);
    let mut count = 0u64;
    let untouched = Record::default();
    for i in 0..blocks as usize {
        let record = model.record(i);
        if record != untouched {
            count += 1;
            put_record(&mut out, i, &record);
        }
    }
    out[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
    let crc = crc32fast::hash(&out);
    out.extend_from_slice(&crc.to_le_bytes());
    out
}

/// Decodes a saved model and its description.
///
/// # Errors
/// The bytes were not created by [`encode`].
pub fn decode(bytes: &[u8]) -> Result<(Model, String), Unusable> {
    if !bytes.starts_with(&MAGIC) {
        return Err(Unusable::Alien);
    }
    let (body, crc) = bytes.split_last_chunk::<4>().ok_or(Unusable::Damaged)?;
    if crc32fast::hash(body).to_le_bytes() != *crc {
        return Err(Unusable::Damaged);
    }
    let mut from = Reader(&body[MAGIC.len()..]);
    if from.u32()? != VERSION {
        return Err(Unusable::Alien);
    }
    let block_bytes = from.u32()?;
    let [first_lba, blocks, run, clock] = [from.u64()?, from.u64()?, from.u64()?, from.u64()?];
    let block_good =
        block_bytes as usize > block_stamp::HEADER_BYTES && block_bytes.is_multiple_of(8);
    let end = first_lba.checked_add(blocks).ok_or(Unusable::Damaged)?;
    if !block_good || !(1..=BLOCKS_LIMIT).contains(&blocks) || end > block_stamp::LBA_LIMIT {
        return Err(Unusable::Damaged);
    }
    let about_bytes = from.u32()? as usize;
    let about = String::from_utf8(from.take(about_bytes)?.to_vec());
    let about = about.map_err(|_| Unusable::Damaged)?;
    let mut records = Vec::new();
    for _ in 0..from.u64()? {
        records.push(from.record(blocks)?);
    }
    if !from.0.is_empty() {
        return Err(Unusable::Damaged);
    }
    let mut model = Model::new(Shape { first_lba, blocks, block_bytes, run });
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

fn put_record(out: &mut Vec<u8>, i: usize, record: &Record) {
    out.extend_from_slice(&(i as u64).to_le_bytes());
    out.extend_from_slice(&record.generation.to_le_bytes());
    out.extend_from_slice(&record.floor.to_le_bytes());
    out.extend_from_slice(&record.zeroed.to_le_bytes());
    out.extend_from_slice(&(record.values.len() as u32).to_le_bytes());
    for &(value, end) in &record.values {
        let (kind, number, client, generation) = match value {
            Value::Before { hash } => (0u8, hash, 0, 0),
            Value::Data { sequence, client, generation } => (1, sequence, client, generation),
            Value::Zeros { sequence } => (2, sequence, 0, 0),
            Value::Survivor { from } => (3, from, 0, 0),
        };
        out.push(kind);
        out.extend_from_slice(&number.to_le_bytes());
        out.extend_from_slice(&client.to_le_bytes());
        out.extend_from_slice(&generation.to_le_bytes());
        out.extend_from_slice(&end.to_le_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Unusable> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(Unusable::Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Unusable> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Unusable::Damaged)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, Unusable> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Unusable> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn record(&mut self, blocks: u64) -> Result<(usize, Record), Unusable> {
        let i = self.u64()?;
        if i >= blocks {
            return Err(Unusable::Damaged);
        }
        let (generation, floor, zeroed) = (self.u32()?, self.u64()?, self.u64()?);
        let mut values = Vec::new();
        for _ in 0..self.u32()? {
            let [kind] = self.array()?;
            let number = self.u64()?;
            let client = u16::from_le_bytes(self.array()?);
            let generation = self.u32()?;
            let end = self.u64()?;
            let value = match kind {
                0 => Value::Before { hash: number },
                1 => Value::Data { sequence: number, client, generation },
                2 => Value::Zeros { sequence: number },
                3 => Value::Survivor { from: number },
                _ => return Err(Unusable::Damaged),
            };
            values.push((value, end));
        }
        Ok((i as usize, Record { generation, floor, zeroed, values }))
    }
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
        assert_eq!(decode(b"nvmfmodl").err(), Some(Unusable::Damaged));
        for cut in 8..bytes.len() {
            assert_eq!(decode(&bytes[..cut]).err(), Some(Unusable::Damaged), "{cut} bytes");
        }
        let mut newer = bytes[..bytes.len() - 4].to_vec();
        newer[8] = 2;
        newer.extend_from_slice(&crc32fast::hash(&newer).to_le_bytes());
        assert_eq!(decode(&newer).err(), Some(Unusable::Alien));
    }

    proptest! {
        #[test]
        fn altered_state_files_cause_no_panic(at in 8usize..400, value in any::<u8>()) {
            let mut bytes = encode(&mut some_model(2), "x");
            bytes.truncate(bytes.len() - 4);
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
            // A state of 2^30 blocks is possible, but too large for this test.
            prop_assume!(!(24..32).contains(&at));
            let _ = decode(&bytes);
        }
    }
}
