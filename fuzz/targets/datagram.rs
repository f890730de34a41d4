//! See `tests::fuzz::datagram`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::datagram(data);
});
