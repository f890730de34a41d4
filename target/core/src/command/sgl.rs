//! Scattered data: SGL segments in the capsule behind the command, named by a Last Segment
//! descriptor.
//!
//! The rules of commands use one descriptor of the total length. The queue pair handles the pieces.
//!
//! Source: NVMe Base Specification 2.0, "Scatter Gather List (SGL)"; NVMe RDMA Transport
//! Specification, "SGL descriptors".

use nvme::sgl::{LastSegment, SglType, U24};
use nvme::{Sgl, Sqe, Status};
use rdma::Remote;

/// Descriptors that a command may have, at most.
pub const MOST: usize = 4;

/// Bytes of one.
const DESCRIPTOR_BYTES: usize = 16;

/// Returns how many descriptors a command may have on a controller that accepts so many bytes
/// behind a command (MSDBD). They take the place of in-capsule data.
pub fn msdbd(in_capsule_bytes: u32) -> u8 {
    (in_capsule_bytes / DESCRIPTOR_BYTES as u32).clamp(1, MOST as u32) as u8
}

/// The pieces in host memory, in the order of the data, and the progress of a transfer. Empty if
/// the data are in one piece, or there are none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SglSegments {
    at: [(u64, u32, u32); MOST],
    count: u8,
    next: u8,
    /// Bytes of the transfer, and those that were posted.
    total_bytes: u32,
    posted_bytes: u32,
    /// Maximum of bytes that are transferred at once; 0: no limit.
    most_bytes: u32,
}

impl SglSegments {
    /// Whether the data are in one piece.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Limits the bytes (above 0) that are transferred at once. Data in one piece, `whole`, are
    /// split by that.
    pub fn cut(&mut self, whole: Remote, most_bytes: u32) {
        if self.is_empty() {
            self.at[0] = (whole.addr, whole.key, whole.len);
            self.count = 1;
        }
        self.most_bytes = most_bytes;
    }

    /// Begins a transfer of `total_bytes`.
    pub fn begin(&mut self, total_bytes: u32) {
        (self.next, self.posted_bytes, self.total_bytes) = (0, 0, total_bytes);
    }

    /// Whether a transfer has begun, and some of it is not posted yet.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.posted_bytes < self.total_bytes
    }

    /// Returns the bytes of the transfer, if it is in pieces.
    #[inline]
    pub fn total_bytes(&self) -> Option<u32> {
        (!self.is_empty()).then_some(self.total_bytes)
    }

    /// Returns the next piece: the number of bytes before it, and its location.
    pub fn advance(&mut self) -> Option<(u32, Remote)> {
        while self.has_more() {
            let (skip, left) = (self.posted_bytes, self.total_bytes - self.posted_bytes);
            let most_bytes = if self.most_bytes == 0 { left } else { self.most_bytes };
            let place = self.at.get_mut(..self.count.into())?.get_mut(usize::from(self.next))?;
            let (addr, key, there) = *place;
            let len = there.min(left).min(most_bytes);
            if len < there && len < left {
                // The address is given by the host; an overflow is its error.
                *place = (addr.wrapping_add(len.into()), key, there - len);
            } else {
                self.next += 1;
            }
            self.posted_bytes += len;
            if len > 0 {
                return Some((skip, Remote { addr, key, len }));
            }
        }
        None
    }
}

