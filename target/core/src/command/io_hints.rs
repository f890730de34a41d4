//! I/O hints of Identify Namespace: the preferred sizes of a backing store.
//!
//! Source: NVM Command Set Specification 1.0, "Identify Namespace data structure", NSFEAT bit 4. All of them
//! are hints: other writes are correct, only slower.

use nvme::identify::IdentifyNamespace;

use nvmfd_blockdev::Geometry;

/// Sets the known fields. A size that is not a whole number of logical blocks is not reported.
pub(super) fn describe(page: &mut IdentifyNamespace, geometry: Geometry, block_shift: u8) {
    let Geometry { physical_block_bytes, optimal_io_bytes, .. } = geometry;
    // Zero-based fields report "one block" if nothing is known, which is correct as well.
    let blocks_z = |bytes: u32| blocks(bytes, block_shift).map_or(0, |blocks| blocks - 1);
    let units = [physical_block_bytes, optimal_io_bytes, geometry.discard_granularity_bytes];
    if units.iter().any(|bytes| blocks(*bytes, block_shift).is_some()) {
        page.nsfeat = page.nsfeat.with_optimal_io(true);
        page.npwg_z = blocks_z(physical_block_bytes);
        page.npwa_z = page.npwg_z;
        page.npdg_z = blocks_z(geometry.discard_granularity_bytes);
        page.npda_z = page.npdg_z;
        // A host takes 0 for "not reported", so one block cannot be its optimum.
        page.nows_z = blocks_z(optimal_io_bytes);
    }
    // Not zero-based: 0 reports no boundary, and a boundary at every block is none.
    page.noiob = blocks(geometry.boundary_bytes, block_shift).unwrap_or(0);
}

/// Returns a number of bytes in logical blocks, if it is at least one and fits.
fn blocks(bytes: u32, block_shift: u8) -> Option<u16> {
    let whole = bytes.trailing_zeros() >= block_shift.into() && bytes > 0;
    whole.then(|| u16::try_from(bytes >> block_shift).ok())?
}

#[cfg(test)]
mod tests {
    use crate::command::io_hints::*;

    fn told(geometry: Geometry, block_shift: u8) -> (bool, [u16; 6]) {
        let mut page = IdentifyNamespace::default();
        describe(&mut page, geometry, block_shift);
        let units = [page.npwg_z, page.npwa_z, page.npdg_z, page.npda_z, page.nows_z, page.noiob];
        (page.nsfeat.optimal_io(), units)
    }

    #[test]
    fn io_hints_are_zero_based_block_counts_except_the_boundary() {
        let disk = Geometry {
            physical_block_bytes: 4096,
            optimal_io_bytes: 512 << 10,
            discard_granularity_bytes: 8192,
            boundary_bytes: 64 << 10,
            ..Geometry::default()
        };
        assert_eq!(told(disk, 9), (true, [7, 7, 15, 15, 1023, 128]));
        assert_eq!(told(disk, 12), (true, [0, 0, 1, 1, 127, 16]));
    }

    #[test]
    fn unknown_or_unrepresentable_io_hints_are_not_reported() {
        assert_eq!(told(Geometry::default(), 9), (false, [0; 6]));
        // Sectors smaller than logical blocks; an optimum of odd bytes; more than 65535 blocks.
        let odd = Geometry {
            physical_block_bytes: 512,
            optimal_io_bytes: 4097,
            discard_granularity_bytes: 1 << 31,
            boundary_bytes: 1 << 30,
            ..Geometry::default()
        };
        assert_eq!(told(odd, 12), (false, [0; 6]));
        let some = Geometry { physical_block_bytes: 4096, ..odd };
        assert_eq!(told(some, 9), (true, [7, 7, 0, 0, 0, 0]));
    }
}
