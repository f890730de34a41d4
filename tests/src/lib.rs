//! What no single crate can test: end to end, vectors, guests with a stock Linux host.