/// Reads the descriptors in `tail`, the bytes received behind the command. Returns the command with
/// one descriptor of the total length instead, the pieces, and the key to invalidate with the
/// response: only if all descriptors that request it have the same one.
///
/// # Errors
/// The SGL statuses of the NVMe documents, each with do not retry.
pub fn gather(
    sqe: &Sqe,
    segment: LastSegment,
    tail: &[u8],
) -> Result<(Sqe, SglSegments, Option<u32>), Status> {
    let count = segment.len as usize / DESCRIPTOR_BYTES;
    if count == 0 || !(segment.len as usize).is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(Status::INVALID_SGL_LAST_SEGMENT.with_dnr());
    }
    if count > MOST {
        return Err(Status::INVALID_SGL_COUNT.with_dnr());
    }
    let offset = Status::SGL_OFFSET_INVALID.with_dnr();
    let behind = usize::try_from(segment.offset).ok().and_then(|at| tail.get(at..));
    let descriptors = behind.ok_or(offset)?.get(..segment.len as usize);
    let descriptors = descriptors.ok_or(Status::INVALID_SGL_LAST_SEGMENT.with_dnr())?;
    let (mut pieces, mut keys, mut total) = (SglSegments::default(), [None; MOST], 0);
    let (descriptors, _) = descriptors.as_chunks::<DESCRIPTOR_BYTES>();
    for ((bytes, place), asked) in descriptors.iter().zip(&mut pieces.at).zip(&mut keys) {
        let (addr, key, len) = place_of(bytes)?;
        *place = (addr, key, len.get());
        *asked = Sgl::parse(bytes)?.invalidate_key();
        total += len.get();
        pieces.count += 1;
    }
    let whole = Sgl::keyed(0, total, 0, false).ok_or(Status::DATA_SGL_LENGTH_INVALID.with_dnr())?;
    let mut keys = keys.iter().flatten();
    let key = keys.next().copied().filter(|first| keys.all(|key| key == first));
    Ok((sqe.with_sgl(whole), pieces, key))
}

