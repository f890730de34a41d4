//! See `tests::fuzz::session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::session(data);
});
