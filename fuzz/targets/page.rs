//! See `tests::fuzz::page`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::page(data);
});
