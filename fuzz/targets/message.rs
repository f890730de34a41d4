//! See `tests::fuzz::message`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::message(data);
});
