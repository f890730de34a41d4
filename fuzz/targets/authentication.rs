//! See `tests::fuzz::authentication`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::authentication(data);
});
