//! See `tests::fuzz::command`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tests::fuzz::command(data);
});
