//! See `tests::fuzz::queue`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::queue(data);
});