/// Returns the location of a piece. A segment has no further segments, and its data are not in the
/// capsule.
fn place_of(bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<(u64, u32, U24), Status> {
    match (SglType(bytes[15] >> 4), Sgl::parse(bytes)) {
        (SglType::SEGMENT | SglType::LAST_SEGMENT, _) => {
            Err(Status::INVALID_SGL_LAST_SEGMENT.with_dnr())
        }
        (_, Ok(Sgl::Keyed { addr, len, key, .. })) => Ok((addr, key, len)),
        _ => Err(Status::SGL_TYPE_INVALID.with_dnr()),
    }
}

#[cfg(test)]
mod tests {
    use nvme::IoOpcode;
    use proptest::prelude::*;

    use crate::command::sgl::*;

    fn keyed(addr: u64, len: u32, key: u32, invalidate: bool) -> [u8; 16] {
        Sgl::keyed(addr, len, key, invalidate).unwrap().emit()
    }

    fn ask(tail: &[u8], offset: u64, len: u32) -> Result<(Sqe, SglSegments, Option<u32>), Status> {
        gather(&Sqe::io(IoOpcode::READ, 1), LastSegment { offset, len }, tail)
    }

    #[test]
    fn segments_are_returned_in_order_up_to_the_requested_length() {
        let tail = [keyed(1, 512, 7, true), keyed(2, 0, 7, true), keyed(3, 1024, 7, true)].concat();
        let (sqe, mut pieces, key) = ask(&tail, 0, 48).unwrap();
        assert_eq!((sqe.sgl(), key), (Ok(Sgl::keyed(0, 1536, 0, false).unwrap()), Some(7)));
        assert!(!pieces.is_empty() && !pieces.has_more(), "not begun");
        for (total, lens) in [(1536, [512, 1024]), (1000, [512, 488])] {
            pieces.begin(total);
            for (skip, addr, len) in [(0, 1, lens[0]), (512, 3, lens[1])] {
                assert!(pieces.has_more());
                assert_eq!(pieces.advance(), Some((skip, Remote { addr, key: 7, len })));
            }
            assert!(!pieces.has_more() && pieces.advance().is_none());
        }
        pieces.begin(100);
        assert_eq!(pieces.advance().map(|(skip, at)| (skip, at.len)), Some((0, 100)));
        assert_eq!(pieces.advance(), None);
    }

    #[test]
    fn segments_are_split_at_the_maximum_transfer_size() {
        let moved = |mut pieces: SglSegments, total: u32| {
            pieces.begin(total);
            std::iter::from_fn(move || {
                let (skip, Remote { addr, key, len }) = pieces.advance()?;
                Some((skip, addr, key, len))
            })
            .collect::<Vec<_>>()
        };
        let mut whole = SglSegments::default();
        whole.cut(Remote { addr: 1000, key: 7, len: 40 }, 16);
        assert_eq!(moved(whole, 40), [(0, 1000, 7, 16), (16, 1016, 7, 16), (32, 1032, 7, 8)]);
        assert_eq!(moved(whole, 32), [(0, 1000, 7, 16), (16, 1016, 7, 16)]);
        assert!(moved(whole, 0).is_empty());
        let tail = [keyed(0, 20, 7, true), keyed(u64::MAX - 3, 30, 8, true)].concat();
        let (_, mut several, _) = ask(&tail, 0, 32).unwrap();
        several.cut(Remote { addr: 5, key: 5, len: 5 }, 16);
        let end = u64::MAX - 3;
        let expected = [(0, 0, 7, 16), (16, 16, 7, 4), (20, end, 8, 16), (36, 12, 8, 14)];
        assert_eq!(moved(several, 50), expected, "an address that ends is the fabric's business");
    }

    #[test]
    fn a_key_is_invalidated_only_if_all_invalidate_requests_name_it() {
        let key = |descriptors: &[[u8; 16]]| {
            let len = descriptors.len() as u32 * 16;
            ask(&descriptors.concat(), 0, len).unwrap().2
        };
        assert_eq!(key(&[keyed(0, 8, 5, false), keyed(0, 8, 6, false)]), None);
        assert_eq!(key(&[keyed(0, 8, 5, false), keyed(0, 8, 6, true)]), Some(6));
        assert_eq!(key(&[keyed(0, 8, 6, true), keyed(0, 8, 6, true)]), Some(6));
        assert_eq!(key(&[keyed(0, 8, 5, true), keyed(0, 8, 6, true)]), None);
    }

    #[test]
    fn malformed_segments_are_refused_with_their_status() {
        let good = keyed(0, 512, 7, false);
        let tail = [good; 8].concat();
        let segment = Status::INVALID_SGL_LAST_SEGMENT;
        for (offset, len, status) in [
            (0, 0, segment),
            (0, 15, segment),
            (0, 24, segment),
            (0, 80, Status::INVALID_SGL_COUNT),
            (0, u32::MAX - 15, Status::INVALID_SGL_COUNT),
            (129, 16, Status::SGL_OFFSET_INVALID),
            (u64::MAX, 16, Status::SGL_OFFSET_INVALID),
            (128, 16, segment),
            (120, 16, segment),
        ] {
            let got = ask(&tail, offset, len).map(drop);
            assert_eq!(got, Err(status.with_dnr()), "{offset} {len}");
        }
        for identifier in 0..=u8::MAX {
            let mut bad = good;
            bad[15] = identifier;
            let expected = match identifier {
                0x40 | 0x4F => Ok(()),
                0x20..=0x3F => Err(segment.with_dnr()),
                _ => Err(Status::SGL_TYPE_INVALID.with_dnr()),
            };
            assert_eq!(ask(&[good, bad].concat(), 0, 32).map(drop), expected, "{identifier:#x}");
        }
        let long = [keyed(0, 0xFF_FFFF, 7, false), keyed(0, 1, 7, false)].concat();
        let got = ask(&long, 0, 32).map(drop);
        assert_eq!(got, Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr()));
    }

    #[test]
    fn the_descriptor_count_is_limited_by_the_capsule_size() {
        assert_eq!([0, 15, 16, 48, 64, 4096].map(msdbd), [1, 1, 1, 3, 4, 4]);
    }

    proptest! {
        #[test]
        fn any_descriptor_bytes_yield_segments_of_the_total_or_an_error(
            tail in prop::collection::vec(any::<u8>(), 0..100), offset in 0u64..80,
            len in 0u32..100, total: u32
        ) {
            let mut tail = tail;
            // Types that can be valid.
            tail.iter_mut().skip(15).step_by(16).for_each(|byte| *byte = 0x40 | ((*byte & 1) * 15));
            if let Ok((sqe, mut pieces, _)) = ask(&tail, offset, len) {
                let whole = sqe.sgl().unwrap().len_bytes();
                let total = total.min(whole);
                pieces.begin(total);
                let mut sum = 0;
                while let Some((skip, remote)) = pieces.advance() {
                    prop_assert_eq!(skip, sum);
                    sum += remote.len;
                }
                prop_assert_eq!(sum, total);
            }
        }
    }
}
