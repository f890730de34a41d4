//! Fabric.
