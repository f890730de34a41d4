//! NVMe formats.
