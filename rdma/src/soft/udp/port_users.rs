//! Other users of UDP port 4791 of an address, from the kernel's socket table.
//!
//! Fabrics of one group share the port (`SO_REUSEPORT`), and the kernel lets every process of the same
//! user join: two groups at one address would receive each other's datagrams. (It refuses other users.) So
//! a group reads the table of sockets before it binds, and once more afterwards: the later group sees the
//! earlier one. No name or file claims an address: any user could create it and keep the daemon out, and a
//! file may survive its owner. A user without privilege can take the port itself, with any program;
//! `nvmfd doctor` names that program.
//!
//! Only sockets at exactly this address count: one at all addresses (a target) may exist beside one at a
//! single address (a host on the same machine), and the kernel delivers to the more specific one.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use nix::sys::stat::fstat;

use super::super::config::ROCE_PORT;
use super::socket::Bound;

/// Fails if a socket other than `own` is bound to the RoCE port of an address in this network
/// namespace.
pub(super) fn refuse_another(address: IpAddr, own: &[Arc<Bound>]) -> io::Result<()> {
    // The table of the thread, because the process may have several network namespaces.
    let path = match address {
        IpAddr::V4(_) => "/proc/thread-self/net/udp",
        IpAddr::V6(_) => "/proc/thread-self/net/udp6",
    };
    let table = match fs::read_to_string(path) {
        // A kernel without IPv6.
        Err(e) if e.kind() == io::ErrorKind::NotFound && address.is_ipv6() => return Ok(()),
        table => table?,
    };
    let own = own.iter().map(|bound| Ok(fstat(bound)?.st_ino));
    let own: Vec<u64> = own.collect::<nix::Result<_>>()?;
    let another = holders(&table, address).any(|inode| !own.contains(&inode));
    if another { Err(io::ErrorKind::AddrInUse.into()) } else { Ok(()) }
}

/// The inodes of the sockets at the RoCE port of an address.
/// ` 12: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  0  0 12345 2 ..`
fn holders(table: &str, address: IpAddr) -> impl Iterator<Item = u64> {
    table.lines().filter_map(move |row| {
        let mut fields = row.split_whitespace();
        let (ip, port) = fields.nth(1)?.split_once(':')?;
        let here = parse(ip)? == address && u16::from_str_radix(port, 16) == Ok(ROCE_PORT);
        if here { fields.nth(7)?.parse().ok() } else { None }
    })
}

/// An address as the kernel prints it: words in its own order of bytes.
fn parse(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::udp::port_users::*;

    const TABLE: &str = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  101: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4242 2 0000000000000000 0
  101: 0100007F:12B8 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4243 2 0000000000000000 0
  101: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 0 2 0000000000000000 0
  102: 00000000000000000000000001000000:12B7 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000  1000  0 77 2 0000000000000000 0
  103: 0100007F";

    #[test]
    fn sockets_are_found_at_their_address_and_port() {
        let of = |ip: &str| holders(TABLE, ip.parse().unwrap()).collect::<Vec<_>>();
        if cfg!(target_endian = "little") {
            assert_eq!((of("127.0.0.1"), of("::1")), (vec![4242], vec![77]));
        }
        assert_eq!((of("0.0.0.0"), of("127.0.0.2")), (vec![0], vec![]));
    }
}
